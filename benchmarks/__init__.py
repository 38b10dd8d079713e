"""What each store costs, beside torch's own handlers."""

import warnings

# torch says so, as it is imported, to every process of an environment without NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

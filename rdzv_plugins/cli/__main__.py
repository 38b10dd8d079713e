"""``python -m rdzv_plugins.cli``: the rdzv command where its script is not on the path."""

from rdzv_plugins.cli import main

main()

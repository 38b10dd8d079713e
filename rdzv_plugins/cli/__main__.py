"""``python -m rdzv_plugins.cli``: the rdzv command if its script is not on the path."""

from rdzv_plugins.cli import main

main()

"""``python -m looseleaf.cli``."""

from looseleaf.cli import main

main()

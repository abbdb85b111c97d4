"""``python -m looseleaf.cli``."""

from looseleaf.cli import main

if __name__ == "__main__":
    main()

"""``python -m looseleaf``."""

from looseleaf.cli import main

if __name__ == "__main__":
    main()

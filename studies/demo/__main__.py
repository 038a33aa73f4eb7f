"""Command-line entry point: ``python -m studies.demo``."""

import sys

from studies.demo.command import main

if __name__ == "__main__":
    sys.exit(main())

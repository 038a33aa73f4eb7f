"""Command-line entry point of ebbtide's demo (measure, plan, train, crash and resume): ``python -m studies.demo``."""

import sys

from studies.demo.command import main

if __name__ == "__main__":
    sys.exit(main())

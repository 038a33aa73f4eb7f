"""Command-line entry point: ``python -m studies.optimality``."""

from studies.optimality.command import main

if __name__ == "__main__":
    main()

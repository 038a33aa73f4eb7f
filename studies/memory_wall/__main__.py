"""Command-line entry point: ``python -m studies.memory_wall``."""

from studies.memory_wall.command import main

if __name__ == "__main__":
    main()

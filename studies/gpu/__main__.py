"""Command-line entry point: ``python -m studies.gpu``."""

from studies.gpu.command import main

if __name__ == "__main__":
    main()

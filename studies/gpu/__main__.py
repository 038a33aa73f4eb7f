"""Command-line entry point of all checks and measurements of ebbtide that need a GPU: ``python -m studies.gpu``."""

from studies.gpu.command import main

if __name__ == "__main__":
    main()

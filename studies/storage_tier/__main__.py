"""Command-line entry point: ``python -m studies.storage_tier``."""

from studies.storage_tier.command import main

if __name__ == "__main__":
    main()

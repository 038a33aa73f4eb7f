"""Command-line entry point of the study of training with optimizer state on a disk: ``python -m
studies.storage_tier``.
"""

from studies.storage_tier.command import main

if __name__ == "__main__":
    main()

"""Command-line entry point of the study that kills training with optimizer state on drives: ``python -m
studies.storage_kills``.
"""

from studies.storage_kills.command import main

if __name__ == "__main__":
    raise SystemExit(main())

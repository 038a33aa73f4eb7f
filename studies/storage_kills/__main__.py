"""Command-line entry point of a study: training with optimizer state on drives is killed, and must resume correctly.

python -m studies.storage_kills
"""

from studies.storage_kills.command import main

if __name__ == "__main__":
    raise SystemExit(main())

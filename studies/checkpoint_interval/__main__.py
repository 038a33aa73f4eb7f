"""Command-line entry point of the study of goodput over the checkpoint interval: ``python -m
studies.checkpoint_interval``.
"""

from studies.checkpoint_interval.command import main

if __name__ == "__main__":
    raise SystemExit(main())

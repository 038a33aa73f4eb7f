"""Command-line entry point of the study that kills training and checks its checkpoints: ``python -m
studies.checkpoint_crash``.
"""

from studies.checkpoint_crash.command import main

if __name__ == "__main__":
    raise SystemExit(main())

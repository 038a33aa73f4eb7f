"""Command-line entry point: ``python -m studies.checkpoint_crash``."""

from studies.checkpoint_crash.command import main

if __name__ == "__main__":
    raise SystemExit(main())

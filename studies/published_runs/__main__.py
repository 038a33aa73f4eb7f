"""Command-line entry point of the study that predicts published training runs: ``python -m studies.published_runs``."""

from studies.published_runs.command import main

if __name__ == "__main__":
    raise SystemExit(main())

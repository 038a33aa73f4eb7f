"""Command-line entry point: ``python -m studies.front_door_kills``."""

from studies.front_door_kills.command import main

if __name__ == "__main__":
    raise SystemExit(main())

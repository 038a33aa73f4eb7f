"""Command-line entry point of the study that kills unchanged training scripts under ebbtide and resumes them: ``python
-m studies.front_door_kills``.
"""

from studies.front_door_kills.command import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Command-line entry point of the study that compares the tuner's plans with the best possible: ``python -m
studies.optimality``.
"""

from studies.optimality.command import main

if __name__ == "__main__":
    main()

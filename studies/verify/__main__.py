"""Command-line entry point: ``python -m studies.verify``."""

from studies.verify.command import main

raise SystemExit(main())

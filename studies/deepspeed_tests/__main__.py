"""Command-line entry point: ``python -m studies.deepspeed_tests``."""

from studies.deepspeed_tests.command import main

raise SystemExit(main())

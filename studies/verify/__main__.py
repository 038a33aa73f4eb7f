"""Command-line entry point of the test of `tune verify` on training with artificial defects: ``python -m
studies.verify``.
"""

from studies.verify.command import main

raise SystemExit(main())

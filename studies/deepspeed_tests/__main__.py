"""Command-line entry point of the study that runs DeepSpeed's own tests under ebbtide: ``python -m
studies.deepspeed_tests``.
"""

from studies.deepspeed_tests.command import main

raise SystemExit(main())

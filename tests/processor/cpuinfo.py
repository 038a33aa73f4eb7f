"""Replacement of py-cpuinfo for all test processes. `tests.conftest` queries the processor once.

Each CPU optimizer of DeepSpeed queries the processor's name in a separate process, which takes
over a second of a core.
"""

import json
import os


def get_cpu_info() -> dict[str, object]:
    return json.loads(os.environ["TESTS_CPU_INFO"])

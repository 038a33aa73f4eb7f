"""A replacement of py-cpuinfo for all test processes, with the processor's data that `tests.conftest` queried once.

Each CPU optimizer of DeepSpeed queries the processor's name in a separate process, which takes over a second of a core.
"""

import json
import os


def get_cpu_info() -> dict[str, object]:
    return json.loads(os.environ["TESTS_CPU_INFO"])

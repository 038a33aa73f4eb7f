"""py-cpuinfo as every process that the tests start imports it: asked once, by `tests.conftest`.

Each CPU optimizer of DeepSpeed's asks it for the processor's name, which takes over a second of a
core, in a process of its own.
"""

import json
import os


def get_cpu_info() -> dict[str, object]:
    return json.loads(os.environ["TESTS_CPU_INFO"])

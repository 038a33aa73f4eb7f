"""A check, without an engine, that the installed DeepSpeed has the private names that ebbtide uses."""

import inspect
import re
import sys
from typing import Any

from ebbtide.runtime.zero.checks import private


def missing_names() -> list[str]:
    """Return the private DeepSpeed names used by ebbtide that the installed DeepSpeed's sources do not contain.

    The sources are searched because optimizers set some attributes only while they run. A name that exists only in
    versions later than the installed one is not searched for.
    """
    import deepspeed
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from packaging.version import Version

    installed = Version(deepspeed.__version__)
    missing = []
    for owner, table in ((DeepSpeedZeroOptimizer_Stage3, "STAGE3"), (DeepSpeedZeroOptimizer, "STAGE12")):
        words = _words(owner)
        for member in getattr(private, table, ()):
            name = member.name.removeprefix(f"_{owner.__name__}")
            if Version(member.since) <= installed and name not in words:
                missing.append(member.name)
    return missing


def _words(owner: type[Any]) -> set[str]:
    modules = {cls.__module__ for cls in owner.__mro__ if cls.__module__.startswith("deepspeed")}
    return {word for name in modules for word in re.findall(r"\w+", inspect.getsource(sys.modules[name]))}

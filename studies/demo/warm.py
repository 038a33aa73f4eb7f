"""What every phase of the demo would otherwise import, read and ask again: seconds each time.

Imported once, by the process that forks the phases; it runs no thread of ours and no team of
OpenMP's, which would not survive a fork. What cannot be had is left to the phase that needs it,
which has a log to say so in.
"""

import contextlib
import importlib
import logging

import cpuinfo

from studies.bench.byte_gpt import python_sources
from studies.bench.many_engines import remember_processor

logging.disable(logging.WARNING)  # nobody's phase: no log would have it
for _name in (
    # What DeepSpeed and torch import in the middle of an engine's start.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.distributed.nn.functional",
    "torch._dynamo",
    "matplotlib.pyplot",
    "optuna",
    "ebbtide.profiler.machine",
    "ebbtide.runtime.zero.attach",
    "ebbtide.runtime.checkpoint.deepspeed.engine",
    "studies.demo.pictures",
    "studies.demo.train",
    "ebbtide.tuner.placements.planning",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
logging.disable(logging.NOTSET)

remember_processor()
for _ask in (cpuinfo.get_cpu_info, python_sources):
    with contextlib.suppress(Exception):
        _ask()

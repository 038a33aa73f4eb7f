"""Imports that all processes of the demo need, made once in the process that forks them.

No thread and no OpenMP team may be started here, because they do not survive a fork. If an import fails, the error is
ignored here. It comes up again in the process that needs the module, and is written to that process's log.
"""

import contextlib
import importlib
import logging

import cpuinfo

from studies.bench.byte_gpt import python_sources
from studies.bench.many_engines import freeze_heap, remember_processor

logging.disable(logging.WARNING)  # no phase uses this process's log
for _name in (
    # Modules that DeepSpeed and torch import while an engine starts.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.distributed.nn.functional",
    "torch._dynamo",
    "matplotlib.pyplot",
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
freeze_heap()  # otherwise the garbage collection of each process would visit all these objects, and so copy their pages

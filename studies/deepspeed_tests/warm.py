"""Imports for the server process that forks the ranks of DeepSpeed's tests.

An engine's first imports and queries of the machine take longer than most tests, so they are done once here.
"""

import contextlib

import cpuinfo
import deepspeed.runtime.zero.muon.muon_optimizer
import torch._dynamo
import unit.simple_model
from deepspeed.ops.op_builder import CPUAdamBuilder
from ebbtide.runtime.kernels import host

import studies.deepspeed_tests.attaching
from studies.bench.many_engines import answer_once

answer_once()
cpuinfo.get_cpu_info()
with contextlib.suppress(RuntimeError):  # if a machine cannot build the op, the tests report it
    CPUAdamBuilder().load()
host.load()
__all__ = ["deepspeed", "studies", "torch", "unit"]

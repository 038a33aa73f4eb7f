"""Imported once by the process that the ranks of DeepSpeed's tests are forked from."""

import contextlib

import deepspeed
import unit.simple_model
from deepspeed.ops.op_builder import CPUAdamBuilder

import studies.deepspeed_tests.attaching
from runtime.kernels import host

with contextlib.suppress(RuntimeError):  # a machine that cannot build it says so in the tests
    CPUAdamBuilder().load()
host.load()
__all__ = ["deepspeed", "studies", "unit"]

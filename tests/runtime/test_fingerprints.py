"""Tests of the runtime's warning about a plan that was made for another machine or another training: the
warning appears once and names the differences.
"""

import logging

import ebbtide.runtime
import pytest
from ebbtide.profiler.hardware import look
from ebbtide.simulator import Layer, Machine, Workload

from tests.runtime.contract.training import DEVICES, device_of, plan_for, start
from tests.runtime.test_live import machine

pytestmark = pytest.mark.usefixtures("only_rank")


def fingerprint(sizes, wire="bf16", width=2):
    layer = Layer(params=sum(sizes), forward_s=1.0, backward_s=1.0)
    return Workload(name="w", layers=(layer,), subgroups=sizes, wire_dtype=wire, grad_bytes_per_param=width).fingerprint


def this_machine():
    fields = machine().model_dump() | look("cuda" in DEVICES).fields
    return Machine.model_validate(fields)


def warnings(caplog, made_on, sizes_to_fingerprint, given=None):
    engine = start()
    sizes = tuple(int(n) for n in engine.optimizer.fp16_partitioned_groups_flat_numel)
    plan = plan_for(engine, ["host"]).model_copy(
        update={"machine_fingerprint": made_on.fingerprint, "workload_fingerprint": sizes_to_fingerprint(sizes)}
    )
    with caplog.at_level(logging.WARNING, logger="ebbtide"):
        ebbtide.runtime.attach(engine, plan, device=device_of(next(iter(DEVICES))), machine=given)
    engine.destroy()
    return [r.getMessage() for r in caplog.records if r.name == "ebbtide"]


def test_the_same_machine_and_workload_say_nothing(caplog):
    assert warnings(caplog, this_machine(), fingerprint) == []


def test_what_differs_is_named_once(caplog):
    there = this_machine().model_copy(update={"cpu_cores": 96, "host_memory_bytes": 2**40})
    said = warnings(caplog, there, lambda sizes: fingerprint(sizes, "fp16", 4), given=there)
    assert len(said) == 1
    assert "fp16 parameters with 4-byte gradients, but this engine has ZeRO-3, adam, bf16" in said[0]
    assert "CPU cores 96, here" in said[0]
    assert "host memory 1024 GiB, here" in said[0]
    assert "device " not in said[0].split("the machine")[1].split("(")[1].split(";")[0]


def test_without_the_machine_at_hand_this_one_is_described(caplog):
    there = this_machine().model_copy(update={"cpu_cores": 96})
    said = warnings(caplog, there, lambda sizes: fingerprint((*sizes, 1)))
    assert "another machine than this one (kind of device" in said[0]
    assert "another model than this one" in said[0]

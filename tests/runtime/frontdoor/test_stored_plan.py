"""Tests of the way from a profile through `tune plan --storage` to training: under a plan that stores on a
drive what memory cannot hold, training has stock DeepSpeed's results, bit for bit.
"""

import json
from pathlib import Path

from click.testing import CliRunner
from ebbtide.profiler import profile_engine
from ebbtide.runtime import session_of
from ebbtide.simulator import Plan
from ebbtide.tuner.cli import main

from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, train_step
from tests.machines import node
from tests.runtime.contract.training import assert_same, outcome, start
from tests.runtime.frontdoor.test_front_door import config_with, initialize

TWO_BLOCKS = SIZES["tiny"]  # enough subgroups, so that memory holds only some of them


def profiled(folder):
    """Profile an engine of stock DeepSpeed, and write the workload and machine files that `tune plan` reads."""
    engine, batches, numbers = start(ByteGPT(TWO_BLOCKS)), Batches(2, 32), iter(range(10**6))
    work = profile_engine(engine, lambda e: train_step(e, batches.at(next(numbers))), 2)
    engine.destroy()
    work = work.model_copy(update={"memory_peaks": {}})
    work.save(folder / "workload.json")
    # Both memories are so small that half of the state must go to the drive.
    device = work.device_base_bytes + sum(layer.activation_bytes for layer in work.layers)
    node(device_memory_bytes=2 * device).save(folder / "machine.json")
    return work, device


def planned(folder, *more):
    work, device = profiled(folder)
    arguments = [
        "plan",
        "--machine",
        f"{folder}/machine.json",
        "--workload",
        f"{folder}/workload.json",
        "--memory-margin",
        "0",
        "--gpu-memory",
        f"{device + 4 * work.params}B",
        "--host-memory",
        f"{10 * work.params}B",
        "-o",
        f"{folder}/plan.json",
        *more,
    ]
    said = CliRunner().invoke(main, arguments)
    assert said.exit_code == 0, said.output
    return Plan.load(folder / "plan.json"), said.output


def test_a_plan_of_tune_plan_that_stores_trains_with_stocks_bits(front_door, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    storage = [word for folder in folders for word in ("--storage", f"{folder}:1GB")]
    made, said = planned(tmp_path, *storage, "--endurance", "600")
    assert 0 < made.count("stored") < made.subgroup_count  # memory holds as much state as fits
    assert made.storage_shares == {str(folder): 0.5 for folder in folders}
    assert "Drives rated for 600 TB last" in said
    engine = initialize(config_with({"plan": str(tmp_path / "plan.json"), "device": "emulated"}), TWO_BLOCKS)
    assert session_of(engine).plan.placements == made.placements
    ours = outcome(engine)
    held = [sum(p.stat().st_size for p in Path(f).rglob("*.extents")) for f in folders]
    assert all(made.prediction.storage_bytes * 0.4 <= size for size in held)
    assert sum(held) <= made.prediction.storage_bytes + 2 * 3 * 4096 * made.count("stored")
    assert_same(ours, outcome(start(ByteGPT(TWO_BLOCKS))))


def test_a_config_that_offloads_to_a_drive_is_what_tune_plan_reads(front_door, tmp_path):
    config = config_with(None)
    config["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme",
        "nvme_path": str(tmp_path / "drive"),
        "pipeline_read": True,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    emitted = tmp_path / "out.json"
    made, _ = planned(tmp_path, "--ds-config", str(tmp_path / "ds.json"), "--emit-deepspeed", str(emitted))
    assert made.count("stored") > 0
    assert made.storage_dir == str(tmp_path / "drive" / "ebbtide_state")
    engine = initialize(json.loads(emitted.read_text()), TWO_BLOCKS)
    assert session_of(engine).plan.count("stored") == made.count("stored")
    assert_same(outcome(engine), outcome(start(ByteGPT(TWO_BLOCKS))))

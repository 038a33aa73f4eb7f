"""The workload of a live engine, and of a script that knows nothing of it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from profiler import profile_engine
from profiler.watcher import units
from simulator import Workload
from studies.byte_gpt import SIZES, Batches, ByteGPT, train_step
from tests.runtime.contract.training import start, train

SCRIPT = """
import sys, torch, deepspeed
from studies.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step
from studies.rank import become_only_rank
assert sys.argv[1:] == ["--lr", "1"], sys.argv
become_only_rank()
model = ByteGPT(SIZES["tiny"])
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=ds_config(1, 20_000)
)
for step in range(int(50)):
    train_step(engine, Batches(1, 32).at(step))
print("the script came to its end")
"""


def test_units_are_the_blocks_and_what_is_beside_them():
    names = [name for name, _ in units(ByteGPT(SIZES["tiny"]))]
    assert names == ["bytes_in", "positions", "blocks.0", "blocks.1", "norm", "head"]
    wrapped = torch.nn.Module()
    wrapped.model = ByteGPT(SIZES["tiny"])
    assert units(wrapped)[2][0] == "model.blocks.0"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_live_engine(only_rank, accumulation):
    engine = start(accumulation=accumulation)
    batches, numbers = Batches(2, 32), iter(range(10**6))

    def one_step(live):
        for _ in range(accumulation):
            train_step(live, batches.at(next(numbers)))

    workload = profile_engine(engine, one_step, iterations=2)
    assert workload.subgroups == tuple(engine.optimizer.fp16_partitioned_groups_flat_numel)
    assert workload.subgroup_size == 20_000
    assert sum(layer.params for layer in workload.layers) == workload.params
    assert [layer.name for layer in workload.layers][:3] == ["bytes_in", "positions", "blocks.0"]
    assert workload.gradient_accumulation_steps == accumulation
    assert workload.clip
    assert workload.forward_s > 0
    assert workload.backward_s > 0
    assert workload.stock_backward_extra_s is not None
    assert {p.phase for p in workload.memory_curve} >= {"forward", "backward", "step"}
    times = [p.t_s for p in workload.memory_curve]
    assert times == sorted(times)
    assert "backward" not in vars(engine), "the wrappers are gone"
    assert "partition_grads" not in vars(engine.optimizer)
    engine.destroy()


def test_profiling_changes_no_bit(only_rank):
    plain = start()
    expected, _ = train(plain, 12)
    plain.destroy()
    engine = start()
    batches, numbers, losses = Batches(2, 32), iter(range(10**6)), []
    profile_engine(
        engine, lambda live: losses.append(train_step(live, batches.at(next(numbers)))), 2
    )
    losses += train(engine, 12 - len(losses), first=len(losses))[0]
    engine.destroy()
    assert torch.equal(torch.stack(losses), torch.stack(expected))


def test_what_is_no_zero3_engine_is_refused():
    class Engine:
        optimizer = object()

    with pytest.raises(ValueError, match="must run ZeRO stage 3"):
        profile_engine(Engine(), lambda engine: None)
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        profile_engine(Engine(), lambda engine: None, iterations=0)


@pytest.mark.slow
def test_a_script_is_profiled_unchanged_and_stopped(deepspeed_ops, tmp_path, child_environment):
    script, out = tmp_path / "train.py", tmp_path / "workload.json"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "profiler.script", "--out", str(out), "--iterations", "2",
               "--", str(script), "--lr", "1"]  # fmt: skip
    done = subprocess.run(
        command, env={**child_environment, "PYTHONPATH": str(root)}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the script came to its end" not in done.stdout
    assert Workload.load(out).subgroup_size == 20_000


def test_a_script_that_is_not_there():
    from profiler.script import main

    with pytest.raises(SystemExit) as ended:
        main(["--out", "w.json", "--", "/nowhere/train.py"])
    assert ended.value.code == 2

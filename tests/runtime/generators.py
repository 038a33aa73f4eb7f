"""Helpers for tests of random generators: functions that compare the states of all generators of a process, and
functions that train with dropout, which draws from these generators.
"""

import functools
import os
import random
from contextlib import contextmanager

import deepspeed
import ebbtide.profiler
import ebbtide.runtime
import numpy as np
import pytest
import torch

from studies.bench.byte_gpt import ds_config

STEPS = 6  # number of steps: "auto" switches after four
QUICK = {"seconds": 0.2, "elements": 20_000}  # settings of a measurement whose result does not matter


def states():
    """Return the states of all random generators of this process as a dict from names to comparable values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    found = {"python": random.getstate(), "numpy": (kind, keys.tolist(), rest), "torch": torch.get_rng_state().tolist()}
    for device in range(torch.cuda.device_count()):
        found[f"cuda:{device}"] = torch.cuda.get_rng_state(device).tolist()
    return found


@contextmanager
def unchanged(what):
    """Check that the code in the block leaves every random generator unchanged."""
    before = states()
    yield
    after = states()
    moved = [name for name in before if before[name] != after[name]]
    assert not moved, f"{what} drew from the generators of {moved}"


def measure_quickly(monkeypatch, cache):
    """Shorten the measurements with which ``plan="auto"`` profiles this machine to a fraction of a second."""
    # The profile is cached in the folder ``cache`` instead of the user's cache.
    monkeypatch.setattr("ebbtide.profiler.machine._cache_path", lambda *_: cache / "machine.json")
    quick = functools.partial(ebbtide.profiler.measure_machine, **QUICK)
    monkeypatch.setattr(ebbtide.profiler, "measure_machine", quick)


def engine_with_dropout(plan, stage):
    """Return an engine on a small seeded model with dropout. Without a plan it is stock DeepSpeed's."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    layers = [torch.nn.Linear(32, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 32), torch.nn.Dropout(0.3)]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(32, 8))
    start = deepspeed.initialize if plan is None else functools.partial(ebbtide.runtime.initialize, plan=plan)
    config = ds_config(subgroup_size=1_000, stage=stage)
    return start(model=module, model_parameters=module.parameters(), config=config)[0]


def step(engine):
    """Train one step on a batch that is drawn from the host's three random generators (Python, numpy, torch),
    and return the loss.
    """
    batch = torch.randn(4, 32) * random.random() * np.random.rand()
    loss = engine(batch.to(engine.device, torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def losses(plan, stage):
    engine = engine_with_dropout(plan, stage)
    found = [step(engine) for _ in range(STEPS)]
    engine.destroy()
    return found


def main(folder, stage):
    """Print, as one of two ranks (see `forked_ranks`), whether two runs with ``plan="auto"`` have the losses of stock
    DeepSpeed.
    """
    stage = int(stage)
    stock = losses(None, stage)
    with pytest.MonkeyPatch.context() as patch:
        measure_quickly(patch, folder)
        same = [losses("auto", stage) == stock for _ in ("measured", "cached")]
    print(f"rank {os.environ['RANK']}: {same}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

"""Tests that the lean hooks on modules ask for and release the same parameters, at the same moments, as DeepSpeed's."""

import pytest
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator as deepspeed_coordinator
from ebbtide.runtime.zero.checks import coordinator
from ebbtide.runtime.zero.hooks import lean as lean_hooks

from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.contract.rank_scripts import played
from tests.runtime.contract.training import attached, device_of, start, train

DEVICE = device_of("emulated").name
AWAY = {"offload_param": {"device": "cpu"}}


class ByIdentity(list):
    """A list that finds items by identity, since parameters compare by value."""

    def index(self, item):
        return next(number for number, own in enumerate(self) if own is item)


def seen(seed, folder, lean, monkeypatch):
    """Play a script, and return the values that it saw, and each request for parameters with those there at the time.

    The statuses are DeepSpeed's, so this tells what lies in GPU memory at each moment.
    """
    asked, quick = [], []

    def watch(engine):
        gathers = engine.optimizer._gathers
        assert gathers.lean.on == lean
        fetch, params = gathers.partitions.fetch, ByIdentity(gathers.parameters)

        def noted(wanted, executor):
            there = [number for number, p in enumerate(params) if p.ds_status.name == "AVAILABLE"]
            asked.append((sorted(params.index(p) for p in wanted), there))
            return fetch(wanted, executor)

        gathers.partitions.fetch = noted
        if lean:
            own = engine.optimizer.parameter_offload.get_param_coordinator()
            monkeypatch.setattr(own, "fetch", counted(own.fetch), raising=False)

    def counted(fetch):
        return lambda *args, **kwargs: quick.append(args) or fetch(*args, **kwargs)

    notes = played(seed, folder, 0, True, watch)
    assert bool(quick) == lean
    return notes, asked


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_same_parameters_are_asked_for_and_there_as_with_deepspeeds_hooks(only_rank, seed, tmp_path, monkeypatch):
    lean = seen(seed, tmp_path / "lean", lean=True, monkeypatch=monkeypatch)
    monkeypatch.setattr(lean_hooks, "quickened", lambda *_: None)
    stock = seen(seed, tmp_path / "stock", lean=False, monkeypatch=monkeypatch)
    assert lean[1] == stock[1]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(lean[0], stock[0], strict=True))


def test_a_coordinator_that_is_not_known_is_left_alone(only_rank, monkeypatch):
    monkeypatch.setattr(coordinator, "KNOWN", {})
    ours = attached(start(**AWAY), ["host"], DEVICE)
    assert not ours.optimizer._gathers.lean.on
    used = type(ours.optimizer.parameter_offload.get_param_coordinator())
    assert used is deepspeed_coordinator.PartitionedParameterCoordinator
    train(ours, 2)
    ours.destroy()


def test_the_hooks_may_change_between_forward_and_backward(only_rank):
    losses = []
    for changes in (False, True):
        engine = attached(start(**AWAY), ["host"], DEVICE)
        train(engine, 3)
        batch = Batches(2, SIZES["tiny"].sequence).at(3, engine.device)
        loss = engine(*batch)
        if changes:
            engine.optimizer._gathers.lean.end()
        engine.backward(loss)
        engine.step()
        losses.append(engine(*batch).detach().clone())
        engine.destroy()
    assert torch.equal(*losses)

"""Tests that every way in which a script can read or write training state under a plan waits for the
updates in progress and shows stock DeepSpeed's values.
"""

import copy

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.lane import BackgroundError

from studies.bench.byte_gpt import SIZES
from tests.runtime.contract.test_bits import ReadsAnothersParameter
from tests.runtime.contract.training import DEVICES, attached, outcome, start, train

pytestmark = pytest.mark.usefixtures("only_rank")
MIX = ["host", "device", "resident", "stored"]
LAST = list(DEVICES)[-1]


def read_everything(engine):
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
    )

    found = {}
    for name, p in engine.module.named_parameters():
        found[name, "fp32"] = safe_get_full_fp32_param(p).clone()
        found[name, "grad"] = safe_get_full_grad(p).clone()
        found[name, "local fp32"] = safe_get_local_fp32_param(p).clone()
        found[name, "local grad"] = safe_get_local_grad(p).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[name, key] = safe_get_full_optimizer_state(p, key).clone()
            found[name, "local", key] = safe_get_local_optimizer_state(p, key).clone()
    return found


def assert_equal(ours, stock):
    assert ours.keys() == stock.keys()
    different = [key for key in stock if not torch.equal(ours[key], stock[key])]
    assert different == []


def test_reads_between_backward_and_step_and_after_step():
    from studies.bench.byte_gpt import SIZES, Batches

    seen = []
    for engine in (start(), attached(start(), MIX, LAST)):
        train(engine, 2)
        batch = Batches(2, SIZES["tiny"].sequence).at(2, engine.device)
        engine.backward(engine(*batch))
        before = read_everything(engine)
        engine.step()
        after = read_everything(engine)
        later = outcome(engine, 2, first=3)
        seen.append((before, after, later))
    for ours, stock in zip(seen[1][:2], seen[0][:2], strict=True):
        assert_equal(ours, stock)
    assert torch.equal(seen[1][2][1], seen[0][2][1])


@pytest.mark.parametrize(
    ("device", "moment"),
    [(LAST, "between backward and step"), (LAST, "after step"), (next(iter(DEVICES)), "between backward and step")],
)
def test_writes_count(device, moment):
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_optimizer_state,
    )

    from studies.bench.byte_gpt import SIZES, Batches

    results = []
    for engine in (start(), attached(start(), MIX, device, prefetch=2)):
        train(engine, 2)
        batch = Batches(2, SIZES["tiny"].sequence).at(2, engine.device)
        engine.backward(engine(*batch))
        if moment == "after step":
            engine.step()
        for number, p in enumerate(engine.module.parameters()):
            shape = p.ds_shape
            if number % 4 == 0:
                safe_set_full_fp32_param(p, torch.full(shape, 0.25))
            elif number % 4 == 1:
                safe_set_full_optimizer_state(p, torch.full(shape, 0.01), "exp_avg_sq")
            elif number % 4 == 2:
                safe_set_local_optimizer_state(p, torch.full((p.ds_numel,), 0.02), "exp_avg")
            elif moment != "after step":
                safe_set_full_grad(p, torch.full(shape, 1e-3))
        if moment != "after step":
            engine.step()
        results.append(outcome(engine, 2, first=3))
    from tests.runtime.contract.training import assert_same

    assert_same(results[1], results[0])


def test_gathered_parameters_eval_and_state_dicts():
    from deepspeed.runtime.zero import GatheredParameters

    from studies.bench.byte_gpt import SIZES, Batches

    seen = []
    for engine in (start(), attached(start(), MIX, LAST, locations=["device", "host"])):
        notes = []

        def look(engine, number, notes=notes):
            engine.eval()
            with torch.no_grad():
                batch = Batches(2, SIZES["tiny"].sequence).at(number + 100, engine.device)
                notes.append(engine(*batch).clone())
            engine.train()
            with GatheredParameters(list(engine.module.parameters())):
                notes.extend(p.detach().clone() for p in engine.module.parameters())
            consolidated = engine._zero3_consolidated_16bit_state_dict()
            notes.extend(v.clone() for v in consolidated.values())
            with GatheredParameters(list(engine.module.head.parameters()), modifier_rank=0):
                engine.module.head.weight.data.mul_(0.5)  # the parameter that the next forward uses

        notes.extend(outcome(engine, 3, each=look)[1])
        seen.append(notes)
    assert len(seen[0]) == len(seen[1]) > 30
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("device", list(DEVICES))
def test_a_failing_op_surfaces_and_nothing_hangs(device):
    engine = attached(start(), MIX, device, seed=None)
    train(engine, 1)

    def fail(op):
        if op.subgroup == 1:
            raise OSError("the disk of this test has died")

    session_of(engine).executor.gradients.before_op = fail
    with pytest.raises(BackgroundError) as failure:
        train(engine, 2)
    assert "the disk of this test has died" in str(failure.value.__cause__)
    with pytest.raises(BackgroundError):
        engine.optimizer.wait()
    with pytest.raises(BackgroundError):
        engine.destroy()


def shown_after_a_step(engine):
    """Yield all tensors of an engine that a script can read right after a step without DeepSpeed's getter functions."""
    optimizer = engine.optimizer
    yield from engine.module.state_dict().values()
    yield from engine.module.blocks[0].state_dict().values()
    yield from engine.module_state_dict().values()
    yield from optimizer.fp32_partitioned_groups_flat
    yield from optimizer.fp16_partitioned_groups_flat
    for state in optimizer.state.values():
        yield from (state["exp_avg"], state["exp_avg_sq"])


def waited_for(engine):
    """Call `wait` of the engine's optimizer, and then yield the parameter tensors that a script may already hold.

    `wait` must come first, because reading such a tensor does not wait until the tensor's update has ended.
    """
    if hasattr(engine.optimizer, "wait"):
        engine.optimizer.wait()
    for parameter in engine.module.parameters():
        yield from (parameter.data, parameter.ds_tensor)


@pytest.mark.parametrize("read", [shown_after_a_step, waited_for])
def test_what_is_read_right_after_a_step_is_new_and_whole(read):
    def new():
        # DeepSpeed traces the forward of this model by the order of its gathers.
        return start(model=ReadsAnothersParameter(SIZES["tiny"]))

    seen = []
    for engine in (new(), attached(new(), MIX, list(DEVICES)[-1])):
        notes = []

        def look(engine, number, notes=notes):
            if number % 2 == 0:
                notes.extend(t.detach().clone() for t in read(engine))

        seen.append((notes, outcome(engine, 4, each=look)))
    (stock_notes, stock), (our_notes, ours) = seen
    assert len(stock_notes) == len(our_notes) > 60
    assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(stock_notes, our_notes, strict=True))
    assert torch.equal(ours[1], stock[1])


def test_parameters_have_stocks_shapes_right_after_a_step_and_never_an_old_value():
    # Under ZeRO-3 parameters have stock DeepSpeed's shapes right after a step, and the new values, or NaN until their
    # update has ended. They never have the values from before the step. The shapes matter because a Trainer counts
    # ``p.numel()`` at that time for its `total_flos`.
    reference, ours = start(), attached(start(), MIX, list(DEVICES)[-1])
    for number in range(2):
        for engine in (reference, ours):
            train(engine, 1, first=number)
        shown = 0
        pairs = zip(ours.module.parameters(), reference.module.parameters(), strict=True)
        for a, b in pairs:
            assert (a.shape, a.numel(), a.dtype) == (b.shape, b.numel(), b.dtype)
            shown += b.numel() > 0
            assert torch.equal(a.data, b.data) or bool(a.data.isnan().all())
        assert shown > 5, "the test needs parameters that stock DeepSpeed keeps gathered"
        ours.optimizer.wait()
    reference.destroy()
    ours.destroy()


def shown_by(engine):
    return {name: p.data.clone() for name, p in engine.module.named_parameters()}


def shown_around_checkpoints(engine, folder, **options):
    engine.save_checkpoint(str(folder))
    yield shown_by(engine)
    engine.load_checkpoint(str(folder), **options)
    yield shown_by(engine)


@pytest.mark.parametrize("options", [{}, {"load_module_only": True}])
def test_small_parameters_have_their_values_around_checkpoints(tmp_path, options):
    # The losses of the next steps must be stock DeepSpeed's too. The plan keeps no state on a drive, since updates of
    # such state may still run after a save.
    seen, memory = [], [placement for placement in MIX if placement != "stored"]
    for name, attach in (("stock", lambda e: e), ("ours", lambda e: attached(e, memory, LAST))):
        engine = attach(start(model=ReadsAnothersParameter(SIZES["tiny"])))
        train(engine, 2)
        shown = list(shown_around_checkpoints(engine, tmp_path / name, **options))
        seen.append((shown, outcome(engine, 3, first=2)))
    (stock_shown, stock), (our_shown, ours) = seen
    for a, b in zip(our_shown, stock_shown, strict=True):
        assert sum(value.numel() > 0 for value in b.values()) > 5
        assert_equal(a, b)
    assert torch.equal(ours[1], stock[1])


def test_small_parameters_have_their_values_once_stored_state_has_arrived(tmp_path):
    # Check the small parameters, which ZeRO-3 keeps whole on each rank, if all optimizer state is on a drive. They must
    # have stock DeepSpeed's values after a checkpoint save and a `wait`. The save returns while updates may still run.
    # Until the `wait`, the parameters' ``.data`` is NaN, so that a script cannot mistake old values for new ones.
    shown = []
    for attach in (lambda e: e, lambda e: attached(e, ["stored"], LAST)):
        engine = attach(start(model=ReadsAnothersParameter(SIZES["tiny"])))
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path / str(len(shown))))
        getattr(engine.optimizer, "wait", lambda: None)()
        small = [p for p in engine.module.parameters() if p.ds_persist]
        shown.append({str(number): p.data.clone() for number, p in enumerate(small)})
        engine.destroy()
    assert len(shown[0]) > 5
    assert_equal(shown[1], shown[0])


def test_a_copy_of_the_module_has_stocks_values():
    # Normally the gather of a parameter waits for the parameter's update. A deep copy gathers no parameter, so the copy
    # itself must wait for the updates.
    seen = []
    for engine in (start(), attached(start(), MIX, LAST)):
        train(engine, 2)
        copied = copy.deepcopy(engine.module)
        seen.append({name: p.data.clone() for name, p in copied.named_parameters()})
        engine.destroy()
    assert_equal(seen[1], seen[0])


def test_the_door_shut():
    import ebbtide.runtime

    from tests.runtime.contract.training import device_of, plan_for

    reference, ours = start(), start()
    plan = plan_for(ours, MIX, overlap_forward=True)
    ebbtide.runtime.attach(ours, plan, device=device_of(list(DEVICES)[-1]), overlap_forward=False)
    for engine in (reference, ours):
        train(engine, 3)
    for a, b in zip(ours.module.parameters(), reference.module.parameters(), strict=True):
        assert torch.equal(a.data, b.data)
        assert torch.equal(a.ds_tensor, b.ds_tensor)
    reference.destroy()
    ours.destroy()


def test_resident_state_is_shown_below_zero_3():
    engines = start(stage=2), attached(start(stage=2), ["resident"], list(DEVICES)[-1])
    for engine in engines:
        train(engine, 2)
    stock, ours = (engine.optimizer for engine in engines)
    for a, b in zip(*(o.single_partition_of_fp32_groups for o in (ours, stock)), strict=True):
        assert torch.equal(a, b)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[a][key], stock.state[b][key])
    for engine in engines:
        engine.destroy()


def test_a_steady_step_waits_for_no_gated_attribute(monkeypatch):
    # A read of certain attributes of DeepSpeed's optimizer waits for these updates. If DeepSpeed read such an attribute
    # in every step, updates would not overlap with the forward pass.
    from ebbtide.runtime.zero.stage3 import EbbtideStage3

    engine = attached(start(), ["host"], list(DEVICES)[-1])
    train(engine, 2)
    waits = []
    monkeypatch.setattr(EbbtideStage3, "publish", waits.append)
    train(engine, 2, first=2)
    monkeypatch.undo()
    assert waits == []
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_the_basic_optimizers_state_dict_is_new_and_whole(stage):
    seen = []
    for engine in (start(stage=stage), attached(start(stage=stage), MIX, LAST)):
        train(engine, 2)
        state = engine.basic_optimizer.state_dict()["state"]
        seen.append({(i, k): v.clone() for i, s in state.items() for k, v in s.items() if torch.is_tensor(v)})
        engine.destroy()
    assert any(value.abs().sum() > 0 for value in seen[0].values())
    assert_equal(seen[1], seen[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_load_where_the_optimizers_files_were_deleted(stage, tmp_path):
    seen = []
    for name, attach in (("stock", lambda e: e), ("ours", lambda e: attached(e, MIX, LAST))):
        engine = attach(start(stage=stage))
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path / name), tag="a")
        if name == "ours":
            engine.checkpoint_engine.wait()
        for path in (tmp_path / name / "a").glob("*optim_states.pt"):
            path.unlink()
        train(engine, 1, first=2)
        engine.load_checkpoint(str(tmp_path / name), load_module_only=True)
        seen.append(shown_by(engine))
        engine.destroy()
    assert_equal(seen[1], seen[0])


@pytest.mark.parametrize("pattern", [["stored"], MIX])
def test_weights_load_without_the_optimizers_states(pattern, tmp_path):
    seen = []
    for name, attach in (("stock", lambda e: e), ("ours", lambda e: attached(e, pattern, LAST))):
        engine = attach(start())
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path / name))
        train(engine, 1, first=2)
        engine.load_checkpoint(str(tmp_path / name), load_optimizer_states=False)
        seen.append((shown_by(engine), outcome(engine, 3, first=2)))
    assert_equal(seen[1][0], seen[0][0])
    assert_equal(seen[1][1][0], seen[0][1][0])
    assert torch.equal(seen[1][1][1], seen[0][1][1])

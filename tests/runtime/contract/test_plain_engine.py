"""Tests of the runtime with an engine of plain torch: the results equal those of torch's AdamW, bit for bit."""

import ast
import threading
from pathlib import Path

import pytest
import torch
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from ebbtide.simulator import Plan
from ebbtide.simulator.schedule import OpKind
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tests.runtime import plain_engine
from tests.runtime.contract.training import delays
from tests.runtime.plain_engine import ADAMW, EmulatedTorch, PlainEngine, UnifiedTorch, cut

SUBGROUP = 1500
STEPS = 4
PATTERNS = {
    "host": ["host"],
    "device": ["device"],
    "resident": ["resident"],
    "mixed": ["host", "device", "resident", "device"],
}


def model():
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(24, 24) for _ in range(4)]
    layers = [torch.nn.Embedding(50, 24), *blocks, torch.nn.Linear(24, 50)]
    return torch.nn.Sequential(*layers).bfloat16()


def loss_of(module, number):
    tokens = torch.randint(0, 50, (6, 9), generator=torch.Generator().manual_seed(number))
    predicted = module(tokens[:, :-1]).flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(predicted, tokens[:, 1:].flatten())


def torch_alone(steps=STEPS, clip=None, accumulation=1):
    """Train in a plain loop with `torch.optim.AdamW`, without ebbtide. Return masters and moments, parameters,
    and losses.
    """
    module = model()
    groups = cut(list(module.parameters()), SUBGROUP)
    masters = [torch.nn.Parameter(torch.cat([p.detach().flatten() for p in group]).float()) for group in groups]
    optimizer, losses = torch.optim.AdamW(masters, foreach=False, **ADAMW), []
    for step in range(steps):
        for micro in range(accumulation):
            losses.append(loss_of(module, step * accumulation + micro))
            losses[-1].backward()
        gradients = [p.grad.float() for p in module.parameters()]
        if clip is not None:
            norm = get_total_norm(gradients, foreach=False)
            named = [torch.nn.Parameter(g) for g in gradients]
            for parameter, gradient in zip(named, gradients, strict=True):
                parameter.grad = gradient
            clip_grads_with_norm_(named, clip, norm, foreach=False)
        every = iter(gradients)
        for master, group in zip(masters, groups, strict=True):
            master.grad = torch.cat([next(every).flatten() for _ in group])
        optimizer.step()
        for master, group in zip(masters, groups, strict=True):
            parts = master.detach().split([p.numel() for p in group])
            for param, part in zip(group, parts, strict=True):
                param.data.copy_(part.view_as(param))
                param.grad = None
    kept = [optimizer.state[m] for m in masters]
    state = [(m.detach(), s["exp_avg"], s["exp_avg_sq"]) for m, s in zip(masters, kept, strict=True)]
    return state, [p.detach() for p in module.parameters()], losses


def planned(pattern, overlap=True, **fields):
    count = len(cut(list(model().parameters()), SUBGROUP))
    placements = [pattern[i % len(pattern)] for i in range(count)]
    slots = min(2, placements.count("device"))
    return Plan(
        subgroup_size=SUBGROUP,
        placement=Plan.runs(placements),
        staging_slots=slots,
        prefetch=min(1, slots),
        overlap_forward=overlap,
        **fields,
    )


def engine_of(pattern, kind=EmulatedTorch, overlap=True, **settings):
    engine = PlainEngine(model(), planned(pattern, overlap), kind(), **settings)
    engine.session.executor.gradients.before_op = delays(1, 0.001)
    return engine


def train(engine, steps=STEPS, first=0):
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.accumulation):
            losses.append(loss_of(engine.model, step * engine.accumulation + micro))
            engine.backward(losses[-1])
        engine.step()
    return losses


def assert_same(engine, losses, expected):
    engine.publish()
    state, parameters, stock_losses = expected
    for number, stock in enumerate(state):
        assert all(map(torch.equal, engine.saved_state(number), stock)), f"subgroup {number}"
    assert all(map(torch.equal, engine.model.parameters(), parameters))
    assert torch.equal(torch.stack(losses), torch.stack(stock_losses[-len(losses) :]))
    engine.session.close()


@pytest.mark.parametrize("kind", [UnifiedTorch, EmulatedTorch])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_placement_has_torch_s_bits(pattern, kind):
    engine = engine_of(PATTERNS[pattern], kind)
    assert_same(engine, train(engine), torch_alone())


@pytest.mark.parametrize("overlap", [True, False])
def test_clipping_and_accumulation_have_torch_s_bits(overlap):
    settings = {"clip": 0.05, "accumulation": 3}
    engine = engine_of(PATTERNS["mixed"], overlap=overlap, **settings)
    clipped = torch_alone(**settings)
    assert not torch.equal(clipped[0][0][1], torch_alone(accumulation=3)[0][0][1])  # clipping has an effect
    assert_same(engine, train(engine), clipped)


def test_a_forward_waits_for_the_updates_of_its_own_parameters_only():
    engine = engine_of(["host"])
    last, go_on = len(engine.groups) - 1, threading.Event()
    held = (OpKind.UPDATE_HOST, last)
    engine.session.executor.gradients.before_op = lambda op: (op.kind, op.subgroup) == held and go_on.wait(60)
    losses = train(engine, 1)
    engine.model[0](torch.tensor([1]))  # the embedding's parameters are subgroup 0
    still_running = engine.session.executor.busy
    go_on.set()
    assert still_running
    assert_same(engine, losses + train(engine, STEPS - 1, 1), torch_alone())


def test_an_engine_that_forgets_to_close_its_window_is_told():
    engine = engine_of(["host"])
    engine.close_window = lambda: None
    with pytest.raises(RuntimeError, match=r"close_window\(\) must be called"):
        train(engine, 1)
    engine.session.close()


def test_another_plan_between_steps_changes_no_bit():
    engine = engine_of(PATTERNS["mixed"], clip=0.05)
    losses = train(engine, 2)
    engine.session.switch(planned(["resident", "host"]))
    assert_same(engine, losses + train(engine, STEPS - 2, 2), torch_alone(clip=0.05))


def test_a_checkpoint_written_during_training_resumes_with_the_same_bits(tmp_path):
    engine = engine_of(PATTERNS["mixed"], clip=0.05)
    train(engine, 2)
    job = engine.save(tmp_path, "two", bytes_per_s=100_000)
    train(engine, STEPS - 2, 2)  # updates overwrite state that is not written yet
    assert job.wait(60)
    assert job.failure is None
    engine.session.close()
    assert [entry.status for entry in list_checkpoints(tmp_path)] == ["committed"]
    assert verify(tmp_path, "two") == []
    resumed = engine_of(["device"], clip=0.05)
    resumed.load(tmp_path / "two")
    assert resumed.steps == 2
    assert_same(resumed, train(resumed, STEPS - 2, 2), torch_alone(clip=0.05))


def test_it_imports_no_deepspeed():
    source = Path(plain_engine.__file__).read_text()
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any("deepspeed" in name or ".zero" in name for name in names)

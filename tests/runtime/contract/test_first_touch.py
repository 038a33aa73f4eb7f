"""Tests that parameters under ZeRO-1 and 2 wait at their first use, whatever code uses them first.

The updates of a step are held back until something waits for one. A read that does not wait would show NaN.
"""

import copy
import functools
import io
import multiprocessing.reduction
import pickle
import threading

import ebbtide.runtime
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.lane import BackgroundError
from ebbtide.runtime.execution import first_touch
from ebbtide.runtime.execution.first_touch import FirstTouch, Pending
from ebbtide.runtime.zero.stage12 import EbbtideStage2
from ebbtide.simulator.schedule import OpKind
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint, dlpack

from studies.bench.byte_gpt import SIZES, Batches, train_step
from tests.runtime.contract.small_model import SmallModel
from tests.runtime.contract.training import DEVICES, assert_same, attached, device_of, outcome, plan_for, start, train

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif("emulated" not in DEVICES, reason="holds back updates on emulated streams"),
]
MIX = ["host", "device", "resident"]
HELD = {OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE, OpKind.PARAMETER_H2D}


class Holding:
    """A switch that holds back an engine's updates after each step, until some code waits for one."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.go, self.waits = engine, threading.Event(), 0
        self.go.set()
        wait = FirstTouch._wait

        def waited(touch, subgroups):
            if subgroups:
                self.waits += 1
                self.go.set()
            wait(touch, subgroups)

        publish = EbbtideStage2.publish

        def published(optimizer):
            self.waits += 1
            self.go.set()
            publish(optimizer)

        monkeypatch.setattr(FirstTouch, "_wait", waited)
        monkeypatch.setattr(EbbtideStage2, "publish", published)
        session_of(engine).executor.gradients.before_op = self._hold

    def _hold(self, op):
        if op.kind in HELD:
            assert self.go.wait(60)

    def step(self, number=0):
        engine = self.engine
        engine.backward(engine(*batch(engine, number)))
        self.go.clear()
        self.waits = 0
        engine.step()
        assert self.waits == 0


def batch(engine, number):
    return Batches(2, SIZES["tiny"].sequence).at(number, engine.device)


def stock_step(engine, number=0):
    train_step(engine, batch(engine, number))


class Doubled(torch.autograd.Function):
    """A function of autograd that uses its parameter as an array of numpy, without functions of torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.float().numpy() * 2)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x


def gradient_of(loss, p):
    return torch.autograd.grad(loss, p)[0]


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_place(call):
    with torch.no_grad():
        call()


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found


def traced(w):
    x = torch.ones(1, dtype=w.dtype)
    return torch.jit.trace(lambda x: x + w, x)(x)


def written(p, call):
    in_place(call)
    return p.detach().clone()


def new_like(p):
    made = type(p)(p.detach().clone())
    assert type(made) is nn.Parameter
    return made


def plain(value):
    assert type(value) is nn.Parameter
    return value


# Reads by a script, of a parameter p that it has held since before the step: what, and how.
READS = {
    "data": lambda e, p: p.data,
    "detach": lambda e, p: p.detach(),
    "clone": lambda e, p: p.clone(),
    "operator": lambda e, p: p + 1,
    "reflected operator": lambda e, p: 2 * p,
    "matmul": lambda e, p: p.T @ p,
    "comparison": lambda e, p: p == p.abs(),
    "index": lambda e, p: p[0],
    "iteration": lambda e, p: list(p),
    "len": lambda e, p: len(p),
    "bool": lambda e, p: bool(p[0, 0] > 0),
    "contains": lambda e, p: 0.5 in p,
    "item": lambda e, p: p.sum().item(),
    "tolist": lambda e, p: p.tolist(),
    "format": lambda e, p: f"{p[0, 0]:.6f}",
    "norm": lambda e, p: p.norm(),
    "linalg": lambda e, p: torch.linalg.vector_norm(p),
    "lerp": lambda e, p: torch.zeros_like(p.detach()).lerp(p, 0.5),
    "stack": lambda e, p: torch.stack([p, p]),
    "cat in a tuple": lambda e, p: torch.cat((p, p)),
    "einsum": lambda e, p: torch.einsum("ij,ik->jk", p, p),
    "where": lambda e, p: torch.where(p > 0, p, 0),
    "copy_ from it": lambda e, p: written(p, lambda: torch.empty(p.shape, dtype=p.dtype).copy_(p)),
    "foreach": lambda e, p: torch._foreach_mul([p], 2.0),
    "foreach lerp_": lambda e, p: written(
        p, lambda: torch._foreach_lerp_([torch.zeros(p.shape, dtype=p.dtype)], [p], 0.5)
    ),
    "total norm": lambda e, p: nn.utils.get_total_norm([p]),
    "parameters_to_vector": lambda e, p: nn.utils.parameters_to_vector(e.module.parameters()),
    "flatten": lambda e, p: torch._utils._flatten_dense_tensors([p]),
    "view": lambda e, p: p.view(-1),
    "as_subclass": lambda e, p: p.as_subclass(torch.Tensor),
    "to": lambda e, p: p.to(torch.float64),
    "cpu": lambda e, p: p.cpu(),
    "numpy": lambda e, p: p.detach().float().numpy(),
    "asarray": lambda e, p: np.asarray(p.detach().float()),
    "untyped_storage": lambda e, p: bytes(p.untyped_storage())[:16],
    "storage_offset": lambda e, p: p.storage_offset(),
    "data_ptr": lambda e, p: p.data_ptr() == p.data.data_ptr(),
    "is_contiguous": lambda e, p: (p.is_contiguous(), p.stride()),
    "to_dlpack": lambda e, p: dlpack.from_dlpack(dlpack.to_dlpack(p)),
    "__dlpack__": lambda e, p: torch.from_dlpack(p.detach().__dlpack__()),
    "numpy's dlpack": lambda e, p: np.from_dlpack(p.detach().float()),
    "set_": lambda e, p: torch.empty(0, dtype=p.dtype).set_(p.data),
    "state_dict": lambda e, p: e.module.state_dict(),
    "state_dict of a part": lambda e, p: e.module.first.state_dict(),
    "engine's state_dict": lambda e, p: e.module_state_dict(),
    "deepcopy": lambda e, p: plain(copy.deepcopy(p)),
    "copy": lambda e, p: copy.copy(p).detach(),
    "pickle": lambda e, p: pickle.loads(pickle.dumps(p.detach())),
    "save": lambda e, p: saved(e.module.state_dict()),
    "new of its type": lambda e, p: new_like(p),
    "mp pickle": lambda e, p: len(multiprocessing.reduction.ForkingPickler.dumps(p)) > 0,
    "linear": lambda e, p: F.linear(torch.ones(2, p.shape[1], dtype=p.dtype), p),
    "embedding": lambda e, p: F.embedding(torch.tensor([1, 2]), p),
    "attention": lambda e, p: F.scaled_dot_product_attention(p[None], p[None], p[None]),
    "layer_norm": lambda e, p: F.layer_norm(p, p.shape[-1:], p[0]),
    "conv": lambda e, p: F.conv1d(torch.ones(1, p.shape[1], 4, dtype=p.dtype), p[:, :, None]),
    "aten": lambda e, p: torch.ops.aten.add.Tensor(p, p),
    "nn.init": lambda e, p: written(p, lambda: nn.init.constant_(p, 0.25)),
    "write to data": lambda e, p: written(p, lambda: p.data.mul_(0.5)),
    "new data": lambda e, p: written(p, lambda: setattr(p, "data", p.data * 0.5)),
    "backward": lambda e, p: gradient_of((p * p).sum(), p),
    "checkpoint": lambda e, p: checkpoint.checkpoint(
        lambda x: x @ p, torch.ones(1, p.shape[0], dtype=p.dtype), use_reentrant=False
    ),
    "autograd.Function": lambda e, p: gradient_of(Doubled.apply(p).sum(), p),
    "functional_call": lambda e, p: torch.func.functional_call(
        e.module, dict(e.module.named_parameters()), batch(e, 5)
    ),
    "func.grad": lambda e, p: torch.func.grad(lambda w: (w * w).sum())(p),
    "func.grad of a dict": lambda e, p: torch.func.grad(lambda d: (d["w"] * d["w"]).sum())({"w": p}),
    "func.vjp": lambda e, p: torch.func.vjp(lambda w: w * w, p)[0],
    "func.jvp": lambda e, p: torch.func.jvp(lambda w: w * w, (p,), (torch.ones_like(p),)),
    "func.hessian": lambda e, p: torch.func.hessian(lambda w: (w * w).sum())(p[0].detach()),
    "vmap": lambda e, p: torch.vmap(lambda row: row.sum())(p),
    "vmap around": lambda e, p: torch.vmap(lambda row: (row * p).sum())(torch.ones(2, p.shape[1], dtype=p.dtype)),
    "all_reduce": lambda e, p: written(p, lambda: dist.all_reduce(p)),
    "broadcast": lambda e, p: written(p, lambda: dist.broadcast(p, 0)),
    "all_gather": lambda e, p: dist.all_gather([torch.empty(p.shape, dtype=p.dtype)], p.detach()),
    "broadcast_object": lambda e, p: dist.broadcast_object_list([p.data], 0),
    "jit.trace": lambda e, p: traced(p.detach()),
    "evaluation": lambda e, p: e.module.eval()(*batch(e, 7)),
    "forward": lambda e, p: e(*batch(e, 8)),
    "a module's forward": lambda e, p: e.module.first(torch.ones(1, 1, 64, dtype=p.dtype)),
    "another thread": lambda e, p: in_thread(lambda: p.detach().clone()),
    "flat buffers": lambda e, p: e.optimizer.bit16_groups_flat,
    "partitions": lambda e, p: e.optimizer.parallel_partitioned_bit16_groups,
    "register_hook": lambda e, p: p.register_hook(lambda g: g).remove(),
    "weight average": lambda e, p: torch.optim.swa_utils.AveragedModel(nn.ParameterList([p])).module[0].data,
}
# What code asks of a parameter without its values.
VALUELESS = {
    "shape": lambda p: p.shape,
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "requires_grad": lambda p: p.requires_grad,
    "grad": lambda p: p.grad,
    "no grad": lambda p: setattr(p, "grad", None),
    "is_leaf": lambda p: p.is_leaf,
    "numel": lambda p: p.numel(),
    "norm of no gradient": lambda p: nn.utils.clip_grad_norm_([p], 1.0).item(),
    "hash": lambda p: hash(p) == id(p),
    "identity": lambda p: {p: 1}[p],
    "isinstance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor)),
    "type": lambda p: (type(p) == nn.Parameter, nn.Parameter == type(p)),  # noqa: E721
    "class in a table": lambda p: {nn.Parameter: 1, nn.Module: 2}[type(p)],
    "attribute": lambda p: getattr(p, "of_this_test", 3),
}


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return [one for v in value.values() for one in flat(v)]
    if isinstance(value, (list, tuple)):
        return [one for v in value for one in flat(v)]
    return [value]


def assert_read_alike(ours, stock):
    ours, stock = flat(ours), flat(stock)
    assert len(ours) == len(stock)
    for a, b in zip(ours, stock, strict=True):
        if isinstance(a, torch.Tensor):
            assert type(a) is type(b)
            assert torch.equal(a, b)
        elif isinstance(a, np.ndarray):
            assert np.array_equal(a, b)
        else:
            assert a == b


@functools.cache
def pair(stage):
    """Return an engine of stock DeepSpeed and one under a plan. They take each step of this file together."""
    ours = attached(start(stage=stage), MIX, "emulated", seed=None)
    assert session_of(ours).plan.overlap_forward
    return start(stage=stage), ours


@pytest.fixture(scope="module", autouse=True)
def _ended():
    yield
    for stage in (1, 2) if pair.cache_info().currsize else ():
        for engine in pair(stage):
            engine.destroy()
    pair.cache_clear()


@pytest.fixture
def two(request, monkeypatch):
    stock, ours = pair(request.param)
    for engine in (stock, ours):
        engine.module.train()
    holding = Holding(ours, monkeypatch)
    yield stock, ours, holding
    holding.go.set()
    ours.optimizer.wait()


@pytest.mark.parametrize("two", [1, 2], indirect=True)
@pytest.mark.parametrize("name", READS)
def test_a_read_waits_for_its_update(two, name):
    stock, ours, holding = two
    held = [engine.module.first.widen for engine in (stock, ours)]
    stock_step(stock)
    holding.step()
    assert type(held[1]) is Pending
    found = READS[name](ours, held[1])
    assert holding.waits > 0
    assert type(held[1]) is nn.Parameter
    assert_read_alike(found, READS[name](stock, held[0]))
    ours.optimizer.wait()
    for a, b in zip(ours.module.parameters(), stock.module.parameters(), strict=True):
        assert type(a) is nn.Parameter
        assert torch.equal(a, b)


@pytest.mark.parametrize("two", [1, 2], indirect=True)
@pytest.mark.parametrize("name", VALUELESS)
def test_what_has_no_value_does_not_wait(two, name):
    stock, ours, holding = two
    held = [engine.module.first.widen for engine in (stock, ours)]
    stock_step(stock)
    holding.step()
    found = VALUELESS[name](held[1])
    assert holding.waits == 0
    assert type(held[1]) is Pending
    assert found == VALUELESS[name](held[0])
    ours.optimizer.wait()


def settled(engine):
    return [name for name, p in engine.module.named_parameters() if type(p) is nn.Parameter]


@pytest.mark.parametrize("two", [1, 2], indirect=True)
def test_forward_waits_module_by_module(two):
    stock, ours, holding = two
    seen, hooks = {}, []
    for name, module in ours.module.named_children():

        def before(*_, name=name):
            seen[name] = settled(ours)

        hooks.append(module.register_forward_pre_hook(before))
    stock_step(stock)
    holding.step()
    loss = ours(*batch(ours, 3))
    for hook in hooks:
        hook.remove()
    for name in ("bytes_in", "first", "second", "head"):
        own = [f"{name}.{p}" for p, _ in ours.module.get_submodule(name).named_parameters()]
        assert set(own) <= set(seen[name])
    assert "head.weight" not in seen["bytes_in"]
    assert len(seen["bytes_in"]) < len(seen["second"])
    assert torch.equal(loss, stock(*batch(stock, 3)))


@pytest.mark.parametrize("two", [2], indirect=True)
def test_a_graph_made_before_the_step_is_differentiated_with_the_new_values(two):
    stock, ours, holding = two
    found = []
    for engine, step in ((stock, lambda: stock_step(stock)), (ours, holding.step)):
        p = engine.module.first.widen
        x = torch.ones(1, p.shape[1], dtype=p.dtype, requires_grad=True)
        y = F.linear(x, p).sum()
        step()
        found.append(torch.autograd.grad(y, x)[0])
    assert holding.waits > 0
    assert torch.equal(*found)


@pytest.mark.parametrize("two", [2], indirect=True)
def test_code_that_asks_no_class_sees_no_old_value(two):
    _, ours, holding = two
    stock_step(two[0])
    holding.step()
    assert torch.tensor(ours.module.first.widen).isnan().all()
    assert holding.waits == 0


class Quantized(nn.Parameter):
    """A parameter of a class of its own, which must stay."""


class Unusual(SmallModel):
    """A model with a parameter of a subclass, a list of parameters, a tied, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own = Quantized(torch.full((64,), 0.5))
        self.listed = nn.ParameterList([nn.Parameter(torch.full((64,), 0.1 * i)) for i in range(3)])
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)
        self.unused = nn.Linear(64, 64)
        self.head.weight = self.bytes_in.weight

    def forward(self, inputs, targets):
        x = self.first(self.bytes_in(inputs)) * self.own + self.frozen
        x = self.second(sum((x * p for p in self.listed), start=x))
        logits = F.linear(x, self.head.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("stage", [1, 2])
def test_unusual_parameters(stage, monkeypatch):
    ours = attached(start(model=Unusual(), stage=stage), MIX, "emulated", seed=None, subgroup=5_000)
    classes = []

    def look(engine, number):
        del number
        classes.append({name: type(p) for name, p in engine.module.named_parameters()})

    result = outcome(ours, each=look)
    assert {c["own"] for c in classes} == {Quantized}
    assert {c["frozen"] for c in classes} == {nn.Parameter}
    assert_same(result, outcome(start(model=Unusual(), stage=stage)))


@pytest.mark.parametrize("stage", [1, 2])
def test_evaluation_takes_the_kernels_that_stock_takes(stage):
    def model():
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    seen = []
    for attach in (lambda e: e, lambda e: attached(e, MIX, "emulated", subgroup=3_000)):
        engine = attach(start(model=model(), stage=stage))
        notes = []
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(2, 5, 32).bfloat16()
            engine.train()
            engine.backward(engine(x).float().square().mean())
            engine.step()
            engine.eval()
            with torch.no_grad():
                notes.append(engine(x).clone())
        seen.append(notes)
        engine.destroy()
    assert all(map(torch.equal, *seen))


class Whole(nn.Module):
    """A model that torch.compile compiles without a graph break."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bytes_in, self.first = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.second, self.head = nn.Sequential(nn.Linear(256, 64), nn.LayerNorm(64)), nn.Linear(64, 256)

    def forward(self, inputs, targets):
        logits = self.head(self.second(F.gelu(self.first(self.bytes_in(inputs)))))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def whole(engine):
    engine.module.compile(backend="eager")


def parts(engine):
    for module in engine.module.children():
        module.compile(backend="eager")


def forwards(engine):
    engine.module.second.forward = torch.compile(engine.module.second.forward, backend="eager")
    engine.module.forward = torch.compile(engine.module.forward, backend="eager")


def wrapped(engine):
    engine.module.second = torch.compile(engine.module.second, backend="eager")


@pytest.mark.parametrize("compiled", [whole, parts, forwards, wrapped])
@pytest.mark.parametrize("when", ["before", "after", "late"])
def test_compiled_modules_are_compiled_once_and_whole(compiled, when, dynamo):
    # Compiled modules see plain parameters only, so that nothing is compiled again in later steps.
    def counts():
        return dynamo["stats"]["unique_graphs"], sum(dynamo["graph_break"].values())

    def made():
        engine = start(model=Whole(), stage=2)
        if when == "before":
            compiled(engine)
        return engine

    def run(engine):
        torch.compiler.reset()
        dynamo.clear()
        if when == "after":
            compiled(engine)
        found = []

        def look(engine, number):
            if when == "late" and number == 0:
                compiled(engine)
            found.append(counts())

        return outcome(engine, 6, each=look), found

    stock, ours = run(made()), run(attached(made(), MIX, "emulated"))
    assert_same(ours[0], stock[0])
    assert [breaks for _, breaks in ours[1]] == [breaks for _, breaks in stock[1]]
    assert ours[1][-1] == ours[1][2]  # with later steps, nothing is compiled again


def test_a_compiled_function_outside_of_modules_ends_the_overlap(caplog, dynamo):
    def run(engine):
        torch.compiler.reset()
        penalty = torch.compile(lambda: engine.module.head.weight.float().square().sum(), backend="eager")
        dynamo.clear()
        notes, frames = [], []

        def look(engine, number):
            notes.append(penalty().detach())
            frames.append(dynamo["stats"]["calls_captured"])

        return outcome(engine, 8, each=look), notes, frames

    ours, stock = run(attached(start(stage=2), MIX, "emulated")), run(start(stage=2))
    assert_same(ours[0], stock[0])
    assert all(map(torch.equal, ours[1], stock[1]))
    assert ours[2][-1] == ours[2][5]
    assert "reads parameters outside of their modules" in caplog.text


@pytest.mark.parametrize(
    "read", [lambda e: e.module.head.weight.data, lambda e: e.optimizer.wait(), lambda e: train(e, 1)]
)
def test_a_failed_update_is_raised_by_the_first_touch(read):
    engine = attached(start(stage=2), MIX, "emulated", seed=None)
    train(engine, 1)
    engine.optimizer.wait()

    def fail(op):
        if op.kind in HELD:
            raise OSError("the memory of this test has died")

    session_of(engine).executor.gradients.before_op = fail
    train(engine, 1)
    for _ in range(2):
        with pytest.raises(BackgroundError, match="the memory of this test has died"):
            read(engine)
    with pytest.raises(BackgroundError):
        engine.destroy()
    assert {type(p) for p in engine.module.parameters()} == {nn.Parameter}
    assert not first_touch._waiting


def test_two_engines_and_a_destroyed_one():
    engines = [attached(start(stage=2), MIX, "emulated") for _ in range(2)]
    results = [train(engine, 3) for engine in engines]
    engines[0].destroy()
    values = [[p.detach().clone() for p in engine.module.parameters()] for engine in engines]
    engines[1].destroy()
    stock = start(stage=2)
    expected = train(stock, 3)
    for result, shown in zip(results, values, strict=True):
        assert all(map(torch.equal, result[0], expected[0]))
        assert all(map(torch.equal, shown, stock.module.parameters()))
    stock.destroy()
    assert not first_touch._waiting


def test_no_wait_is_left_to_first_touches_without_overlap():
    engine = start(stage=2)
    plan = plan_for(engine, MIX, overlap_forward=False)
    ebbtide.runtime.attach(engine, plan, device=device_of("emulated"))
    for number in range(3):
        train(engine, 1, first=number)
        assert {type(p) for p in engine.module.parameters()} == {nn.Parameter}
    session_of(engine).switch(plan.model_copy(update={"overlap_forward": True}))
    seen = []
    train(engine, 3, first=3, each=lambda e, _: seen.append(any(type(p) is Pending for p in e.module.parameters())))
    assert any(seen)
    engine.destroy()

"""Training on two ranks, with stock DeepSpeed and under plans of ebbtide. The placements may differ between the
ranks (see `forked_ranks`).
"""

import json
import os
import threading
import time

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.zero import stage12
from ebbtide.simulator import workload as simulator_workload
from ebbtide.simulator.schedule import OpKind

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT
from studies.bench.many_engines import freeze_heap
from tests.runtime.contract.test_bits import EVERY_PASS
from tests.runtime.contract.test_gathers import alive_as_stock
from tests.runtime.contract.training import DEVICES, attached, device_of, start, train
from tests.runtime.stock_builds import runs_here, use_build

MIX = ["host", "device", "resident", "stored"]
DEVICE = list(DEVICES)[-1]
UNEVEN = 9_999  # elements of a subgroup, so that nothing here can be divided by two
# An optimizer of torch, with its own step.
OWN = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "weight_decay": 0.1}}}
MIXED = (MIX, DEVICE)
PLANS = ((["host"], next(iter(DEVICES))), MIXED)
AWAY = {"offload_param": {"device": "cpu"}}


class Reordered(ByteGPT):
    """A byte GPT that runs its blocks in reverse order in its second forward, so that DeepSpeed records the order
    of modules twice.
    """

    def __init__(self):
        super().__init__(SIZES["tiny"])
        self.passes = 0

    def forward(self, *batch):
        self.passes += 1
        forward = self.blocks
        self.blocks = torch.nn.ModuleList(reversed(forward)) if self.passes == 2 else forward
        result = super().forward(*batch)
        self.blocks = forward
        return result


def run(pattern=None, device=DEVICE, fail=False, speculate=0, away=(), overlaps="all", model=ByteGPT, **config):
    """Train on this rank, with stock DeepSpeed or under a plan, and return the engine's state, losses and gradient
    norms.

    Args:
        away: Numbers of the micro-batches after which a method of the engine is called: ``offload_states`` after the
            first of them, and ``reload_states`` after each other one. A micro-batch may be in the middle of a step.
        overlaps: "all" if the plans of all ranks overlap updates with the next forward. With any other value, only rank
            0's plan does.
    """
    rank = torch.distributed.get_rank()
    made = model() if model is Reordered else None
    engine = start(made, **{"subgroup_size": UNEVEN, **config})
    if pattern == "auto":
        ebbtide.runtime.attach(engine, "auto", device=device_of(device))
    elif pattern:
        own = pattern[rank:] + pattern[:rank]
        locations = config.get("offload_param") and [["host"], ["device", "host"]][len(pattern) > 1]
        attached(
            engine,
            own,
            device,
            seed=rank,
            subgroup=UNEVEN,
            locations=locations,
            speculate=speculate,
            speculate_visits=speculate,
            host_slots=9,
            device_sums=2,
            pieces="subgroup_size" in config,
            overlap_forward=overlaps == "all" or rank == 0,
        )
    if fail and rank == 1:

        def die(op):
            raise OSError(f"planted on rank {rank} in {op.label}")

        session_of(engine).executor.gradients.before_op = die
    batches = Batches(2, SIZES["tiny"].sequence, rank=rank)
    sums = {}

    def each(engine, number):
        shown = getattr(engine.optimizer, "accumulated_grads_in_cpu", {})
        sums.update({f"sum {key}, {number}": shown[key].clone() for key in shown})
        if number in away:
            (engine.offload_states if number == away[0] else engine.reload_states)()

    losses, norms = train(engine, 4, batches=batches, each=each)
    state = state_of(engine) | sums
    engine.destroy()
    freeze_heap()
    return state, torch.stack(losses), norms


def compare(name, tried=PLANS, speculate=0, away=(), overlaps="all", **config):
    stock = run(**config)
    found = {}
    for pattern, device in tried:
        ours = run(pattern, device, speculate=speculate, away=away, overlaps=overlaps, **config)
        found[f"{name}: {pattern} on {device}"] = (
            not differences(ours[0], stock[0]) and torch.equal(ours[1], stock[1]) and ours[2] == stock[2]
        )
    return found


def a_gather_ahead_holds_nobody_up():
    """Return True if DeepSpeed's prefetch of the parameters of later modules does not wait for ebbtide's updates.

    On each rank, the updates that the first module does not need are held back until this module's forward has ended.
    DeepSpeed's prefetch begins before that end, so it could never finish if it waited for the updates. On rank 1 the
    updates end later than on rank 0, to check that no rank's gathers depend on the time of its updates.
    """
    rank = torch.distributed.get_rank()
    config = {**EVERY_PASS, "stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": 10**9}
    engine = attached(
        start(subgroup_size=UNEVEN, **config),
        ["host"],
        DEVICE,
        seed=None,
        subgroup=UNEVEN,
        locations=["host", "device"],
    )
    train(engine, 3, batches=Batches(2, SIZES["tiny"].sequence, rank=rank))
    batch = Batches(2, SIZES["tiny"].sequence, rank=rank).at(3, engine.device)
    first, order = engine.module.bytes_in, []
    subgroups = engine.optimizer._gathers.partitions.subgroups
    at_once, first_has_run = subgroups(first.parameters()), threading.Event()

    def hold_back(op):
        if op.kind == OpKind.UPDATE_HOST and op.subgroup not in at_once:
            assert first_has_run.wait(20.0), "the first module waited for this update"
            time.sleep(0.01 * rank)
            order.append(op.subgroup)

    def note(*_):
        asked = [p for p in engine.module.parameters() if p.ds_status.name == "INFLIGHT"]
        order.extend(["asked for ahead"] * bool(set(subgroups(asked)) - set(at_once)))
        first_has_run.set()

    engine.backward(engine(*batch))
    session_of(engine).executor.gradients.before_op = hold_back
    engine.step()
    hook = first.register_forward_hook(note)
    engine(*batch)
    hook.remove()
    engine.destroy()
    return order[0] == "asked for ahead" and len(order) > 2


def parameters_are_exchanged_while_others_are_updated():
    """Return True if the ranks exchange updated parameters of ZeRO-2 before the last update ends, and all of them.

    On each rank, the update of the last subgroup is held back until the first exchange has ended.
    """
    engine = attached(start(subgroup_size=UNEVEN, stage=2), ["host"], DEVICE, seed=None, subgroup=UNEVEN)
    last, exchanged, waited = len(session_of(engine).executor.states) - 1, threading.Event(), []

    def hold_back(op):
        if op.kind == OpKind.UPDATE_HOST and op.subgroup == last:
            waited.append(exchanged.wait(20.0))

    def all_gather(*args, **kwargs):
        exchange = stock(*args, **kwargs)
        if not exchanged.is_set():
            exchange.wait()
        exchanged.set()
        return exchange

    session_of(engine).executor.gradients.before_op = hold_back
    with pytest.MonkeyPatch.context() as patch:
        stock = stage12.dist.all_gather
        patch.setattr(stage12.dist, "all_gather", all_gather)
        train(engine, 2, batches=Batches(2, SIZES["tiny"].sequence, rank=torch.distributed.get_rank()))
    mine = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
    of_ranks = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(of_ranks, mine)
    engine.destroy()
    return waited == [True, True] and torch.equal(*of_ranks)


def main(folder):
    rank = os.environ["RANK"]
    found = compare("default") | compare("no persistent", [MIXED], stage3_param_persistence_threshold=0, **AWAY)
    found |= compare("gathered ahead", speculate=9, accumulation=2, **AWAY, **EVERY_PASS)
    found |= compare(
        "guessed", [(["host", "device", "stored"], DEVICE)], speculate=9, accumulation=2, clipping=4.0, away=(0, 2)
    )
    for name, more in (("pieces", {"away": (0, 2)}), ("pieces, host", AWAY)):
        found |= compare(name, [(["host", "device", "resident"], DEVICE)], accumulation=2, subgroup_size=40_000, **more)
    for clipping in (0.0, 2.0):
        found |= compare(
            f"early pieces, clipping {clipping}",
            [(["host", "device", "resident"], DEVICE)],
            speculate=9,
            accumulation=2,
            subgroup_size=40_000,
            clipping=clipping,
        )
    found |= compare("one waits", [(["host", "device"], DEVICE)], overlaps="first")
    # Its linear layers add a bias in the precision in which it was gathered: fp32 after a step, otherwise bf16.
    lower = {"lower_precision_safe_modules": ["studies.bench.byte_gpt.Linear"]}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", **lower}}
    found |= compare("autocast", [MIXED], precision="fp32", extra=autocast)
    found |= compare("autocast, reordered", [MIXED], model=Reordered, precision="fp32", accumulation=2, extra=autocast)
    found |= compare("autocast, partitioned", [MIXED], precision="fp32", extra=autocast, **EVERY_PASS)
    found["nobody is held up"] = a_gather_ahead_holds_nobody_up()
    found["a life"] = DEVICE == "cuda" or alive_as_stock(folder, rank=int(rank)) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator_workload, "LEAST_GATHERED", 2 * UNEVEN + 7)  # exchanges that end within subgroups
        found["exchanged meanwhile"] = parameters_are_exchanged_while_others_are_updated()
        found |= compare("stage 2", stage=2) | compare("stage 1", [MIXED], stage=1, accumulation=2)
        for stage in (1, 2):
            found |= compare(
                f"round robin, stage {stage}",
                [MIXED],
                stage=stage,
                accumulation=stage,
                round_robin_gradients=True,
                away=(0, 2),
            )
    for stage in (1, 2, 3):
        found |= compare(
            f"own step, stage {stage}",
            [("auto", DEVICE)],
            stage=stage,
            accumulation=2,
            clipping=0.1,
            extra=OWN,
            **(AWAY if stage == 3 else {}),
        )
    if runs_here("avx2"):
        with pytest.MonkeyPatch.context() as patch:
            use_build(patch, "avx2")
            found |= compare("AVX2", [MIXED])
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    run(MIX, fail=True)
    (folder / f"trained{rank}.json").write_text("{}")  # written only if no error is raised

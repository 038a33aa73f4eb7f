"""Tests that under a plan no two memory accesses race under CUDA's own rules of order, and that the check
finds waits that are left out.

The order of accesses is computed with vector clocks on a fake CUDA (see `happens_before`).
"""

import ast
import dataclasses
import json
from pathlib import Path

import ebbtide.runtime
import ebbtide.runtime.execution.session
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.cuda import CudaDevice
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.execution.first_touch import FirstTouch
from ebbtide.runtime.execution.gradients import GradientBuffers, GradientCopy, GradientOps
from ebbtide.runtime.zero.fetches import Partitions
from ebbtide.simulator.update.issue import Issue
from ebbtide.simulator.update.steps import Slot, Wait

from studies.bench.bits import state_of
from tests.runtime.contract.test_bits import MIX, Switching, engine_for
from tests.runtime.contract.test_early_updates import at_a_bound_that_some_steps_reach
from tests.runtime.contract.test_pieces import LARGE
from tests.runtime.contract.test_windows import loop_of
from tests.runtime.contract.training import plan_for, start, train
from tests.runtime.evidence.happens_before import Order
from tests.runtime.forked_ranks import launch

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="uses a fake CUDA"),
]


def checked(fake, patch, engine, loop=None, steps=3, pattern=MIX, **fields):
    """Train some steps under a plan on the fake CUDA, and return the recorded order of all memory accesses."""
    fake.latest_s = 1e6  # no op runs, and no event is seen as reached, before some code waits for it
    order = Order(fake)
    order.install(patch)
    with order.watching():
        plan = plan_for(engine, pattern, **fields)
        ebbtide.runtime.attach(engine, plan, device=CudaDevice())
        (loop or train)(engine, steps * engine.gradient_accumulation_steps())
    engine.destroy()
    fake.violations.clear()  # consequences of a missing wait are not tested here
    return order


def run_case(fake, patch, case, **options):
    make, loop, *fields = CASES[case]
    return checked(fake, patch, make(), loop, **options, **dict(*fields))


def read_between(engine, steps):
    train(engine, steps, each=lambda live, number: state_of(live))


def repeat_backward(engine, steps):
    """Train under a plan, with two backward passes before every second call of ``engine.step``."""
    # ``steps`` is the total number of ``engine.step`` calls. The second of these two passes adds to gradients whose
    # copies to the host may still run, because no update has waited for the copies.
    loop_of(engine, "bs bbs" * (steps // 2))


def never_paused(engine, steps):
    session_of(engine).pausing.stepped = lambda right: None
    train(engine, steps)


EARLY_KINDS = {
    "speculate": 99,
    "speculate_visits": 99,
    "host_slots": 2,
    "pattern": ["device", "host", "stored", "device"],
}
PIECES = {**EARLY_KINDS, "pattern": ["device", "host", "resident"], "pieces": True}
CASES = {
    **{
        f"ZeRO-3, {case}": (lambda case=case: engine_for(case), None)
        for case in (
            "clipping",
            "accumulation",
            "small_buckets",
            "no_persistent_parameters",
            "parameter_groups",
            "no_overlap",
            "offloaded_parameters",
        )
    },
    "readers": (lambda: engine_for("clipping"), read_between),
    "sums on the device": (lambda: start(accumulation=2, reduce_bucket_size=50), repeat_backward, {"device_sums": 99}),
    "early updates": (lambda: start(clipping=0.0), None, EARLY_KINDS),
    "early updates, small buckets": (lambda: start(clipping=0.0, reduce_bucket_size=50), None, EARLY_KINDS),
    "early updates of which some are wrong": (
        lambda: start(clipping=at_a_bound_that_some_steps_reach()),
        never_paused,
        EARLY_KINDS,
    ),
    "early updates of which some are wrong, accumulation": (
        lambda: start(clipping=at_a_bound_that_some_steps_reach(), accumulation=2),
        never_paused,
        {**EARLY_KINDS, "staging_slots": 1, "prefetch": 1},
    ),
    "pieces, early updates": (lambda: start(clipping=0.0, subgroup_size=LARGE), None, PIECES),
    "pieces, early updates, readers": (lambda: start(clipping=0.0, subgroup_size=LARGE), read_between, PIECES),
    "pieces, early updates of which some are wrong": (
        lambda: start(clipping=at_a_bound_that_some_steps_reach(), subgroup_size=LARGE),
        never_paused,
        {**PIECES, "staging_slots": 1, "prefetch": 1},
    ),
    "early updates, accumulation": (lambda: start(clipping=1e3, accumulation=2), None, EARLY_KINDS),
    "unused parameters": (lambda: start(model=Switching(), subgroup_size=9000), None),
    **{
        f"ZeRO-2, {case}": (lambda case=case: engine_for(case, stage=2), None)
        for case in ("clipping", "accumulation", "fp32_accumulation")
    },
    **{
        f"ZeRO-{stage}, full buckets": (lambda stage=stage: start(reduce_bucket_size=17_000, stage=stage), None)
        for stage in (3, 2)
    },
    # Gradients are reduced in place, in a bucket that the larger ones fill.
    "ZeRO-2, buckets of one": (lambda: start(reduce_bucket_size=16_384, stage=2, reduce_scatter=False), None),
}


@pytest.mark.parametrize("case", list(CASES))
def test_happens_before_orders_every_access(late_deepspeed, monkeypatch, capsys, case):
    order = run_case(late_deepspeed, monkeypatch, case)
    assert order.accesses > 500
    assert not order.races
    with capsys.disabled():
        print(f"\nhappens_before: {case}: {order.accesses} accesses, 0 races")


# -- each wait taken away in turn ----------------------------------------------------------------


def without(wait, whole=Issue._issue):
    """Return a monkeypatch (owner, name, value) under which the ops of updates leave out the given kind of wait,
    and all else stays the same.
    """

    def issue(self, step, *others):
        return whole(self, dataclasses.replace(step, waits=step.waits & ~wait), *others)

    return Issue, "_issue", issue


def taken_at_once(*slots, whole=Issue._take):
    """Return a planted bug that the race check must find, as a monkeypatch (owner, name, value).

    With the bug, an op takes a buffer of the given kinds while an earlier op may still need this buffer.
    """

    def take(self, step, subgroup, waits):
        if step.takes in slots:
            free = self._free[step.takes]
            free[0] = free[0]._replace(behind=None)
            self._left.pop((step.takes, subgroup), None)
        return whole(self, step, subgroup, waits)

    return Issue, "_take", take


def with_gradients(**changes):
    """Return a monkeypatch (owner, name, value) with which the copies of gradients to the host leave out some
    of their waits.
    """
    whole = GradientOps._submit

    def submit(self, how, *args):
        return whole(self, dataclasses.replace(how, **changes), *args)

    return GradientOps, "_submit", submit


def nothing(*args, **kwargs):
    """Do nothing, in place of a wait of the runtime that the test leaves out."""


def deaf(owner, name, method):
    """Return a monkeypatch with which a method of `CudaDevice` does nothing while a given function of the runtime runs.

    The method orders work on CUDA streams, so the patch simulates a runtime that lacks this order.

    Args:
        owner, name: Class and name of the function that runs without the order.
        method: Name of the method of `CudaDevice` that does nothing meanwhile.
    """
    whole = getattr(owner, name)

    def without(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CudaDevice, method, nothing)
            return whole(*args, **kwargs)

    return owner, name, without


def brought_at_once(self, params, executor, bring=Partitions.bring):
    """Start to copy parameters from host memory to the GPU as `Partitions.bring` does, but do not return the operations
    that a caller must wait for. The caller may then use the parameters before the copies have ended.

    A test replaces `bring` with this faulty function, and checks that the race is reported.
    """
    return {p: (tensor, []) for p, (tensor, _) in bring(self, params, executor).items()}


def settled_at_once(self, subgroups):
    """Take the parameters of subgroups as updated without a wait, in place of ``FirstTouch._wait``."""
    self._settled |= subgroups


MUTANTS = {
    "a gradient is copied before it is there": ("ZeRO-3, accumulation", with_gradients(reduced=False)),
    "an update does not wait for its gradient": ("ZeRO-3, clipping", (Executor, "_arrived", lambda *_: [])),
    "the next sum is fetched before the last is on the host": ("ZeRO-3, accumulation", with_gradients(after=())),
    "gradients' memory is reduced into again": ("ZeRO-2, buckets of one", (CudaDevice, "before_reuse", nothing)),
    "readers wait for nothing": ("ZeRO-3, clipping", (Executor, "updates_of", lambda *_: [])),
    "a parameter's first use waits for nothing": ("ZeRO-2, clipping", (FirstTouch, "_wait", settled_at_once)),
    "ops do not wait for those of their step": ("ZeRO-3, clipping", without(Wait.PREVIOUS)),
    "an early update does not wait for its gradient": (
        "early updates, small buckets",
        deaf(Executor, "update_early", "current_event"),
    ),
    "a staged update comes in while another goes out": ("ZeRO-3, clipping", taken_at_once(Slot.STAGING)),
    "new parameters go where others are copied from": ("ZeRO-3, clipping", taken_at_once(Slot.PARAMETER)),
    "a sum is read before it is there": ("ZeRO-3, accumulation", deaf(GradientOps, "fetch_sum", "training_waits")),
    "a sum is added to while it leaves": ("sums on the device", deaf(GradientBuffers, "_sum_up", "training_waits")),
    "a parameter is read before it is copied": ("ZeRO-3, offloaded_parameters", (Partitions, "bring", brought_at_once)),
    "a parameter is copied to where another is still read": (
        "ZeRO-3, offloaded_parameters",
        deaf(Partitions, "bring", "current_event"),
    ),
}


# -- the list of waits, from the code ------------------------------------------------------------

GRADIENTS = {
    "reduced": "a gradient is copied before it is there",
    "after": "the next sum is fetched before the last is on the host",
}
NO_WAITS = {"kind", "lane"}
STEPS = {
    # The host has read the norm before updates start, and the norm comes after all gradients of its stream.
    Wait.NORM: "",
    Wait.GRADIENT: "an update does not wait for its gradient",
    Wait.PREVIOUS: "ops do not wait for those of their step",
    Slot.STAGING: "a staged update comes in while another goes out",
    Slot.PARAMETER: "new parameters go where others are copied from",
    # These lanes are tested in tests/runtime/test_executed_dag.py, or the drive itself keeps the order.
    Slot.OUTGOING: "",
    Slot.STATE: "",
    # waits of the host, and of gradients
    Wait.GATE: "",
    Wait.SUM: "",
    Wait.LAST: "",
}
STREAMS = {"wait_event", "wait_stream", "wait_on", "training_waits", "wait_parameters", "updates_of", "current_event"}
# Function that makes a stream wait -> the mutant without this wait, or "" if its waits are in other rows, or if no test
# can notice with today's DeepSpeed that the wait is missing.
WAITERS = {
    "devices/lane.py: wait_on": "",
    "devices/lane.py: _execute": "",  # waits of ops
    "devices/base.py: training_waits": "",
    # Attaching ends with copies between host and device, for which the host waits.
    "devices/cuda.py: lanes": "",
    "devices/cuda.py: moment": "",  # waits of the clock
    "devices/cuda.py: before_reuse": "gradients' memory is reduced into again",
    "execution/executor.py: update_early": "an early update does not wait for its gradient",
    # Forward and backward have waited for their copies, and the norm was read after them.
    "execution/executor.py: launch": "",
    "execution/first_touch.py: _wait": "a parameter's first use waits for nothing",
    "execution/executor.py: wait_parameters": "readers wait for nothing",
    "execution/gradients.py: _sum_up": "a sum is added to while it leaves",
    "execution/gradients.py: fetch_sum": "a sum is read before it is there",
    "execution/gradients.py: _submit": "a gradient is copied before it is there",
    "zero/gathers.py: _before": "readers wait for nothing",
    "zero/gathers.py: _launch_together": "a parameter is read before it is copied",
    "zero/stage12.py: _update": "a parameter's first use waits for nothing",
    "zero/stage12.py: _exchange": "readers wait for nothing",
    "one_rank/views.py: _wait": "readers wait for nothing",
    # With one rank, `fetches.py: wait` has made all training streams wait. With several, gloo makes the host wait.
    "checks/coordinator.py: _wait": "",
    "zero/fetches.py: bring": "a parameter is copied to where another is still read",
    "zero/fetches.py: wait": "a parameter is read before it is copied",
}


def waiters():
    """Yield the names of the runtime's functions that make a CUDA stream wait, without functions in which the
    host waits.
    """
    for room in ("devices", "execution", "zero"):
        for path in sorted((Path(ebbtide.runtime.__file__).parent / room).rglob("*.py")):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef) and any(
                    isinstance(call, ast.Call) and getattr(call.func, "attr", None) in STREAMS
                    for call in ast.walk(function)
                ):
                    yield f"{path.parent.name}/{path.name}: {function.name}"


def test_every_wait_in_the_code_has_its_mutant():
    assert {f.name for f in dataclasses.fields(GradientCopy)} == GRADIENTS.keys() | NO_WAITS
    assert {*Wait, *Slot} == STEPS.keys()
    assert set(waiters()) == WAITERS.keys()
    named = {*GRADIENTS.values(), *filter(None, [*STEPS.values(), *WAITERS.values()])}
    assert named == MUTANTS.keys()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_happens_before_shows_each_missing_wait(late_deepspeed, monkeypatch, capsys, mutant):
    case, broken = MUTANTS[mutant]
    monkeypatch.setattr(*broken)
    order = run_case(late_deepspeed, monkeypatch, case, steps=2)
    assert order.races
    with capsys.disabled():
        print(f"\nhappens_before: mutant: {mutant}: {order.races.total()} races")


@pytest.mark.slow
def test_happens_before_on_two_ranks(deepspeed_ops, tmp_path, capsys):
    done = launch("tests.runtime.evidence.two_ranks", tmp_path)
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.json"
        assert path.exists(), done.stderr[-3000:]
        found = json.loads(path.read_text())
        for case, (accesses, races) in found["cases"].items():
            assert accesses > 500, case
            assert not races, case
        for mutant, (_, races) in found["mutants"].items():
            assert races, mutant
        with capsys.disabled():
            seen = sum(accesses for accesses, _ in found["cases"].values())
            print(
                f"\nhappens_before: rank {rank} of 2: {len(found['cases'])} cases, {seen} "
                f"accesses, 0 races; all {len(found['mutants'])} mutants show"
            )

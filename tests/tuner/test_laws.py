"""Tests that the plan search is monotone: with more memory, bandwidth or freedom, it never finds a slower plan."""

import random
from functools import cache

import pytest
from ebbtide.simulator import Layer, Workload
from ebbtide.tuner.placements.decision import PlanQuestion, decide

from tests.machines import GIB, node

MORE = 1.2  # factor by which a resource is increased
NOTHING = 1e-3  # a search does not find the same plan to the last digit
SEEDS = range(4)


def job(seed):
    """Return a random small workload and machine for the plan search. Its few subgroups compete for GPU
    memory, host memory and the link.
    """
    rng = random.Random(seed)
    count, size = rng.randint(4, 9), rng.choice([2, 4, 8]) * 10**7
    forward_s = rng.uniform(0.003, 0.03) * size / 4e7
    layer = Layer(
        params=size, forward_s=forward_s, backward_s=2 * forward_s, activation_bytes=rng.choice([10**7, 10**8])
    )
    work = Workload(
        name="law",
        layers=(layer,) * count,
        subgroups=(size,) * count,
        subgroup_size=size,
        device_base_bytes=2 * count * size + GIB // 4,
        gradient_accumulation_steps=rng.choice([1, 1, 2, 4]),
        ranks_per_node=rng.choice([1, 1, 2]),
        clip_rate=rng.choice([0.02, 0.1, 0.5, 1.0]),
    )
    needed = work.device_base_bytes + work.activation_bytes
    link = rng.uniform(1e10, 5e10)
    machine = node(
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_adam_params_per_s=rng.uniform(1e9, 4e9) * work.ranks_per_node,
        device_memory_bytes=int(needed + rng.uniform(0.1, 1.2) * 12 * work.params + GIB // 2),
        host_memory_bytes=int(work.ranks_per_node * (work.params * rng.uniform(18, 40) + GIB)),
    )
    return work, machine


def answer_s(work, machine, offload_parameters=False, **asked):
    return decide(PlanQuestion.of(work, machine, offload_parameters=offload_parameters, **asked)).iteration_s


@cache
def before_s(seed):
    return answer_s(*job(seed))


def faster(*rates):
    return lambda work, machine: (work, machine.with_rates(**{rate: MORE * machine.rate(rate) for rate in rates}), {})


def larger(memory):
    return lambda work, machine: (work, machine.with_rates(**{memory: int(MORE * getattr(machine, memory))}), {})


def allowed(**asked):
    return lambda work, machine: (work, machine, asked)


def clipping_less(work, machine):
    return work.model_copy(update={"clip_rate": work.clip_rate / 2}), machine, {}


LAWS = {
    "more GPU memory": larger("device_memory_bytes"),
    "more host memory": larger("host_memory_bytes"),
    "a faster link": faster("h2d_bytes_per_s", "d2h_bytes_per_s"),
    "faster updates on the host": faster("host_adam_params_per_s"),
    "faster DRAM": faster("dram_bytes_per_s"),
    "parameters on the host": allowed(offload_parameters=True),
    "state on storage": allowed(storage={"": 10**13}),
    "fewer steps that clip": clipping_less,
}


@pytest.mark.parametrize("law", LAWS)
def test_more_is_never_slower(law):
    for seed in SEEDS:
        work, machine = job(seed)
        more, better, asked = LAWS[law](work, machine)
        assert answer_s(more, better, **asked) <= (1 + NOTHING) * before_s(seed), (law, seed)


@pytest.mark.parametrize("seed", [3, 4])
def test_every_kind_of_way_that_is_allowed_is_no_slower(seed, monkeypatch):
    work, machine = job(seed)
    work = work.model_copy(update={"clip_rate": 0.0, "gradient_accumulation_steps": 2})
    all_s = answer_s(work, machine)
    fewer_s = {"early updates": answer_s(work.model_copy(update={"clip_rate": 1.0}), machine)}
    with monkeypatch.context() as patch:
        patch.setattr("ebbtide.tuner.placements.search.Search.sums", False)
        fewer_s["sums"] = answer_s(work, machine)
    with monkeypatch.context() as patch:
        patch.setattr("ebbtide.tuner.placements.search.choices", lambda *_, **__: ("host", "resident"))
        fewer_s["staged state"] = answer_s(work, machine)
    for without, seconds in fewer_s.items():
        assert all_s <= (1 + NOTHING) * seconds, without


def test_parameters_that_may_move_begin_where_those_that_may_not_have_ended():
    work, machine = job(2)
    bound, free = (
        decide(PlanQuestion.of(work, machine, offload_parameters=free, effort=0.3)) for free in (False, True)
    )
    assert free.search.ordered(bound.chosen) in free.search.scores

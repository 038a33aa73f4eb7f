"""Tests of laws on random jobs on scaled presets: in one table, more of a resource never makes a plan slower.

``EBBTIDE_TEST_LAWS=200 pytest tests/tuner/test_random_laws.py`` tests 200 jobs. ``python -m
tests.tuner.test_random_laws 0 200`` counts how often separate quick searches break the laws, with ``full`` full ones.
"""

import math
import os
import random
import sys
from itertools import pairwise

import ebbtide
import pytest
from ebbtide.simulator import Plan
from ebbtide.simulator.analysis import what_if as simulator
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.models.families import MODELS
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.plan import Way
from ebbtide.simulator.rules import RuleError
from ebbtide.tuner.placements.decision import FULL, QUICK, PlanQuestion, decide
from ebbtide.tuner.placements.planning import quick_plan

from tests.machines import GIB

JOBS = int(os.environ.get("EBBTIDE_TEST_LAWS", "2"))
NOTHING = 3e-3
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}
MACHINES = ("rtx4090", "rtx3090", "a100-80gb", "a100-node", "h100-node", "h200", "gh200", "l40s", "rtx5090")
DENSE = ("Llama 3.2 1B", "Llama 3.2 3B", "Qwen3 4B", "Mistral 7B", "Llama 3 8B", "Llama 2 13B", "Qwen3 14B")
LINK, DRIVE = ("h2d_bytes_per_s", "d2h_bytes_per_s"), ("storage_read_bytes_per_s", "storage_write_bytes_per_s")


def random_case(seed):
    """Return a job's workload, a preset with scaled memories and link, and the room on drives, or None."""
    rng = random.Random(seed)
    while True:
        have = preset(rng.choice(MACHINES))
        model = GPT_OSS if rng.random() < 0.2 else MODELS[rng.choice(DENSE)]
        shape = {
            "sequence": rng.choice([512, 1024, 2048, 4096, 8192]),
            "micro_batch": rng.choice([1, 1, 2, 4]),
            "accumulation": rng.choice([1, 1, 1, 2, 4, 8, 16]),
            "zero_stage": rng.choice([3, 3, 3, 2]),
            "data_parallel": min(have.gpus_per_node, rng.choice([1, 1, 2, 4, 8])),
        }
        try:
            work = estimated(Job.of_deepspeed(model, **shape), have)
        except ModelError:
            continue
        state, base = 12 * work.params, work.device_base_bytes + work.activation_bytes
        stored = rng.random() < 0.15 and work.zero_stage == 3
        link, host = 10 ** rng.uniform(-0.5, 0.5), rng.uniform(0.4, 1.2) if stored else rng.uniform(1.1, 2.5)
        have = have.with_rates(
            **{rate: link * have.rate(rate) for rate in LINK},
            device_memory_bytes=int(1.02 * base + 2 * GIB + state * rng.uniform(0.05, 1.2)),
            host_memory_bytes=int(work.ranks_per_node * (state * host + 4 * work.params + 4 * GIB)),
        )
        return work, have, {"": int(3 * work.ranks_per_node * state)} if stored else None


@pytest.mark.parametrize("seed", range(JOBS))
def test_more_of_a_resource_is_never_slower_in_one_table(seed):
    work, have, _ = random_case(seed)
    by_link = ebbtide.what_if(
        work, have, ["ebbtide"], n_jobs=1, h2d_bytes_per_s=[f * have.rate(LINK[0]) for f in (1.0, 1.03, 1.3)]
    )
    by_memory = ebbtide.what_if(
        work, have, ["ebbtide"], n_jobs=1, gpu_memory_bytes=[f * have.device_memory_bytes for f in (1.0, 1.04, 1.15)]
    )
    by_host = ebbtide.what_if(
        work, have, ["ebbtide"], n_jobs=1, host_memory_bytes=[int(f * have.host_memory_bytes) for f in (1.0, 1.15)]
    )
    for table in (by_link, by_memory, by_host):
        told_s = [s if fits else math.inf for s, fits in zip(table.iteration_s, table.fits, strict=True)]
        assert all(after <= before * (1 + NOTHING) for before, after in pairwise(told_s)), told_s


def test_a_plan_found_at_one_point_of_a_table_is_tried_at_all_others():
    have = preset("rtx4090")
    work = estimated(Job.of_deepspeed(MODELS["Llama 3.2 1B"], sequence=1024), have)
    good, poor = (quick_plan(work, have, Limits.of(work, have)), on_host(work))

    def planner(_, machine, __):
        return good if machine.rate(LINK[0]) == have.rate(LINK[0]) else poor

    rates = [have.rate(LINK[0]), 1.3 * have.rate(LINK[0])]
    table = simulator.what_if(work, have, ["ebbtide"], planner=planner, n_jobs=1, h2d_bytes_per_s=rates)
    assert table.iteration_s[1] <= table.iteration_s[0] * (1 + NOTHING)
    alone = simulator.what_if(work, have, ["ebbtide"], planner=planner, n_jobs=1, h2d_bytes_per_s=rates[1:])
    assert alone.iteration_s[0] > 1.05 * table.iteration_s[1]


def on_host(work):
    return Plan(subgroup_size=work.subgroup_size, subgroups=work.subgroups, ways=(Way("host"),) * len(work.subgroups))


def separately(first, last, effort):
    """Count, over random jobs, how often a separate search finds a slower plan with more of a resource.

    The law does not hold here (jobs 0 to 59, quick: 13 of 247 beyond 0.3%, the worst 2.4%). Each search ends in another
    of several good plans. A fixed plan may be slower with a faster link, too (8 of 60 plans with 1.3 times the
    rate, by at most 1.7%): faster copies take DRAM from the updates on the CPU. With ample DRAM none of those looked
    at was. So only tables, which try each plan at all points, hold the law.
    """
    broken, asked, worst = 0, 0, 0.0
    for seed in range(first, last):
        work, have, storage = random_case(seed)
        more = {
            "link 1.03": {rate: 1.03 * have.rate(rate) for rate in LINK},
            "link 1.3": {rate: 1.3 * have.rate(rate) for rate in LINK},
            "GPU memory 1.04": {"device_memory_bytes": int(1.04 * have.device_memory_bytes)},
            "host memory 1.15": {"host_memory_bytes": int(1.15 * have.host_memory_bytes)},
        } | ({"drive 1.2": {rate: 1.2 * have.rate(rate) for rate in DRIVE}} if storage else {})
        if effort > QUICK:
            name = random.Random(seed).choice(sorted(more))
            more = {name: more[name]}
        try:
            before_s = decide(PlanQuestion.of(work, have, storage=storage, effort=effort)).iteration_s
        except RuleError:
            continue
        for name, rates in more.items():
            after_s = decide(
                PlanQuestion.of(work, have.with_rates(**rates), storage=storage, effort=effort)
            ).iteration_s
            asked, worst = asked + 1, max(worst, after_s / before_s - 1)
            if after_s > before_s * (1 + NOTHING):
                broken += 1
                print(f"job {seed}, {name}: {before_s:.4f} -> {after_s:.4f} s", flush=True)
    print(f"{broken} of {asked} broken, the worst by {worst:.2%}")


if __name__ == "__main__":
    separately(int(sys.argv[1]), int(sys.argv[2]), FULL if sys.argv[3:] == ["full"] else QUICK)

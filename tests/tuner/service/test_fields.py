"""Tests that every field of a request to the planning service changes the answer or is refused.

A new field fails the tests until it has a line in this file.
"""

import json

import pytest
from ebbtide.simulator import preset, workload_from_model
from ebbtide.simulator.estimates.job import settings
from ebbtide.tuner.service.worker import INVALID, RESULT, TEXT, calls, run

from tests.tuner.test_job_walk import other

MIB, GIB = 2**20, 2**30
TINY = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 4, "vocabulary": 2000, "name": "tiny"}
WIDE = TINY | {"hidden": 768}
BASE = {"machine": "h200", "model": TINY}
DEEP = {"layers": 16, "hidden": 1024, "heads": 16, "vocabulary": 32000}
SEARCHED = {"machine": "rtx4090", "model": DEEP, "device_memory_bytes": 4e9}  # the search finds several good plans
SPILLS = {"machine": "rtx4090", "model": "Llama 3 8B", "subgroup_size": 2 * 10**8, "host_memory_bytes": 50 * GIB}
PLAN = {"subgroup_size": 10**9, "placement": [{"placement": "host", "count": 1}]}
NVME = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "sub_group_size": 10**6}}

# Field -> its value, and the fields that both requests have beside it.
SCENARIO = {
    "machine": ("rtx4090", {}),
    "model": (WIDE, {}),
    "workload": ("a name", {}),
    "device_memory_bytes": (1300 * MIB, {}),
    "host_memory_bytes": (20 * GIB, {}),
    "storage_bytes": (1e12, {}),
    "link_bytes_per_s": (1e9, {}),
    "ds_config": (NVME, {}),
    "subgroup_size": (10**6, {}),
}
PLANNING = {"mtbf_s": (3600.0, {}), "endurance_bytes": (6e14, {"storage_bytes": 1e12})}
TABLE = {
    "simulate": SCENARIO
    | {"strategy": ("twin_flow", {}), "options": ({"iterations": 4}, {}), "plan": (PLAN, {}), "timeline": (True, {})},
    "answer": SCENARIO
    | PLANNING
    | {"effort": ("full", {"subgroup_size": 10**6}), "peers": (True, {}), "timelines": (True, {}), "plan": (PLAN, {})}
    | {"faster": (True, {})},
    "what-if": SCENARIO
    | {
        "host_memory_bytes": (200 * MIB, {}),
        "strategies": (["zero3_offload"], {}),
        "gpu_memory_bytes": ([1300 * MIB], {}),
        "changes": ({"ranks_per_node": [2]}, {}),
        "format": ("csv", {}),
    },
    "job/plan": SCENARIO
    | PLANNING
    | {
        "storage_bytes": (1e12, SPILLS),
        "memory_margin": (0.2, {}),
        "robust": (True, SEARCHED | {"subgroup_size": 3 * 10**6}),
        "restart_s": (600.0, {"mtbf_s": 3600.0}),
        "seed": (1, SEARCHED | {"subgroup_size": 5 * 10**6}),
    },
}
# Fields of a request that follow from the fields of `Job`: see test_job_walk.py.
OF_A_JOB = {one.http: one for one in settings() if one.http}
USUAL = {"answer": {"peers": False, "timelines": False}}
TITLES = {"kind", "name"}  # of a job in lists
CASES = [(call, name) for call, rows in TABLE.items() for name in rows]


def silent(*_):
    """Do nothing with a progress report of a search."""


@pytest.fixture(scope="module")
def ask():
    table, known = calls(), {}

    def asked(call, fields):
        body = BASE | USUAL.get(call, {}) | fields
        key = json.dumps([call, body], sort_keys=True)
        if key not in known:
            known[key] = run({"call": call, "body": body}, table, silent)
        return known[key]

    return asked


@pytest.mark.parametrize("call", TABLE)
def test_the_table_has_every_field(call):
    assert set(TABLE[call]) == calls()[call][0].model_fields.keys() - TITLES - OF_A_JOB.keys()


@pytest.mark.parametrize(("call", "name"), CASES)
def test_each_field_changes_the_answer_or_is_refused(call, name, ask):
    value, beside = TABLE[call][name]
    tag, before = ask(call, beside)
    assert tag == RESULT or b" GiB short " in before, before
    tag, after = ask(call, beside | {name: value})
    if tag in (RESULT, TEXT):
        assert after != before
    else:
        assert tag == INVALID
        assert name in after.decode()


MEASURED = {"model": None, "workload": workload_from_model(TINY, preset("h200")).model_dump(mode="json")}


@pytest.mark.parametrize(
    ("call", "fields", "says"),
    [
        *[
            ("simulate", MEASURED | {name: one.value(other(one.name), name)}, "only with model")
            for name, one in OF_A_JOB.items()
            if one.asked.profiled
        ],
        ("simulate", MEASURED | {"ds_config": NVME}, "only with model"),
        ("simulate", {"clip_rate": 0.05}, "clip_rate has an effect only with plan"),
        ("answer", {"keep_activations": True, "recompute_share": 0.5}, "recompute_share has an effect only without"),
        ("simulate", {"flash_attention": False, "flash_version": 3}, "flash_version has an effect only with"),
        ("answer", {"endurance_bytes": 6e14}, "endurance_bytes has an effect only with storage_bytes"),
        ("job/plan", {"endurance_bytes": 6e14}, "endurance_bytes has an effect only with storage_bytes"),
        ("job/plan", {"restart_s": 600.0}, "restart_s has an effect only with mtbf_s"),
        ("simulate", {"strategy": "twin_flow", "plan": PLAN}, "strategy has an effect only without plan"),
        *[(c, {"mtbf_s": 3600.0}, "mtbf_s") for c in ("simulate", "what-if", "ways-out", "job/what-if", "job/search")],
    ],
)
def test_a_field_without_effect_is_refused(call, fields, says, ask):
    tag, told = ask(call, fields)
    assert (tag, says in told.decode()) == (INVALID, True), told

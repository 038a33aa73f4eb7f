"""Tests of published DeepSpeed configs under ``"plan": "auto"``: training has stock DeepSpeed's results, bit
for bit, or one true sentence says why the config cannot be trained under a plan.

Configs that offload the optimizer are grouped by the settings that matter to a plan. The tests run one
config of each group. ``python -m tests.runtime.zoo`` runs all configs.
"""

import json

import pytest
from ebbtide.simulator import ModelError
from ebbtide.simulator.estimates.deepspeed_keys import BATCHES
from ebbtide.simulator.estimates.job import Job
from ebbtide.tuner.doctor.under_a_plan import refused_by_deepspeed, under_a_plan

from tests.runtime.zoo.configs import as_trained, offloads, published, zero_of
from tests.runtime.zoo.training import plannable, stock, trained

AUTO = {"plan": "auto"}


def kind(config):
    """Return the values of a DeepSpeed config that matter to a plan, as a tuple. Two configs with equal values
    are of one kind.
    """
    zero, optimizer = zero_of(config), config.get("optimizer") or {}
    precision = [k for k in ("bf16", "fp16") if (config.get(k) or {}).get("enabled")]
    odd = sorted({"round_robin_gradients", "cpu_offload"} & {k for k, v in zero.items() if v})
    client = config.get("zero_force_ds_cpu_optimizer", True)
    torch_adam = (optimizer.get("params") or {}).get("torch_adam", False)
    location = (zero.get("offload_param") or {}).get("device") if zero.get("stage") == 3 else None
    return (zero.get("stage"), location, optimizer.get("type"), *precision, *odd, client, torch_adam)


def sample():
    """Return a list of (name, config): of the published configs that offload the optimizer, the first one of each
    kind. Configs of one kind have the same values in all fields that matter to a plan.
    """
    found = {}
    for row in published():
        config = as_trained(row.config)
        if offloads(config):
            found.setdefault(kind(config), (row.name, config))
    return sorted(found.values(), key=lambda pair: pair[0])


@pytest.mark.parametrize(("name", "config"), sample(), ids=[name for name, _ in sample()])
def test_same_bits_or_stock_itself_refuses(front_door, name, config):
    if not plannable(config):
        pytest.skip("this DeepSpeed trains ZeRO-1 and 2 under no plan")
    expected = stock(json.dumps(config, sort_keys=True))
    ours = trained(config, AUTO)
    assert bool(ours.error) == bool(expected.error), (ours.error, expected.error)
    if not expected.error:
        assert ours.planned
        assert ours.same(expected)


def test_the_table_is_as_large_as_it_should_be():
    assert len({row.repository for row in published()}) >= 30
    assert sum(offloads(row.config) for row in published()) >= 60


def test_an_estimate_refuses_what_deepspeed_itself_refuses():
    answered = []
    for row in published():
        config = {key: value for key, value in row.config.items() if key not in BATCHES}
        refusal = refused_by_deepspeed(config)
        if refusal and "only supported for CUDA" not in refusal:
            try:
                Job.of_deepspeed("Llama 3 8B", config, sequence=512, micro_batch=1, accumulation=1)
            except ModelError:
                continue
            answered.append((row.name, refusal))
    assert answered == []


def test_the_doctor_says_what_becomes_of_each():
    firsts = [under_a_plan(row.config)[0] for row in published()]
    refused = [first.detail for first in firsts if first.state != "ok"]
    assert 0 < len(refused) < len(firsts)
    named = ("refused: zero_optimization.", "DeepSpeed itself refuses it: ")
    assert [detail for detail in refused if not detail.startswith(named)] == []

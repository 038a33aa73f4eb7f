"""Tests of the names of machines and models: other spellings of a name are taken, and other names never."""

import re
from contextlib import suppress

import pytest
from ebbtide.simulator.estimates.cards import CARDS
from ebbtide.simulator.estimates.models.architecture import architecture, known_config
from ebbtide.simulator.estimates.models.families import HUB, MODELS
from ebbtide.simulator.estimates.presets import preset, preset_name
from ebbtide.simulator.estimates.sheets import SHEETS
from ebbtide.simulator.rules import RuleError

from tests.machines import machine

SPELLINGS = (str.upper, str.title, lambda name: name.replace(" ", "-"), lambda name: f"NVIDIA {name}")


@pytest.mark.parametrize("name", [*SHEETS, *MODELS])
def test_a_name_is_taken_in_any_spelling_and_a_similar_one_never(name):
    find = preset_name if name in SHEETS else lambda given: known_config(given)["_name_or_path"]
    for spell in SPELLINGS:
        assert find(spell(name)) == name
    plain = _letters(name)
    for at in range(len(plain)):
        shorter = plain[:at] + plain[at + 1 :]
        with suppress(RuleError):
            assert _letters(find(shorter)) == _letters(shorter), f"{shorter} was taken for {find(shorter)}"


def _letters(name):
    return re.sub(r"rtx|[^a-z0-9]", "", name.lower())


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
    ],
)
def test_a_card_is_found_by_its_own_name(card, name):
    assert preset_name(card) == name


@pytest.mark.parametrize("card", CARDS)
def test_a_card_without_a_preset_is_described_and_not_confused_with_another_one(card):
    like = CARDS[card].like
    with pytest.raises(RuleError, match=f"no machine preset .*preset\\('{like}', gpu_memory_bytes"):
        preset(card)
    made, near = preset(like, **CARDS[card].figures), preset(like)
    assert made.device_memory_bytes == CARDS[card].figures["gpu_memory_bytes"]
    for rate in ("device_flops_per_s", "attention_flops_per_s"):
        faster = CARDS[card].tflops * 1e12 / SHEETS[like].flops
        assert made.rate(rate) == pytest.approx(faster * near.rate(rate))
    assert made.rate("h2d_bytes_per_s") == CARDS[card].link_gb_per_s * 1e9
    assert made.device_name != near.device_name


def test_the_hub_names_are_those_of_models_with_the_same_sizes():
    assert architecture("openai-community/gpt2").blocks() != architecture("GPT-2 1.5B").blocks()
    elements = sum(sum(block.params) for block in architecture("gpt2").blocks())
    assert elements == 124_439_808
    assert known_config("meta-llama/Llama-3.1-8B")["_name_or_path"] == "Llama 3 8B"
    assert set(HUB.values()) == set(MODELS)
    for other in ("gpt2-medium", "Mistral-7B-v0.3", "Lama 3 8B", "mixtral"):
        with pytest.raises(RuleError, match="There is no known model"):
            known_config(other)


def test_a_host_with_n_cards_has_n_ranks_and_a_node_one():
    assert {name: preset(name).default_gpus for name in ("rtx4090", "h100-node", "rtx4090-x2", "rtx5090-x8")} == {
        "rtx4090": 1,
        "h100-node": 1,
        "rtx4090-x2": 2,
        "rtx5090-x8": 8,
    }
    assert machine().model_copy(update={"name": "host-x2", "gpus_per_node": 2}).default_gpus == 1

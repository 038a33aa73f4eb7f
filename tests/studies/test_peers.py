"""Tests of the study that compares ebbtide with other offloading systems.

The speedups and verdicts that the study computes are checked with made-up measurements. Stock DeepSpeed, ebbtide and
the study's adapter for torchao also train for real, on tiny models.
"""

import importlib
import json
import sys

import pytest
import torch
from ebbtide.simulator import Plan

from studies import peers
from studies.gpu.comparison import WITHOUT, compare
from studies.gpu.suite import Suite
from studies.trials.torchao_offload import TorchaoEngine


def row(name, seconds, digest="a", **more):
    variant = {"stock_no_clipping": "stock", "superoffload_no_clipping": "superoffload", "stock_again": "stock"}.get(
        name
    )
    variant = variant or (f"twin_flow:{name[-3:]}" if name.startswith("twin") else name)
    return {"name": name, "variant": variant, "iteration_s": seconds, "hash": digest, **more}


RAN = {
    "stock": row("stock", 6.0),
    "stock_again": row("stock_again", 6.3),
    "deepcompile": {"variant": "deepcompile", "failed": "needs a GPU"},
    "ebbtide": row("ebbtide", 1.5),
    "stock_no_clipping": row("stock_no_clipping", 6.0, "b"),
    "superoffload": row("superoffload", 5.0),
    "zenflow": row("zenflow", 1.0, "z"),
    "superoffload_no_clipping": row("superoffload_no_clipping", 2.0, "b"),
    "twin_flow_0.6": row("twin_flow_0.6", 4.0),
    "twin_flow_0.8": row("twin_flow_0.8", 3.0),
    "torchao": {"variant": "torchao", "failed": "No module named 'torchao'"},
    **{f"twin_flow_{r}": row(f"twin_flow_{r}", 4.5) for r in (0.9, 0.7, 0.5)},
    "no_offload": row("no_offload", 0.5),
    "stock_accumulating": {**row("stock_accumulating", 9.0, "c"), "variant": "stock"},
    "all_on": {**row("all_on", 3.0, "c"), "variant": "ebbtide"},
    "without_speculation": {**row("without_speculation", 4.5, "c"), "variant": "ebbtide"},
    "without_device_sums": {**row("without_device_sums", 6.0, "c"), "variant": "ebbtide"},
}


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setattr(Suite, "trial", lambda self, name, *a: dict(RAN[name]))
    monkeypatch.setattr(Suite, "plan", lambda self: None)
    plan = Plan(subgroup_size=1, placement=Plan.runs(["host"] * 4), speculate=4, speculate_visits=4, device_sums=4)
    monkeypatch.setattr(Suite, "plan_all_on", lambda self, micro_batches: plan)
    return Suite(tmp_path, "tiny", 1.0, 20_000, emulated=False)


def test_speedups_are_against_stock_and_the_best_exact_peer(suite):
    found = compare(suite)
    assert found["speedup"] == 4.0
    # The best is Twin-Flow at 0.8: ZenFlow has stale updates, and others do not offload or do not clip.
    assert found["speedup_over_best_exact_peer"] == 2.0
    assert found["correct"] is True
    assert found["noise"] == pytest.approx(1.05)
    rows = {r.get("name", r["variant"]): r for r in found["rows"]}
    assert [n for n, r in rows.items() if r.get("best")] == ["twin_flow_0.8"]
    assert rows["zenflow"]["bit_identical"] is False
    assert "failed" in rows["torchao"]


def test_without_clipping_bits_are_compared_with_stock_without_clipping(suite):
    rows = {r.get("name", r["variant"]): r for r in compare(suite)["rows"]}
    assert rows["superoffload_no_clipping"]["bit_identical"] is True
    assert rows["superoffload_no_clipping"]["speedup"] == 3.0


def test_features_are_compared_with_stock_of_as_many_micro_batches(suite):
    rows = {r.get("name", r["variant"]): r for r in compare(suite)["rows"]}
    assert [rows[name]["speedup"] for name in WITHOUT] == [3.0, 2.0, 1.5]
    assert all(rows[name]["bit_identical"] for name in WITHOUT)
    for name in WITHOUT:
        plan = Plan.load(suite.out / "tiny" / f"{name}.plan.json")
        assert all(way.early == (name != "without_speculation") for way in plan.ways)
        assert all(way.sum_on_device == (name != "without_device_sums") for way in plan.ways)


@pytest.mark.parametrize("name", ["ebbtide", "without_speculation"])
def test_wrong_bits_are_not_correct(suite, monkeypatch, name):
    monkeypatch.setitem(RAN, name, {**RAN[name], "hash": "wrong"})
    assert compare(suite)["correct"] is False


def test_no_bit_is_judged_where_stock_differs_from_itself(suite, monkeypatch):
    monkeypatch.setitem(RAN, "ebbtide", row("ebbtide", 1.5, "other"))
    monkeypatch.setitem(RAN, "stock_again", row("stock_again", 6.0, "another"))
    found = compare(suite)
    assert found["control_identical"] is False
    assert found["correct"] is None


def test_torchaos_engine_trains_a_model_as_plain_torch_does():
    # Check the adapter for torchao's optimizer with torch's own AdamW, since torchao's needs a GPU.
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    weight = model.weight.detach().clone()
    engine = TorchaoEngine(model, 1.0, lambda p, kw: torch.optim.AdamW(p, **kw))
    for _ in range(3):
        loss = engine(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean()
        engine.backward(loss)
        engine.step()
    assert not torch.equal(model.weight.detach().float().cpu(), weight)
    assert all(p.grad is None for p in model.parameters())
    assert [t.dtype for t in engine.fp32_partitioned_groups_flat] == [torch.float32] * 2


def in_this_process(monkeypatch):
    """Replace `Suite.run` of the GPU suite, which starts a process, by a call in this process, so that the
    test saves five imports of DeepSpeed.
    """

    def run(self, name, command, limit_s):
        module, *arguments = command
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        importlib.import_module(module).main()

    monkeypatch.setattr(Suite, "run", run)


@pytest.mark.slow
def test_stock_and_ebbtide_for_real(tmp_path, only_rank, monkeypatch):
    # All of them really train, on the emulated device. For each number of micro-batches per step, ebbtide and its
    # variants must give the same bits as stock DeepSpeed.
    path = tmp_path / "peers.json"
    in_this_process(monkeypatch)
    arguments = ["--json", str(path), "--device", "emulated", "--only", "features"]
    monkeypatch.setattr(sys, "argv", ["peers", *arguments])
    peers.main()
    found = json.loads(path.read_text())
    assert found["device_kind"] == "emulated"
    names = ["stock", "ebbtide", "stock_again", "stock_accumulating", *WITHOUT]
    assert [r["name"] for r in found["rows"]] == names
    assert all(row["bit_identical"] for row in found["rows"])
    assert found["correct"] is True

"""Tests of the changes to training or machine that ebbtide offers if no plan fits into memory: each change
fits, is the smallest that does, and changes one setting if one suffices.
"""

import pytest
from click.testing import CliRunner
from ebbtide.simulator import build_schedule
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.tuner.advice.ways_out import flags, ways_out
from ebbtide.tuner.cli import main
from ebbtide.tuner.placements.decision import most_micro_batches
from ebbtide.tuner.placements.division import ImpossibleError, check_bytes
from ebbtide.tuner.placements.parameters_and_early import begun
from ebbtide.tuner.quantities import size_bytes
from ebbtide.tuner.service.requests import MODELS

from tests.machines import node
from tests.tuner.test_search import workload

ONE_SIZE = {"subgroup_sizes": ()}  # plans keep the job's subgroups, which takes a third of the time
OF_MACHINE = ("device_memory_bytes", "host_memory_bytes")
LLAMA_16B = {
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 16000,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def changed(job, machine, changes):
    """Return a workload and a machine with the changes that ebbtide offered because no plan fitted into memory."""
    memory = {k: v for k, v in changes.items() if k in OF_MACHINE}
    machine = machine.with_rates(**memory) if memory else machine
    bought = (*memory, "storage_bytes")
    job = job.changed(**{k: v for k, v in changes.items() if k not in bought})
    return estimated(job, machine), machine


def peaks(way):
    told = way.plan.prediction
    return told.device_peak_bytes, told.host_peak_bytes, told.storage_bytes


@pytest.mark.parametrize(("model", "sequence", "micro_batch"), [("Llama 3.2 1B", 8192, 4), ("Qwen3 14B", 2048, 1)])
def test_every_change_that_is_offered_fits_when_simulated(model, sequence, micro_batch):
    job = Job.of_deepspeed(MODELS[model], sequence=sequence, micro_batch=micro_batch)
    machine = preset("rtx4090")
    assert not begun(estimated(job, machine), machine, Limits.of(estimated(job, machine), machine)).fits
    ways = ways_out(job, machine)
    assert ways
    assert [w.price for w in ways] == sorted(w.price for w in ways), "changes are not sorted by price"
    assert all(w.changes.get("device_memory_bytes", 0) <= machine.device_memory_bytes for w in ways)
    for way in ways:
        work, have = changed(job, machine, way.changes)
        planned = work.cut_as(way.plan)
        timeline = simulate_fast(build_schedule(planned, way.plan), have)
        times = way.plan.prediction.step_times
        seconds = times.mean_s(work.expected_clip_rate) if times else timeline.iteration_s
        limits = Limits.of(work, have, storage_bytes=way.changes.get("storage_bytes"))
        assert not limits.missing_bytes(timeline), way.label
        assert way.iteration_s == pytest.approx(seconds, rel=1e-9)
        assert way.tokens_per_s == pytest.approx(work.tokens_per_iteration / seconds)


def test_fewer_samples_are_offered_where_adding_them_up_takes_the_memory():
    shallow = {"layers": 5, "hidden": 4096, "heads": 32, "vocabulary": 32_000}
    job = Job.of_deepspeed(shallow, sequence=4096, micro_batch=4)

    def smaller(host_gib):
        memory = {"device_memory_bytes": 12 * GIB, "host_memory_bytes": host_gib * GIB}
        changes = [dict(way.changes) for way in ways_out(job, preset("rtx4090"), **memory)]
        return [change for change in changes if "micro_batch" in change and "sequence" not in change]

    assert smaller(16) == [{"micro_batch": 1, "accumulation": 4}]
    assert smaller(15) == [{"micro_batch": 1}]


@pytest.mark.parametrize("micro_batch", [1024, 10**12])
def test_a_huge_micro_batch_gets_no_more_accumulation_than_can_be_planned(micro_batch):
    # Changes are offered although keeping the samples of a step needs too many micro-batches to plan.
    job, machine = Job.of_deepspeed(MODELS["Llama 3 8B"], sequence=1024, micro_batch=micro_batch), preset("rtx4090")
    ways = ways_out(job, machine, ONE_SIZE)
    most = most_micro_batches(estimated(job, machine))
    assert any("micro_batch" in way.changes for way in ways)
    assert all(way.changes.get("accumulation", 1) <= most for way in ways)


def test_state_on_storage_is_offered_where_host_memory_ended():
    job, machine = Job.of_deepspeed(MODELS["Llama 3 8B"]), preset("h100-node")
    asked = {"host_memory_bytes": 40 * GIB, "device_memory_bytes": 40 * GIB}
    stored = {w.changes["storage_bytes"]: w for w in ways_out(job, machine, **asked) if "storage_bytes" in w.changes}
    ((size, way),) = stored.items()
    assert flags(way, job) == f"--storage DIR:{size / 1e12:g}TB"
    assert "state on a drive" in way.label
    assert way.plan.count("stored") > 0
    assert 0 < way.plan.prediction.storage_bytes <= size
    below = ways_out(job.changed(zero_stage=2), machine, **asked)
    assert {w.changes.get("zero_stage") for w in below if "storage_bytes" in w.changes} == {3}, "drives need ZeRO-3"


def test_one_knob_is_turned_no_further_than_needed_and_samples_stay():
    job = Job.of_deepspeed(MODELS["Llama 3.2 1B"], sequence=32768, micro_batch=4, accumulation=2, fused_loss=True)
    machine = preset("rtx4090").with_rates(device_memory_bytes=12 * GIB)
    ways = {tuple(way.changes): way.changes for way in ways_out(job, machine, ONE_SIZE)}
    assert ways["micro_batch", "accumulation"] == {"micro_batch": 1, "accumulation": 8}
    assert ways["sequence",] == {"sequence": 8192}
    for nearer in ({"micro_batch": 2, "accumulation": 4}, {"sequence": 16384}):
        work, have = changed(job, machine, nearer)
        assert not begun(work, have, Limits.of(work, have)).fits
    together = ways["micro_batch", "accumulation", "sequence"]
    assert together["sequence"] == 16384, "with smaller batches the sequence stays longer"


@pytest.mark.parametrize(("machine", "sequence"), [("rtx4090", 16384), ("h100-node", 65536)])
def test_a_loss_without_whole_logits_is_first_where_the_logits_are_too_large(machine, sequence):
    job, have = Job.of_deepspeed(MODELS["Qwen3 8B"], sequence=sequence), preset(machine)
    first, *others = ways_out(job, have, ONE_SIZE)
    assert dict(first.changes) == {"fused_loss": True}
    assert flags(first, job) == "--fused-loss"
    assert others, "only shorter samples fit otherwise"
    work = estimated(job, have)
    with pytest.raises(ImpossibleError, match=r"the logits and their fp32 copies take \d+\.\d GiB"):
        check_bytes(work, have, Limits.of(work, have))
    assert "logits" not in str(_error(job.changed(fused_loss=True, sequence=8 * sequence), have))


def _error(job, have):
    work = estimated(job, have)
    with pytest.raises(ImpossibleError) as raised:
        check_bytes(work, have, Limits.of(work, have))
    return raised.value


def test_activations_that_are_kept_are_recomputed_first():
    job = Job.of_deepspeed(MODELS["Llama 3.2 1B"], sequence=8192, micro_batch=2, recompute=False)
    ways = ways_out(job, preset("a100-node"))
    assert any(list(way.changes) == ["recompute"] for way in ways)
    assert any(flags(way, job) == "without --keep-activations" for way in ways)


KEPT = {"recompute": False}
TOO_LARGE = [
    ("Llama 3 8B", "a100-80gb", {"sequence": 65536, "recompute_share": 0.75, "fused_loss": True}),
    ("16B", "h100-node", {"sequence": 16384, "micro_batch": 7, "tensor_parallel": 2, "zero_stage": 1, **KEPT}),
    ("Llama 3 8B", "rtx4090-x4", {"sequence": 8192, "micro_batch": 5, "zero_stage": 2, "data_parallel": 2, **KEPT}),
]


@pytest.mark.parametrize(("model", "on", "settings"), TOO_LARGE)
def test_what_keeps_all_samples_is_offered_beside_what_does_not(model, on, settings):
    # No part of any offer can be left out, and a smaller micro-batch keeps the samples if it may.
    job, machine = Job.of_deepspeed({**MODELS, "16B": LLAMA_16B}[model], **settings), preset(on)

    def fits(changes):
        work, have = changed(job, machine, changes)
        return begun(work, have, Limits.of(work, have)).fits

    least = {"fused_loss": True, "zero_stage": 3, "recompute": True, "recompute_share": 1.0}
    least |= {"micro_batch": 1, "accumulation": job.micro_batch * job.accumulation}
    assert fits(least), "nothing that keeps the samples fits, so the test would check nothing"
    ways = ways_out(job, machine, ONE_SIZE)
    assert any("sequence" in way.changes for way in ways)
    assert set(ways[0].changes) <= set(least), "the samples change"
    if job.recompute:
        assert flags(ways[0], job) == "without --recompute-share"
    for way in ways:
        changes = {k: v for k, v in way.changes.items() if k not in (*OF_MACHINE, "storage_bytes")}
        assert len(changes) < len(way.changes) or fits(changes)
        for name in changes:
            fewer = {k: v for k, v in changes.items() if k != name and (name != "micro_batch" or k != "accumulation")}
            assert name == "accumulation" or not fits(fewer), f"{way.label}: {name} is not needed"


def test_a_limit_below_the_machine_is_the_first_to_be_raised():
    job, machine = Job.of_deepspeed(MODELS["Llama 3 8B"]), preset("h100-node")
    ways = ways_out(job, machine, device_memory_bytes=4 * GIB)
    assert {"device_memory_bytes": 12 * GIB} in [way.changes for way in ways], "12 GiB suffice and are not offered"


def test_what_the_deepspeed_config_says_is_changed_there():
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    job = Job.of_deepspeed(MODELS["GPT-2 1.5B"], config, sequence=8192)
    told = [flags(way, job) for way in ways_out(job, preset("rtx4090"))]
    assert '"train_micro_batch_size_per_gpu": 2 in the DeepSpeed config, --accumulation 2' in told


def test_the_samples_of_a_step_in_the_deepspeed_config_change_with_the_gpus():
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    job, machine = Job.of_deepspeed(MODELS["Llama 3 8B"], config, sequence=512), preset("a100-node")
    ways = ways_out(job, machine, device_memory_bytes=40 * GIB, host_memory_bytes=70 * GIB)
    told = next(flags(way, job) for way in ways if way.changes == {"data_parallel": 2})
    assert told == '"train_batch_size": 2 in the DeepSpeed config, --data-parallel 2'


def test_no_drive_is_offered_where_deepspeeds_subgroups_are_divided():
    job, machine = Job.of_deepspeed(MODELS["Llama 3.2 3B"], sequence=512), preset("rtx4090")
    fixed = ways_out(job, machine, {"pieces": True}, host_memory_bytes=24 * GIB)
    free = ways_out(job, machine, host_memory_bytes=24 * GIB)
    assert any("storage_bytes" in way.changes for way in free)
    assert fixed
    assert not any("storage_bytes" in way.changes for way in fixed)


def test_the_command_offers_them_in_the_place_of_advice():
    asked = ["plan", "--machine", "rtx4090", "--model", "Llama 3.2 1B"]
    done = CliRunner().invoke(main, [*asked, "--sequence", "8192", "--micro-batch", "4"])
    assert done.exit_code == 2
    assert "GPU memory is " in done.output
    assert "These fit, the cheapest first:" in done.output
    assert done.output.count("LoRA trains") == 1
    assert "--sequence 2048: " in done.output
    assert "smaller micro-batch or" not in done.output


LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def test_zero_3_comes_first_where_zero_2_does_not_fit_and_memory_is_the_least_as_sold():
    job = Job.of_deepspeed(LLAMA_7B, sequence=512, data_parallel=2, zero_stage=2)
    asked = {"device_memory_bytes": 16 * GIB, "host_memory_bytes": 100 * GIB}
    ways = ways_out(job, preset("a100-node"), **asked)
    assert dict(ways[0].changes) == {"zero_stage": 3}
    assert flags(ways[0], job) == "--zero-stage 3"
    memory = next(way for way in ways if "device_memory_bytes" in way.changes)
    assert flags(memory, job) == "--gpu-memory 20GiB", "17.8 GiB are needed"


def test_a_usual_pc_is_told_that_host_memory_is_short_and_what_costs_nothing_first():
    asked = ["plan", "--machine", "rtx4090", "--model", "examples/llama-3-8b.json", "--host-memory", "64GiB"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 2
    assert "host memory is 44.44 GiB short" in done.output
    assert "GPU memory is" not in done.output, "the GPU's memory would suffice"
    lines = [line.strip() for line in done.output.splitlines() if line.startswith("  ")]
    assert lines
    assert "--storage" in lines[0]
    assert lines[-1].split(":")[0] == "--host-memory 128GiB", "the machine has that much, so a flag is enough"
    assert "GPU memory:" not in done.output


def test_no_way_out_asks_for_more_than_the_card_has():
    job = Job.of_deepspeed(MODELS["Llama 3 8B"], sequence=100_000)
    ways = ways_out(job, preset("rtx4090"))
    assert ways
    assert not [way for way in ways if "device_memory_bytes" in way.changes]


def test_24_gib_of_a_24_gb_card_are_all_of_it():
    machine = preset("rtx4090")
    assert machine.device_memory_bytes < 24 * GIB
    work = estimated(Job.of_deepspeed(MODELS["Llama 3.2 1B"]), machine)
    assert Limits.of(work, machine, 24 * GIB) == Limits.of(work, machine)
    with pytest.raises(ValueError, match="at most what the machine has"):
        Limits.of(work, machine, 26 * GIB)
    assert Limits.of(workload(), node(), 20 * GIB) != Limits.of(workload(), node())


def test_the_refusal_is_printed_before_ways_out_are_tried(monkeypatch, capsys):
    printed = []

    def tried(*_, **__):
        printed.append(capsys.readouterr().err)
        return []

    monkeypatch.setattr("ebbtide.tuner.advice.ways_out.ways_out", tried)
    asked = ["plan", "--machine", "rtx4090", "--model", "examples/llama-3-8b.json", "--micro-batch", "64"]
    with pytest.raises(SystemExit):
        main([*asked, "--sequence", "8192"])
    assert "GPU memory" in printed[0]


@pytest.mark.parametrize(("ranks", "own_gib", "owned"), [(2, 1024, True), (1, 255, True), (2, 200, False)])
def test_host_memory_that_the_machine_has_is_a_flag_and_more_is_bought(ranks, own_gib, owned):
    machine = preset("a100-40gb").with_rates(host_memory_bytes=own_gib * GIB)
    job = Job.of_deepspeed(LLAMA_16B, sequence=2048, data_parallel=ranks)
    memory = {"host_memory_bytes": 60 * GIB, "device_memory_bytes": 20 * GIB}
    (way,) = (way for way in ways_out(job, machine, ONE_SIZE, **memory) if "host_memory_bytes" in way.changes)
    told = flags(way, job)
    if not owned:
        assert told == "256 GiB of host memory per node, without --host-memory"
        assert way.label.endswith("256 GiB of host memory per node, no limit of host memory")
        return
    limit = size_bytes(told.removeprefix("--host-memory "))
    limits = Limits.of(estimated(job, machine), machine, 20 * GIB, limit)
    assert limits.hold(*peaks(way))

"""Tests that the simulator ignores no key of a DeepSpeed config silently: a key changes the result, is
reported as not simulated, or is refused.
"""

import json
import re

import pytest
from ebbtide.simulator import ModelError, Quantity, build_strategy, simulate, workload_from_model
from ebbtide.simulator.estimates.deepspeed_keys import (
    _KINDS,
    _KNOWN,
    _SECTIONS,
    HELD,
    OPTIMIZER,
    REMOVED,
    STATE,
    ZERO,
    at_least,
    loaded,
)
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.offloading import default_pinning, offloading

from tests.machines import node

GPT = {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 500}
CPU = {"device": "cpu"}


def config(optimizer=CPU, **zero):
    section = {"stage": 3, **zero}
    if optimizer is not None:
        section["offload_optimizer"] = optimizer
    return {"bf16": {"enabled": True}, "zero_optimization": section}


def workload(ds_config):
    return workload_from_model(GPT, on(), ds_config, sequence=64)


def on():
    return node(device_flops_per_s=Quantity.exact(1e14), network_bytes_per_s=Quantity.exact(1e9))


def stock(ds_config):
    work = workload(ds_config)
    name, options = offloading(ds_config).strategy(work.zero_stage)
    schedule = build_strategy(name, work, **options)
    return name, simulate(schedule, on()).iteration_s


@pytest.mark.parametrize(
    ("ds_config", "name"),
    [
        (None, "zero3_offload"),
        (config(), "zero3_offload"),
        (config(None), "no_offload"),
        (config({"device": "none"}), "no_offload"),
        (config(None, cpu_offload=True), "zero3_offload"),
        (config({**CPU, "pin_memory": True}), "zero3_offload"),
        (config({**CPU, "pin_memory": False}), "zero3_offload_unpinned"),
        (config({**CPU, "ratio": 0.3, "pin_memory": True}), "twin_flow"),
        (config({**CPU, "super_offload": True}), "superoffload"),
        (config(CPU, offload_param=CPU), "zero_infinity"),
        (config(CPU, cpu_offload_param=True), "zero_infinity"),
        (config(CPU, stage=2), "zero_offload"),
    ],
)
def test_the_strategy_is_the_one_that_deepspeed_would_run(ds_config, name):
    assert stock(ds_config)[0] == name


def test_the_share_and_the_pinning_of_twin_flow_count():
    cut = {"sub_group_size": 100_000}
    shares = [stock(config({**CPU, "ratio": r, "pin_memory": True}, **cut))[1] for r in (0.2, 0.6, 1.0)]
    assert shares == sorted(set(shares))
    unpinned = stock(config({**CPU, "ratio": 0.6, "pin_memory": False}, **cut))[1]
    assert unpinned > shares[1]


def test_pinning_is_the_default_of_the_deepspeed_at_hand():
    assert [default_pinning(v) for v in ("0.18.6", "0.19.4", "0.19.5", "0.20.0")] == [False, False, True, True]


TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}


@pytest.mark.parametrize(
    ("ds_config", "version", "strategy"),
    [
        (config(CPU), "0.19.5", ("zero3_offload", {})),
        (config(CPU), "0.19.4", ("zero3_offload_unpinned", {"async_gradients": False})),
        (config({**CPU, "pin_memory": True}), "0.19.4", ("zero3_offload", {"async_gradients": False})),
        (config(CPU, stage=2), "0.17.0", ("zero_offload", {"pinned": False})),
        (config({**CPU, "pin_memory": True}, stage=2), "0.16.9", ("zero_offload", {"parameters": "wide"})),
        (config({**CPU, "pin_memory": True}, stage=2), "0.14.0", ("zero_offload", {"parameters": "fresh_16_bit"})),
        ({**config(CPU), **TORCH_ADAM}, "0.19.8", ("zero3_offload", {"torch_adam": True})),
        ({**config(CPU, stage=2), **TORCH_ADAM}, "0.19.8", ("zero_offload", {"torch_adam": True})),
        (
            config({**CPU, "ratio": 0.5, "pin_memory": True}),
            "0.19.4",
            ("twin_flow", {"ratio": 0.5, "pinned": True, "async_gradients": False}),
        ),
        (
            config({**CPU, "pin_memory": True}),
            "0.11.1",
            ("zero3_offload", {"async_gradients": False, "overflow_check": "host"}),
        ),
        (
            config({**CPU, "pin_memory": True}),
            "0.9.3",
            ("zero3_offload", {"async_gradients": False, "overflow_check": "device"}),
        ),
        (config({**CPU, "pin_memory": True}), "0.11.2", ("zero3_offload", {"async_gradients": False})),
    ],
)
def test_an_older_deepspeed_is_simulated_as_its_source_has_it(ds_config, version, strategy):
    moved = offloading(ds_config, version)
    name, options = moved.strategy(workload(ds_config).zero_stage)
    assert (name, options) == strategy
    assert build_strategy(name, workload(ds_config), **options).ops


def test_without_a_config_no_answer_depends_on_the_installed_deepspeed(monkeypatch):
    monkeypatch.setattr("ebbtide.simulator.estimates.deepspeed_keys._installed_version", lambda: "0.18.9")
    job = Job.of_deepspeed("Llama 3.2 1B")
    for offload in (offloading(None), job.offload, Job(architecture=job.architecture).offload):
        assert offload.strategy(3) == ("zero3_offload", {})
        assert offload.strategy(2) == ("zero_offload", {})
    assert offloading(config(CPU)).strategy(3) == ("zero3_offload_unpinned", {"async_gradients": False})


def test_parameters_on_the_host_follow_the_version_too():
    name, options = offloading(config(CPU, offload_param=CPU), "0.14.2").strategy(3)
    assert name == "zero_infinity"
    assert {options[key] for key in ("pinned", "pinned_parameters", "async_gradients")} == {False}


def test_each_older_way_is_slower_on_the_host():
    for stage, ways in (
        (3, [("0.19.8", {}), ("0.19.4", {}), ("0.19.4", TORCH_ADAM)]),
        (2, [("0.19.8", {}), ("0.16.9", {}), ("0.16.9", TORCH_ADAM)]),
    ):
        made = []
        for version, extra in ways:
            ds_config = {**config({**CPU, "pin_memory": True}, stage=stage), **extra}
            name, options = offloading(ds_config, version).strategy(stage)
            made.append(simulate(build_strategy(name, workload(ds_config), **options), on()).iteration_s)
        assert made == sorted(set(made))


@pytest.mark.parametrize(
    ("ds_config", "says"),
    [
        (config({**CPU, "ratio": -3}), "offload_optimizer.ratio must be a number between 0 and 1"),
        (config({**CPU, "ratio": "half"}), "ratio must be a number .* 'half'"),
        (config({**CPU, "ratio": 0.3}, stage=2), "ratio must be 1 under ZeRO-2"),
        (config({"device": "nvme", "ratio": 0.3}), "ratio .*must not be set together with .*nvme"),
        (config(CPU, zenflow={}), "zenflow must be absent"),
        (config({**CPU, "pin_memory": "nay"}), "pin_memory must be true or false, but got 'nay'"),
        (config({**CPU, "bufer_count": 4}), "knows, .*: write buffer_count"),
        (config(CPU, offload_param={"device": "cpu", "colour": 1}), "offload_param.colour must be"),
        (config(CPU, colour=1), "zero_optimization.colour must be a key that DeepSpeed knows"),
        ({"zero_optimisation": {"stage": 1}}, "got zero_optimisation. .* Did you mean zero_optimization"),
        ({"zero_optimization": []}, r"zero_optimization must be an object, but got \[\]"),
        ({"zero_optimization": [1]}, "zero_optimization must be an object"),
        (config("cpu"), "offload_optimizer must be an object, but got 'cpu'"),
        (config(CPU, offload_param="cpu"), "offload_param must be an object, but got 'cpu'"),
        (config(CPU, stage="three"), "stage must be 1, 2 or 3, but got 'three'"),
        (config(CPU, stage=2.5), "stage must be 1, 2 or 3, but got 2.5"),
        (config(CPU, sub_group_size="x"), "must be a whole number >= 0 or .* but got 'x'"),
        (config(CPU, sub_group_size=float("inf")), "sub_group_size must be .* but got inf"),
        (config(CPU, sub_group_size=10**400), "sub_group_size must be .* but got 1000"),
        (config(CPU, sub_group_size=2.5), "sub_group_size must be a whole number"),
        ({"train_batch_size": "32"}, "train_batch_size must be a whole number .* but got '32'"),
        ({"train_batch_size": 32.0}, "train_batch_size must be a whole number .* but got 32.0"),
        ({"fp16": {"enabled": "si"}}, "fp16.enabled must be true, false or 'auto', but got 'si'"),
        (config(CPU, mics_shard_size="all"), "mics_shard_size must be a whole number"),
        ({"bf16": True}, "bf16 must be an object, but got True"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "grad_accum_dtype must be one of fp32"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": "false"}},
            "cpu_checkpointing must be true or false, but got 'false'",
        ),
    ],
)
def test_nonsense_is_refused_with_its_key(ds_config, says):
    with pytest.raises(ModelError, match=says) as refused:
        stock(ds_config)
    assert len(str(refused.value)) < 300


def test_the_keys_that_the_installed_deepspeed_has_removed_are_known():
    from deepspeed.runtime import config as of_deepspeed

    removed = {*getattr(of_deepspeed, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ())}
    removed |= {f"{ZERO}.{key}" for key in getattr(of_deepspeed, "_REMOVED_ZERO_CONFIG_KEYS", ())}
    assert {key for version, keys in REMOVED.items() if at_least(version) for key in keys} == removed


@pytest.mark.parametrize(("version", "key"), [(v, key) for v, keys in REMOVED.items() for key in sorted(keys)])
def test_a_key_that_deepspeed_has_removed_is_refused(monkeypatch, version, key):
    where, _, name = key.rpartition(".")
    value = {"mics_shard_size": -1, "sparse_gradients": False}.get(name, False if where else {"enabled": False})
    ds_config = config(**{name: value}) if where else {**config(), name: value}
    installed = "ebbtide.simulator.estimates.deepspeed_keys._installed_version"
    monkeypatch.setattr(installed, lambda: ".".join(map(str, version)))
    with pytest.raises(ModelError, match=f"{key} must be absent, because DeepSpeed refuses it since version"):
        workload(ds_config)
    monkeypatch.setattr(installed, lambda: "0.19.6")
    workload(ds_config)


def test_apex_is_refused_with_zero_by_each_version(monkeypatch):
    monkeypatch.setattr("ebbtide.simulator.estimates.deepspeed_keys._installed_version", lambda: "0.18.6")
    with pytest.raises(ModelError, match=r"amp\.enabled must be absent or false with ZeRO"):
        workload({"amp": {"enabled": True, "opt_level": "O1"}, "zero_optimization": {"stage": 2}})


@pytest.mark.parametrize(
    ("ds_config", "key"),
    [
        (config({**CPU, "buffer_count": 5}), "zero_optimization.offload_optimizer.buffer_count"),
        (config(CPU, offload_param={"device": "none", "max_in_cpu": 5}), "zero_optimization.offload_param.max_in_cpu"),
        (config(CPU, stage3_model_persistence_threshold=5), "zero_optimization.stage3_model_persistence_threshold"),
        (config({**CPU, "pipeline_read": True}), "zero_optimization.offload_optimizer.pipeline_r"),
        (config({**CPU, "buffer_count": 5}, stage=2), "offload_optimizer.buffer_count"),
        ({**config(), "bf16": {"enabled": True, "immediate_grad_update": True}}, "bf16.immediate_grad_update"),
        (
            {**config(), "activation_checkpointing": {"partition_activations": True}},
            "activation_checkpointing.partition_activations",
        ),
    ],
)
def test_what_changes_nothing_is_told(ds_config, key):
    stock(ds_config)
    assert re.search(f"not simulated: .*{key}", workload(ds_config).provenance)


@pytest.mark.parametrize("key", ["ratio", "pin_memory", "super_offload", "device"])
def test_what_counts_is_not_told_to_be_without_effect(key):
    values = {"ratio": 0.5, "pin_memory": False, "super_offload": True, "device": "cpu"}
    ds_config = config({**CPU, key: values[key]})
    assert key not in workload(ds_config).provenance


def test_unpinned_copies_count_with_parameters_in_cpu_memory_too():
    ds_config = config({**CPU, "pin_memory": False}, offload_param=CPU)
    assert "pin_memory" not in workload(ds_config).provenance


def test_an_alias_of_deepspeeds_counts_as_its_key():
    by_name, by_alias = (
        workload(config(CPU, **{key: 1000})) for key in ("stage3_max_live_parameters", "max_live_parameters")
    )
    assert by_name.device_base_bytes == by_alias.device_base_bytes
    assert "max_live" not in by_alias.provenance


def test_every_key_of_the_installed_deepspeed_is_known():
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload

    for where, schema in (
        (ZERO, zero.DeepSpeedZeroConfig),
        (STATE, offload.DeepSpeedZeroOffloadOptimizerConfig),
        (HELD, offload.DeepSpeedZeroOffloadParamConfig),
    ):
        names = {field.alias or name for name, field in schema.model_fields.items()}
        assert names <= _KNOWN[where]


def test_a_key_that_only_the_installed_deepspeed_knows_is_no_mistake(monkeypatch):
    known = {**_KNOWN, STATE: _KNOWN[STATE] - {"fast_init"}}
    monkeypatch.setattr("ebbtide.simulator.estimates.deepspeed_keys._KNOWN", known)
    assert loaded(config({**CPU, "fast_init": True}))


def test_a_number_that_json_reads_as_infinite_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    text = json.dumps(config(CPU, sub_group_size=7)).replace("7", "1e400")
    path.write_text(text)
    with pytest.raises(ModelError, match="sub_group_size"):
        offloading(path)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (config(CPU, stage="3"), config(CPU, stage=3)),
        (config(CPU, stage=3.0), config(CPU, stage=3)),
        (config(CPU, reduce_bucket_size="1"), config(CPU, reduce_bucket_size=1)),
        (config(CPU, overlap_comm="yes"), config(CPU, overlap_comm=True)),
        (config(CPU, overlap_comm=0), config(CPU, overlap_comm=False)),
        (config({**CPU, "ratio": "0.3"}), config({**CPU, "ratio": 0.3})),
        (config({"device": "auto", "pin_memory": "auto"}), config({})),
        (config(CPU, offload_param={"device": "auto"}), config(CPU, offload_param={})),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"fp16": {"enabled": "true"}}, {"fp16": {"enabled": True}}),
    ],
)
def test_values_are_taken_for_what_deepspeed_takes_them(given, read):
    assert loaded(given) == read


def test_these_are_deepspeeds_own_readings():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {
        "stage": "3",
        "reduce_bucket_size": "1",
        "overlap_comm": "yes",
        "offload_optimizer": {"device": "auto", "ratio": "0.3"},
    }
    stock = DeepSpeedZeroConfig(**zero)
    ours = loaded({ZERO: zero})[ZERO]
    assert (stock.stage, stock.reduce_bucket_size, stock.overlap_comm) == (
        ours["stage"],
        ours["reduce_bucket_size"],
        ours["overlap_comm"],
    )
    assert stock.offload_optimizer.device == "none"
    assert "device" not in ours[OPTIMIZER]
    assert stock.offload_optimizer.ratio == ours[OPTIMIZER]["ratio"] == 0.3


def test_a_file_may_have_comments_and_trailing_commas(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  // ours\n  "zero_optimization": {"stage": 2,},\n}\n')
    assert loaded(path) == {"zero_optimization": {"stage": 2}}


ODD = (None, True, 0, -1, 2.5, "auto", "cpu", "3", [], [1], {}, {"device": "cpu"}, float("nan"), float("inf"), 10**400)


@pytest.mark.parametrize("key", sorted({*_KINDS, *_SECTIONS}))
def test_whatever_stands_at_a_key_gives_a_result_or_names_the_key(key):
    for value in ODD:
        ds_config = config({"device": "cpu"})
        *path, last = key.split(".")
        inner = ds_config
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
        assert last in (said_of(ds_config) or last), value


def said_of(ds_config):
    try:
        stock(ds_config)
    except ModelError as error:
        return str(error)
    return ""


KNOBS = [
    {"micro_batch": 3, "accumulation": 2, "data_parallel": 2},
    {"zero_stage": 2, "recompute": False},
    {"sub_group_size": 10**6, "offload": "parameters"},
    {"offload": "none"},
    {"offload": "nvme", "zero_stage": 3},
]


@pytest.mark.parametrize(
    ("sections", "precision"),
    [
        ({"fp16": {"enabled": "auto"}}, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, "fp16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "bf16"),
    ],
)
def test_auto_enables_no_precision_that_a_config_leaves_out(sections, precision):
    job = Job.of_deepspeed(GPT, {**sections, "zero_optimization": {"stage": 2}})
    assert job.precision == precision
    assert f"precision: auto -> {precision}" in job.notes


@pytest.mark.parametrize("knobs", KNOBS)
def test_a_changed_job_is_the_one_that_its_own_config_describes(knobs):
    given = config({**CPU, "pin_memory": False}, reduce_bucket_size="auto")
    given["gradient_clipping"] = 0.3
    job = Job.of_deepspeed(GPT, given, sequence=64)
    assert job.clip == 0.3
    changed = job.changed(**knobs)
    shape = {k: v for k, v in knobs.items() if k in ("recompute", "data_parallel")}
    again = Job.of_deepspeed(GPT, changed.deepspeed(), sequence=64, **shape)
    for name in set(Job.model_fields) - {"notes", "config"}:
        assert getattr(again, name) == getattr(changed, name), name
    one, other = (estimated(j, on()).model_copy(update={"provenance": ""}) for j in (changed, again))
    assert one == other


def test_a_job_refuses_what_it_has_no_field_for():
    with pytest.raises(ModelError, match=r"a training job is described by the fields .*, but got the field 'batch'"):
        Job.of_deepspeed(GPT, None, batch=3)
    with pytest.raises(ModelError, match="accumulation"):
        Job.of_deepspeed(GPT, None).changed(acumulation=3)

"""Tests of machines, workloads, plans and timelines: the values they refuse, and how they are saved and loaded."""

import errno
import json
import os
from pathlib import Path

import pytest
from ebbtide.simulator import Layer, Machine, Plan, PlanError, Prediction, Quantity, Workload, build_schedule, simulate
from ebbtide.simulator.plan import CheckpointPlan, Way, json_schema
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.machines import machine, workload


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_quantity_is_finite_and_positive(value):
    with pytest.raises(ValueError, match="finite and greater than 0"):
        Quantity.exact(value)


def test_a_quantity_from_samples():
    found = Quantity.from_samples([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median, found.q1, found.q3, found.n) == (3.0, 2.0, 4.0, 5)
    assert not found.stable
    assert Quantity.from_samples([1.0, 1.01, 1.02]).stable
    with pytest.raises(ValueError, match="samples must have at least one"):
        Quantity.from_samples([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h2d_bytes_per_s": 1e20}, "h2d_bytes_per_s must be at most"),
        ({"host_memory_bytes": 10**30}, r"host_memory_bytes must be at most 1e\+16 .* got 1e\+30"),
        ({"copy_latency_s": 1e9}, r"copy_latency_s must be at most 1 .* got 1e\+09"),
        ({"gpus_per_node": 10**5}, "gpus_per_node must be at most 10000"),
        ({"loop_s": Quantity.exact(1e9)}, "loop_s must be at most 100000"),
        ({"duplex_factor": 0.1}, r"duplex_factor must lie in \[0.3, 1.25\]"),
        ({"cpu_cores": 0}, "cpu_cores"),
        ({"device_memory_bytes": -5}, "device_memory_bytes"),
        ({"schema_version": 99}, "written by a newer ebbtide"),
        ({"spoilers": 2}, "spoilers"),
    ],
)
def test_machines_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        machine(**change)


def test_a_machine_survives_its_file(tmp_path):
    machine().save(tmp_path / "m.json")
    assert Machine.load(tmp_path / "m.json") == machine()


def test_rates_that_were_not_measured_come_from_their_relatives():
    bare = machine(h2d_bytes_per_s=8.0, dram_bytes_per_s=30.0).model_copy(
        update={"pageable_h2d_bytes_per_s": None, "host_copy_bytes_per_s": None}
    )
    assert bare.rate("pageable_h2d_bytes_per_s") == 2.0
    assert bare.rate("host_copy_bytes_per_s") == 10.0
    with pytest.raises(ValueError, match="device_flops_per_s is needed"):
        bare.rate("device_flops_per_s")


def test_host_adam_between_measured_thread_counts():
    found = machine(host_adam_params_per_s=9.0).model_copy(
        update={"host_adam_by_threads": {2: Quantity.exact(4.0), 4: Quantity.exact(6.0)}}
    )
    assert [found.host_adam_rate(n) for n in (1, 2, 3, 4, 8)] == [2.0, 4.0, 5.0, 6.0, 9.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"subgroups": (10, 0)}, "every subgroup must hold >= 1"),
        ({"subgroups": (10,)}, "must sum up to the same number"),
        ({"parameters": ((1, 2),)}, "workload.parameters must sum up"),
        ({"schema_version": 99}, "written by a newer ebbtide"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"wire_dtype": "int8"}, "wire_dtype"),
    ],
)
def test_workloads_that_cannot_be(fields, message):
    layer = Layer(params=10, forward_s=1.0, backward_s=1.0)
    with pytest.raises(ValueError, match=message):
        Workload(**{"name": "w", "layers": (layer,) * 2, "subgroups": (10, 10), **fields})


def test_layers_and_subgroups_whose_borders_differ():
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in (5, 20, 5))
    work = Workload(name="w", layers=layers, subgroups=(10, 10, 10))
    assert work.layers_of_subgroups() == ((0, 1), (1,), (1, 2))
    assert work.shares() == (((0, 5),), ((0, 5), (1, 10), (2, 5)), ((2, 5),))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), cuts=st.lists(st.integers(1, 40)))
def test_shares_hold_every_element_once(sizes, cuts):
    total, layers, left = sum(sizes), [], sum(sizes)
    for params in [*cuts, total]:
        taken = min(params, left)
        if taken:
            layers.append(Layer(params=taken, forward_s=1.0, backward_s=1.0))
        left -= taken
    work = Workload(name="w", layers=tuple(layers), subgroups=tuple(sizes))
    by_layer = [sum(n for _, n in held) for held in work.shares()]
    by_subgroup = [0] * len(sizes)
    for held in work.shares():
        for subgroup, n in held:
            by_subgroup[subgroup] += n
    assert by_layer == [layer.params for layer in layers]
    assert by_subgroup == sizes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema_version": 99}, "written by a newer"),
        ({"warp": 1}, "warp"),
        ({"placement": [{"placement": "moon", "count": 1}]}, "placement"),
        ({"placement": []}, "placement"),
        ({"staging_slots": 0}, "plan.staging_slots must be >= 1"),
        ({"prefetch": 3}, "plan.prefetch must be at most plan.staging_slots"),
        ({"subgroups": [1, 2, 3]}, "placement of all 3 subgroups in plan.subgroups"),
        ({"subgroup_size": 0}, "subgroup_size"),
        ({"parameter_home": [{"home": "host", "count": 3}]}, "got 3 locations for 2 subgroups"),
        ({"parameter_home": [{"home": "moon", "count": 2}]}, "parameter_home"),
    ],
)
def test_plans_that_cannot_be(fields, message):
    good = {"subgroup_size": 10, "placement": [{"placement": "device", "count": 2}]}
    with pytest.raises(PlanError, match=message):
        Plan.from_fields({**good, **fields})


def test_a_page_goes_through_a_link_and_into_a_pipe(tmp_path):
    made, path, link, pipe = machine(), *(tmp_path / name for name in ("real", "link", "pipe"))
    path.write_text("old")
    link.symlink_to(path)
    made.save(link)
    assert link.is_symlink()
    assert Machine.load(path) == made
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    made.save(pipe)
    assert pipe.is_fifo()
    assert Machine.model_validate_json(os.read(reader, 2**16)) == made
    os.close(reader)
    assert len(list(tmp_path.iterdir())) == 3, "saving left another file in the folder"


def test_a_plan_survives_its_file_and_is_a_readable_page(tmp_path):
    prediction = Prediction(
        iteration_s=1, iteration_low_s=1, iteration_high_s=2, forward_s=0, backward_s=1, step_s=0, update_s=0
    )
    plan = Plan(
        subgroup_size=10,
        placement=Plan.runs(["host"] * 50 + ["resident"] * 30),
        prediction=prediction,
        alternatives=(prediction,),
        reasons=("because",),
    )
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert len(path.read_text().splitlines()) < 100, "80 subgroups of two kinds must take two entries"
    assert list(tmp_path.iterdir()) == [path], "saving left a temporary file"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"subgroup_size": 10}', "\x00"])
def test_files_that_are_no_plans(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(PlanError, match="is not a plan this ebbtide can use"):
        Plan.load(tmp_path / "p.json")
    with pytest.raises(PlanError, match="must be a readable JSON file"):
        Plan.load(tmp_path / "gone.json")


def test_a_file_of_another_kind_is_not_taken_for_an_old_plan(tmp_path):
    (tmp_path / "machine.json").write_text('{"schema_version": 1, "device_kind": "cuda"}')
    with pytest.raises(PlanError, match=r"ways: must be given; device_kind: must be a known field \(got 'cuda'\)"):
        Plan.load(tmp_path / "machine.json")


def test_the_digest_is_of_what_a_plan_does():
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"] * 2))
    assert plan.model_copy(update={"reasons": ("x",)}).digest == plan.digest
    assert plan.model_copy(update={"threads": 3}).digest != plan.digest


def test_parameters_live_on_the_device_unless_a_plan_says_otherwise(tmp_path):
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"] * 3), staging_slots=0)
    assert plan.parameter_locations == ("device",) * 3
    said = Plan(subgroup_size=10, ways=(Way("host", "device"),) * 3, staging_slots=0)
    assert said.digest == plan.digest
    assert plan.model_dump()["ways"] == [{"count": 3, "placement": "host"}]
    locations = ("device", "host", "host")
    moved = plan.with_ways([Way("host", location) for location in locations])
    assert moved.parameter_locations == locations
    assert moved.digest != plan.digest
    moved.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == moved
    assert moved.placed(["device"] * 3, staging_slots=1).parameter_locations == locations
    assert moved.placed(["host"] * 4).parameter_locations == ("device",) * 4


def test_the_exported_schema_is_the_plans_own():
    from pathlib import Path

    exported = Path(__file__).parents[2] / "docs" / "plan.schema.json"
    assert json.loads(exported.read_text()) == json_schema(), "run `make schema`"


def test_a_plan_for_another_number_of_subgroups_is_refused():
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"] * 3))
    with pytest.raises(PlanError, match="all 4 subgroups of the workload, but sets the placement of 3"):
        build_schedule(workload(), plan)


def test_predicted_and_other_timelines_open_side_by_side(tmp_path):
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host", "device"] * 2))
    timeline = simulate(build_schedule(workload(), plan), machine())
    timeline.to_perfetto(tmp_path / "t.json", timeline)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {1, 2}
    assert len(spans) == 2 * len(timeline.spans)
    first = min((e for e in spans if e["pid"] == 1), key=lambda e: e["ts"])
    assert (first["name"], first["dur"]) == ("forward l0", 1e6)
    assert any(e["ph"] == "C" for e in events), "the trace has no memory counter"


def test_layers_of_the_first_schema_had_the_times_of_all_micro_batches():
    work = workload(gradient_accumulation_steps=4, forward_s=0.5, backward_s=1.5)
    fields = work.model_dump(mode="json")
    before = [{**layer, "forward_s": 2.0, "backward_s": 6.0} for layer in fields["layers"]]
    old = json.dumps({**fields, "schema_version": 1, "layers": before})
    assert Workload.model_validate_json(old) == work
    assert (work.forward_s, work.backward_s) == (4 * 4 * 0.5, 4 * 4 * 1.5)


def test_nothing_is_left_of_a_page_that_a_full_disk_does_not_take(tmp_path, monkeypatch):
    def full(path, text, **_):
        path.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        machine().save(tmp_path / "machine.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"gradient_accumulation_steps": "few"},
        {"gradient_accumulation_steps": 0},
        {"layers": [{"params": 40, "forward_s": "soon", "backward_s": 1.0}]},
        {"layers": "none"},
        {"layers": [40]},
        {"layers": None},
    ],
)
def test_what_is_wrong_in_a_file_of_the_first_schema_is_told_as_ever(bad):
    fields = workload(gradient_accumulation_steps=4).model_dump(mode="json")
    with pytest.raises(ValidationError, match=next(iter(bad))):
        Workload.model_validate({**fields, "schema_version": 1, **bad})


def test_a_second_checkpoint_folder_of_an_older_plan_is_refused_and_an_empty_one_is_read():
    assert CheckpointPlan.model_validate({"dir": "x", "drain_dir": None, "drain_keep": 0}) == CheckpointPlan(dir="x")
    with pytest.raises(ValueError, match=r"checkpoint\.drain_dir is no longer supported.*rclone"):
        CheckpointPlan.model_validate({"dir": "x", "drain_dir": "y", "drain_keep": 1})

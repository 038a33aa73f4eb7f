"""Tests of `tune doctor`: every finding that is not ok names a fix, and a finding with the state "bad"
sets exit code 1.
"""

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner
from ebbtide.runtime.hardware.usable import Usable
from ebbtide.simulator import Plan
from ebbtide.tuner.cli import main
from ebbtide.tuner.doctor import examination, hardware, memory, software, storage
from ebbtide.tuner.doctor.finding import bad, ok
from ebbtide.tuner.doctor.known_wrong import known_wrong
from ebbtide.tuner.doctor.under_a_plan import under_a_plan
from ebbtide.tuner.service.server import shipped_example


def doctor(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def test_this_machine_is_ready_or_is_told_what_to_do(tmp_path):
    result = doctor("--json", "--checkpoint-dir", tmp_path)
    findings = json.loads(result.stdout)
    names = {finding["name"] for finding in findings}
    assert {"torch", "deepspeed", "compiler", "update kernel", "cgroup", "fsync"} <= names
    assert all(bool(finding["fix"]) == (finding["state"] != "ok") for finding in findings)
    assert result.exit_code == any(finding["state"] == "bad" for finding in findings)
    assert not list(tmp_path.iterdir())


def test_a_fault_is_shown_with_its_fix_and_the_exit_code_tells(monkeypatch):
    monkeypatch.setattr(examination, "whole", lambda *_: [ok("a", "fine"), bad("b", "is not", "x")])
    result = doctor()
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "ok   a                  fine",
        "bad  b                  is not",
        "     fix: x",
    ]
    assert "\x1b" not in result.stdout


def test_a_plan_that_does_not_fit(tmp_path, monkeypatch):
    plan = Plan(subgroup_size=10**13, subgroups=(10**13,), placement=Plan.runs(["host"]))
    plan.save(tmp_path / "plan.json")
    result = doctor("--plan", tmp_path / "plan.json", "--json")
    told = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert told["host memory"]["state"] == "bad"
    assert "--gpu-memory" in told["host memory"]["fix"]


def test_host_memory_of_a_plan_is_what_its_prediction_says():
    plan = Plan.load(shipped_example() / "plan.json")
    told = plan.prediction.model_copy(update={"host_peak_bytes": 3 * 2**30, "limits": {}})
    needs = memory.host_memory(2**40, plan.model_copy(update={"prediction": told}), ranks=2).detail
    assert needs == "1024.0 GiB free, the plan needs 6.0 GiB for 2 rank(s)"


def test_a_stage_that_is_auto_is_as_if_it_were_absent():
    assert known_wrong("0.19.8", {"zero_optimization": {"stage": "auto"}}) == known_wrong("0.19.8", {})


@pytest.mark.parametrize("wrong", [{"bf16": True}, {"scheduler": 3}])
def test_a_config_that_deepspeed_refuses_is_told_as_such(tmp_path, wrong):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **wrong}))
    result = doctor("--ds-config", path, "--json")
    told = [finding for finding in json.loads(result.stdout) if finding["name"] == "DeepSpeed config"]
    assert [finding["state"] for finding in told] == ["bad"]
    assert "DeepSpeed itself refuses it" in told[0]["detail"]
    assert result.exit_code == 1


def test_compilers_that_are_missing(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    states = {finding.name: finding.state for finding in software.compiler()}
    assert states == {"compiler": "bad", "ninja": "bad"}


def test_a_build_lock_that_was_left_over(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert [finding.state for finding in software.build_locks()] == ["ok"]
    left = tmp_path / "cpu_adam" / "lock"
    left.parent.mkdir()
    left.touch()
    os.utime(left, (0, 0))
    (found,) = software.build_locks()
    assert (found.state, found.fix) == ("bad", f"rm {left}")
    assert "since 1970" in found.detail


def test_versions_out_of_range(monkeypatch):
    monkeypatch.setattr(
        software, "requires", lambda _: ["torch>=99", "numpy", "nowhere>=1", 'pandas>=2; extra == "tune"']
    )
    told = {finding.name: finding for finding in software.versions()}
    assert told["torch"].fix == "pip install 'torch>=99'"
    assert told["nowhere"].detail == "not installed"
    assert set(told) == {"torch", "nowhere"}


def test_a_containers_limits_are_findings():
    free = Usable(2**36, 2**35, 8, 8, 2**36, 8)
    assert memory.limits(free).state == "ok"
    throttled = memory.limits(replace(free, quota=0.5, cores=1))
    assert (throttled.state, "quota of 0.5" in throttled.detail) == ("slow", True)
    assert memory.limits(replace(free, limit_bytes=2**20)).state == "slow"


@pytest.mark.parametrize(
    ("mount", "fsync_s", "state"),
    [
        ("/ ext4 rw,relatime", 1e-3, "ok"),
        ("/ ext4 rw,nobarrier", 1e-3, "bad"),
        ("/ tmpfs rw", 1e-3, "slow"),
        ("/ ext4 rw", 1e-7, "bad"),
    ],
)
def test_whether_a_sync_is_honest(tmp_path, monkeypatch, mount, fsync_s, state):
    mounts = [mount, "/another tmpfs rw"]
    names = ("mountpoint", "fstype", "opts")
    monkeypatch.setattr(
        psutil,
        "disk_partitions",
        lambda **_: [SimpleNamespace(**dict(zip(names, row.split(), strict=True))) for row in mounts],
    )
    monkeypatch.setattr(storage, "_fsync_s", lambda _: fsync_s)
    assert storage.checkpoint_folder(str(tmp_path))[-1].state == state
    mounts += [f"{tmp_path} ramfs rw", f"{tmp_path} ext4 rw,barrier=0"]  # the last one hides the others
    assert "barrier=0" in storage.checkpoint_folder(str(tmp_path))[-1].detail
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libeatmydata.so")
    assert storage.checkpoint_folder(str(tmp_path))[-1].state == "bad"


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    assert storage.checkpoint_folder(str(tmp_path / "none"))[0].fix.startswith("mkdir")

    def refused(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "fsync", refused)
    assert "Permission denied" in storage.checkpoint_folder(str(tmp_path))[0].detail
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variable", "ranks", "state", "says"),
    [
        ("1", 1, "slow", "OMP_NUM_THREADS is 1"),
        ("", 2, "slow", "is not set, and torchrun and accelerate launch set it to 1 for 2 ranks"),
        ("", 1, "ok", "not set, 8 cores per rank"),
        ("4", 2, "ok", "is 4, 4 cores per rank"),
        ("", 8, "ok", "not set, 1 cores per rank"),
    ],
)
def test_threads_that_stock_lacks(monkeypatch, variable, ranks, state, says):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr("ebbtide.runtime.hardware.cores.near_cores", lambda _address: list(range(8)))
    measured = hardware._rates(1, 2)
    assert min(measured) > 0
    monkeypatch.setattr(hardware, "_rates", lambda *_: (1e9, 2e9))
    found = hardware.threads(ranks)
    assert (found.state, says in found.detail) == (state, True), found
    if state == "slow":
        assert f"export OMP_NUM_THREADS={8 // ranks}" in found.fix
        assert re.search(r"Here 1 of them update \d+\.\d\d G params/s, and \d update \d", found.detail)


@pytest.mark.parametrize(("full", "state"), [(0.9e9, "ok"), (1.02e9, "ok"), (1.5e9, "slow")])
def test_more_threads_are_advised_only_if_they_were_measured_to_be_faster(monkeypatch, full, state):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("ebbtide.runtime.hardware.cores.near_cores", lambda _address: [0, 1])
    monkeypatch.setattr(hardware, "_rates", lambda *_: (1e9, full))
    found = hardware.threads(1)
    assert (found.state, bool(found.fix)) == (state, state == "slow")
    assert f"Here 1 of them update 1.00 G params/s, and 2 update {full / 1e9:.2f}" in found.detail


def test_narrow_and_old_links_are_slow():
    assert hardware.link_finding("PCIe", 16, 16, 4, 4).state == "ok"
    assert hardware.link_finding("PCIe", 8, 16, 4, 4).state == "slow"
    assert hardware.link_finding("PCIe", 16, 16, 3, 4).state == "slow"


def test_tune_run_begins_with_the_fast_part(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    monkeypatch.setattr("ebbtide.tuner.commands.run._watch_for_engines", lambda: None)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr(examination, "fast_part", lambda: [bad("ninja", "missing", "install it")])
    refused = CliRunner().invoke(main, ["run", "--", "true", "--flag"])
    assert (refused.exit_code, started) == (2, [])
    assert "fix: install it" in refused.stderr
    done = CliRunner().invoke(main, ["run", "--no-check", "--", "true", "--flag"])
    assert done.exit_code == 0
    assert started[0][1] == ["true", "--flag"]
    assert os.environ["PYTHONPATH"].endswith("frontdoor/startup:/mine")


def test_known_wrong_results_are_told_for_the_config(tmp_path, monkeypatch):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"gradient_accumulation_steps": 4, "zero_optimization": zero}
    monkeypatch.setattr(software, "version", lambda _: "0.18.6")
    (wrong,) = software.known_results(config)
    assert (wrong.state, "issues/7967" in wrong.detail) == ("bad", True)
    assert wrong.fix == "pip install 'deepspeed>=0.19.0'"
    (hint,) = software.known_results({**config, "gradient_accumulation_steps": 1})
    assert (hint.state, "issues/7981" in hint.detail) == ("slow", True)
    assert "only if a step has several backward()" in hint.detail
    both = software.known_results({**config, "gradient_accumulation_steps": "auto"})
    assert [finding.state for finding in both] == ["bad", "slow"]
    for fine in ({**zero, "stage": 3}, {"stage": 2}):
        alone = {"gradient_accumulation_steps": 1, "zero_optimization": fine, "optimizer": {"type": "AdamW"}}
        assert [finding.state for finding in software.known_results(alone)] == ["ok"]
    muon = {**config, "optimizer": {"type": "Muon"}}
    monkeypatch.setattr(software, "version", lambda _: "0.19.7")
    assert ["8463" in f.detail for f in software.known_results(muon)] == [True]
    monkeypatch.setattr(software, "version", lambda _: "0.19.8")
    zero["stage"] = 3
    assert [f.state for f in software.known_results(muon)] == ["ok"]
    assert [f.state for f in software.known_results({"zero_optimization": zero, "optimizer": {"type": "Adam"}})] == [
        "ok"
    ]
    assert "must be a JSON file" in doctor("--ds-config", tmp_path / "none.json").output


def test_what_is_said_of_lion_and_adagrad_is_what_attach_says():
    from ebbtide.runtime.zero.checks.private import MENDED
    from ebbtide.tuner.doctor.known_wrong import TABLE, known_wrong

    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    for name, first in MENDED.items():
        config = {"zero_optimization": zero, "optimizer": {"type": name}}
        (row,) = known_wrong("0.19.7", config)
        assert (row.fixed, known_wrong(first, config)) == (first, [])
    assert all(row.what for row in TABLE)


CPU = {"offload_optimizer": {"device": "cpu"}}
UNDER_A_PLAN = {
    "no offload": ({"stage": 2}, {}, "ok", "left to DeepSpeed, .*device is 'none'"),
    "stage 0": ({"stage": 0}, {}, "ok", "left to DeepSpeed, .*zero_optimization.stage is 0"),
    "script's": ({"stage": 2, **CPU}, {}, "ok", "trains .* the script's own optimizer"),
    "kernels": ({"stage": 3, **CPU}, {"optimizer": {"type": "Lion"}}, "ok", "results of DeepSpeedCPULion"),
    "own step": (
        {"stage": 1, **CPU},
        {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}},
        "ok",
        "results of torch's Adam, .*on the CPU",
    ),
    "nvme": (
        {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        {},
        "bad",
        r"refused: .*offload_optimizer\.device must be 'cpu', or 'nvme' with an nvme_path",
    ),
    "16-bit states": (
        {"stage": 2, **CPU},
        {"bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}},
        "ok",
        "results of DeepSpeed's own step, .* bf16.bf16_master_weights_and_grads asks",
    ),
    "misspelt": ({"stage": 2, "ovelap_comm": True}, {}, "bad", "DeepSpeed itself .*ovelap_comm"),
}


@pytest.mark.parametrize("name", UNDER_A_PLAN)
def test_whether_and_how_a_config_would_train_under_a_plan(name):
    zero, beside, state, says = UNDER_A_PLAN[name]
    (finding,) = under_a_plan({"zero_optimization": zero, **beside})
    assert (finding.state, bool(re.search(says, finding.detail))) == (state, True), finding


def test_what_a_plan_takes_the_place_of_is_told_apart_from_hints():
    offload = {"device": "cpu", "ratio": 0.4, "pin_memory": True, "buffer_count": 4}
    zero = {"stage": 3, "sub_group_size": 1e9, "offload_optimizer": offload}
    trains, replaced, hints = under_a_plan({"zero_optimization": zero, "train_batch_size": "auto"})
    assert "those of DeepSpeedCPUAdam" in replaced.detail
    for key in ("sub_group_size", "pin_memory", "buffer_count"):
        assert key in hints.detail
    assert [f.state for f in (trains, replaced, hints)] == ["ok"] * 3


def test_one_stream_and_one_queue_are_slow(monkeypatch):
    def told(**zero):
        config = {
            "train_batch_size": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, **zero},
        }
        return [f.detail for f in under_a_plan(config) if f.state == "slow"]

    assert told() == told(overlap_comm=True) == []
    assert "overlap_comm is false" in told(overlap_comm=False)[0]
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert hardware.queues() == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert hardware.queues()[0].state == "slow"


def test_parameters_on_a_drive_are_said_to_be_deepspeeds():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/d"}}
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    assert "DeepSpeed's own swapper" in " ".join(finding.detail for finding in under_a_plan(config))
    zero["offload_param"] = {"device": "cpu"}
    assert "swapper" not in " ".join(finding.detail for finding in under_a_plan(config))


@pytest.mark.parametrize(
    ("params", "issues"),
    [({}, {8495}), ({"decay_mom_rate": 0.1}, {8495, 8589}), ({"cycle_momentum": False, "decay_mom_rate": 0.1}, set())],
)
def test_what_onecycle_does_to_betas_is_told(params, issues):
    config = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "OneCycle", "params": params}}
    assert {row.issue for row in known_wrong("0.19.8", config)} == issues
    assert known_wrong("0.19.8", config | {"scheduler": {"type": "WarmupLR"}}) == []


def test_a_clients_scheduler_after_load_state_is_told_on_condition():
    (row,) = known_wrong("0.19.8", {"zero_optimization": {"stage": 3}})
    assert "resumes with load_state" in str(row)
    assert "load_state" not in str(known_wrong("0.19.8", {"zero_optimization": {"stage": 2}}))


@pytest.mark.parametrize(("stage", "key", "told"), [(1, {}, 1), (2, {}, 1), (3, {}, 0), (2, {"plan": "auto"}, 0)])
def test_state_that_stock_does_not_find_is_told(stage, key, told):
    # `tests.runtime.contract.training.all_state` has seen stock fail so.
    found = known_wrong("0.19.8", {"zero_optimization": {"stage": stage}, "ebbtide": key})
    assert sum("safe_get_full_optimizer_state" in str(row) for row in found) == told


@pytest.mark.parametrize(("mib", "told"), [(64, 1), (1024, 0)])
def test_the_shared_memory_of_a_container_is_told(monkeypatch, mib, told):
    monkeypatch.setattr(memory.os, "statvfs", lambda _: SimpleNamespace(f_blocks=mib, f_frsize=2**20))
    found = [finding for finding in memory.shared_memory() if "bus error" in finding.detail]
    assert len(found) == told
    assert all(f"{mib} MiB" in finding.detail and "--shm-size" in finding.fix for finding in found)

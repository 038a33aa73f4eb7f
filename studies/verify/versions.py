"""Test of `tune verify` on versions of DeepSpeed that are known to be wrong, and on the installed one."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ebbtide.runtime.hardware.launcher import free_port

ROOT = Path(__file__).resolve().parents[2]
# (version, whether it leaves gradients out of the norm under ZeRO-2 with offload and accumulation).
VERSIONS = (("0.18.6", True), ("installed", False))
STEPS, LIMIT_S = 3, 400
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 10**9,
}
SCRIPT = """
import deepspeed, torch
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, train_step

torch.manual_seed(0)
model = ByteGPT(SIZES["tiny"])
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")[0]
batches = Batches(2, 32)
for number in range(100):
    train_step(engine, batches.at(number, engine.device))
"""


def known_versions() -> list[dict[str, Any]]:
    """Run `tune verify` on each version of DeepSpeed to test, and return a list with a row of findings per version.

    If the version is not installed, the row has the reason why it was skipped.
    """
    return [_row(version, wrong) for version, wrong in VERSIONS]


def _row(version: str, wrong: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"version": version, "wrong": wrong}
    python, environment = sys.executable, dict(os.environ)
    if version != "installed":
        venv = Path(os.environ.get("COMPAT_DIR", ROOT / "build" / "compat")) / version
        if not (venv / "ready").exists():
            return row | {"skipped": f"no venv at {venv} (scripts/compat.sh {version} makes one)"}
        python = str(venv / "bin" / "python")
        environment["TORCH_EXTENSIONS_DIR"] = str(venv / "ops")
        environment["PATH"] = os.pathsep.join([str(venv / "bin"), environment["PATH"]])
    return row | _verified(python, environment)


def _verified(python: str, environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ebbtide-verify-") as scratch:
        folder = Path(scratch)
        (folder / "ds.json").write_text(json.dumps(CONFIG))
        (folder / "train.py").write_text(SCRIPT)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        command = [
            sys.executable,
            "-m",
            "ebbtide.tuner.cli",
            "verify",
            "--steps",
            str(STEPS),
            "--json",
            "out.json",
            "--",
            python,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=1",
            f"--master-port={free_port()}",
            "train.py",
        ]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return {"skipped": f"no end after {LIMIT_S} s"}
        if not (folder / "out.json").exists():
            return {"skipped": (done.stderr or done.stdout).strip()[-500:]}
        return _told(json.loads((folder / "out.json").read_text()))


def _told(result: dict[str, Any]) -> dict[str, Any]:
    (finding,) = result["findings"]
    first = finding["first"] or {"step": 0, "name": "nothing"}
    return {
        "found": not result["right"],
        "named": (first["step"], first["name"], finding["off"]) == (1, "gradient norm", "stock")
        and any("7967" in line for line in result["known"]),
        "said": f"{finding['verdict']}, step {first['step']}: {first['name']}",
        "versions": result["sides"][0]["versions"],
    }

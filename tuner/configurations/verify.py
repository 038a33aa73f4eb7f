"""Runs configurations for real on this machine: measurement beside prediction."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.profiler.hardware import look
from ebbtide.simulator import Machine
from ebbtide.simulator.estimates.deepspeed_keys import AUTO
from ebbtide.tuner.configurations.outcome import Outcome, Question

STEPS = 8  # timed, after those of warm-up
TIMEOUT_S = 1800.0  # of one configuration
_TAIL_LINES = 3


@dataclass(frozen=True)
class Verified:
    """One configuration, executed.

    Attributes:
        iteration_s: median of the timed steps, of the slowest rank.
        failure: empty, or how it failed.
    """

    outcome: Outcome
    iteration_s: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        """Of the prediction: (predicted - measured) / measured."""
        return self.outcome.iteration_s / self.iteration_s - 1


def verify(question: Question, outcomes: Sequence[Outcome]) -> list[Verified]:
    """Trains each configuration for a few steps in processes of its own, on random tokens.

    Raises:
        ValueError: the model is no Hugging Face config that can be built here.
    """
    model = _buildable(question.model)
    return [_run(question, model, outcome) for outcome in outcomes]


def _buildable(model: Any) -> Path:
    path = Path(model) if isinstance(model, (str, Path)) else None
    if path is None or not path.is_file() or "model_type" not in json.loads(path.read_text()):
        raise ValueError(
            "--verify builds the model with transformers, so --model must be a Hugging Face "
            f"config.json with a model_type, but got {model}"
        )
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError(
            "--verify builds the model with transformers, which is not installed: "
            "pip install './ebbtide[hf]', or leave --verify out"
        ) from None
    return path.resolve()


def _run(question: Question, model: Path, outcome: Outcome) -> Verified:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "ds.json").write_text(json.dumps(_config(question, outcome)))
        if outcome.plan is not None:
            outcome.plan.save(folder / "plan.json")
        command = _command(folder, model, question.sequence, outcome)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Verified(outcome, failure=f"no end after {TIMEOUT_S:.0f} s")
        times = [json.loads(p.read_text())["iteration_s"] for p in folder.glob("rank*.json")]
        if done.returncode != 0 or len(times) != outcome.configuration.gpus:
            tail = (done.stderr or done.stdout).strip().splitlines()[-_TAIL_LINES:]
            return Verified(outcome, failure=" / ".join(tail) or f"exit code {done.returncode}")
        return Verified(outcome, max(times))


def other_machine(machine: Machine) -> str:
    """How this machine differs from the one that predictions are for; empty: it is that one."""
    import torch

    cuda = torch.cuda.is_available()
    facts = look(cuda).fields
    if Machine.fingerprint_of(facts) == machine.fingerprint:
        return ""
    return (
        f"predictions are for {machine.name} ({machine.device_name}, {machine.cpu_cores} cores), "
        f"but this machine is another one ({facts['device_name']}, {facts['cpu_cores']} cores"
        f"{'' if cuda else ', no GPU'}): what is measured here is no error of theirs. "
        "`tune profile` measures this one (--machine)"
    )


def _config(question: Question, outcome: Outcome) -> dict[str, Any]:
    """DeepSpeed's config of this configuration: the one simulated, with an optimizer, and with
    what was simulated in the place of ``"auto"``, which only Hugging Face understands.
    """
    given = question.of(outcome.configuration).deepspeed()
    config: dict[str, Any] = _without_automatic(given)
    config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-5}})
    if AUTO in json.dumps(given.get("scheduler", {})):
        del config["scheduler"]  # its lengths are the trainer's to know
    work = question.workload(outcome.configuration)
    for name in ("bf16", "bfloat16", "fp16"):
        if name in config:
            config[name]["enabled"] = False
    if work.wire_dtype != "fp32":
        config.setdefault(work.wire_dtype, {})["enabled"] = True
    if given.get("gradient_clipping") == AUTO:
        config["gradient_clipping"] = 1.0
    hidden = question.architecture.hidden
    zero = given["zero_optimization"]
    for key, elements in (
        ("reduce_bucket_size", hidden * hidden),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden)),
    ):
        if zero.get(key) == AUTO:
            config["zero_optimization"][key] = elements
    return config


def _without_automatic(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_automatic(v) for k, v in value.items() if v != AUTO}
    return value


def _command(folder: Path, model: Path, sequence: int, outcome: Outcome) -> list[str]:
    from ebbtide.runtime.hardware.launcher import free_port

    c = outcome.configuration
    worker = [
        "ebbtide.tuner.configurations.trial",
        "--model",
        str(model),
        "--folder",
        str(folder),
        "--sequence",
        str(sequence),
        "--steps",
        str(STEPS),
        *(["--recompute"] * c.recompute),
    ]
    launcher = [f"--nproc-per-node={c.gpus}", f"--master-port={free_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", *worker]

"""Counts of the project's own files and functions that one plan, one what-if, one engine.step() and one save enter.

Run it as ``python scripts/walk.py plan`` (or ``what-if``, ``step``, ``save``) in the checkout that is counted.
"""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = os.path.realpath(Path(__file__).parents[1])
OPTIMIZED = 0x1  # flag of a function's code. A class body or a module has none


def counted(work: Callable[[], Any]) -> dict[str, int]:
    """Run something, and return the number of files and functions of this checkout that it entered on any thread."""
    seen: set[tuple[str, str]] = set()

    def entered(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & OPTIMIZED:
            seen.add((code.co_filename, code.co_qualname))

    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    # Code without a file, such as `<string>`, would have this folder as its own.
    own = {(os.path.realpath(file), name) for file, name in seen.copy() if not file.startswith("<")}
    outside = tuple(f"{ROOT}{os.sep}{part}" for part in ("tests", ".venv", "scripts"))
    own = {(file, name) for file, name in own if file.startswith(ROOT + os.sep) and not file.startswith(outside)}
    return {"files": len({file for file, _ in own}), "functions": len(own)}


def plan(folder: Path) -> Callable[[], Any]:
    """Return `tune plan --quick` for a model of 8 B parameters on an RTX 4090."""
    from click.testing import CliRunner
    from ebbtide.tuner.cli import main

    job = ["--machine", "rtx4090", "--model", "Llama 3 8B", "--sequence", "1024"]

    def run() -> None:
        done = CliRunner().invoke(main, ["plan", *job, "--quick", "-o", str(folder / "plan.json")])
        assert done.exit_code == 0, done.output

    return run


def what_if(_: Path) -> Callable[[], Any]:
    """Return the work of the service's worker for one request of a what-if."""
    from ebbtide.tuner.service.worker import RESULT, calls, run

    body = {"machine": "rtx4090", "model": "Llama 3 8B", "sequence": 1024}
    table = calls()

    def ask() -> None:
        tag, answer = run({"call": "what-if", "body": body}, table, lambda *_: None)
        assert tag == RESULT, answer

    return ask


def _trained() -> Any:
    """Return an engine of a small model under a plan, on this machine's CPU, that is about to make its third step."""
    sys.path.insert(0, ROOT)
    import deepspeed
    import torch
    from ebbtide import attach
    from ebbtide.simulator import Plan

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29617")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "sub_group_size": 4160, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    plan = Plan.model_validate({"subgroup_size": 4160, "placement": [{"placement": "host", "count": 4}]})
    attach(engine, plan=plan)

    def forward() -> None:
        loss = engine(torch.ones(1, 64, dtype=torch.bfloat16, device=engine.device)).float().sum()
        engine.backward(loss)

    for _ in range(2):
        forward()
        engine.step()
    forward()
    return engine


def step(_: Path) -> Callable[[], Any]:
    """Return the third `engine.step()` of a small model under a plan."""
    made: Callable[[], Any] = _trained().step
    return made


def save(folder: Path) -> Callable[[], Any]:
    """Return a save of a small model's checkpoint under a plan, after its third step."""
    engine = _trained()
    engine.step()
    return lambda: engine.save_checkpoint(str(folder / "checkpoints"))


WALKS = {"plan": plan, "what-if": what_if, "step": step, "save": save}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps({name: counted(WALKS[name](Path(made))) for name in sys.argv[1:] or ("plan", "what-if")}))

"""Training scripts with ebbtide in their DeepSpeed config, as functions that a forked process runs."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.bench.killed import Kill, KillingFiles

STEPS, SAVE_EVERY = 10, 2
SCRIPTS = ("trainer", "accelerate", "loop")
FOLDER = {"trainer": "checkpoint-{}", "accelerate": "checkpoint_{}", "loop": "checkpoint-{}"}
LAST_FILE = {"trainer": "trainer_state.json", "accelerate": "done", "loop": "done"}


@dataclass(frozen=True)
class Script:
    """A training script to test.

    Attributes:
        name: Kind of the script: ``trainer``, ``accelerate`` or ``loop``.
    """

    name: str
    limit: int
    checkpoint: dict[str, Any]

    def saved(self, folder: Path) -> list[int]:
        """Return the steps at which the script has saved a complete checkpoint to its folder."""
        pattern, last = FOLDER[self.name], LAST_FILE[self.name]
        steps = (step for step in range(1, STEPS + 1))
        return [s for s in steps if (folder / pattern.format(s) / last).exists()]


def train(script: Script, folder: Path, kill: Kill, result: Path) -> None:
    """Run a training script to its end, from the newest checkpoint if there is one.

    The results are written to the file ``result``.
    """
    import ebbtide.runtime

    from studies.bench.bits import digest, optimizer_state

    ebbtide.runtime.enable()
    progress = ScriptProgress(kill)
    sys.addaudithook(progress.heard)
    resumed, losses, optimizer = _SCRIPTS[script.name](script, folder, progress)
    if hasattr(optimizer, "wait"):
        optimizer.wait()
    page = {"resumed": resumed, "losses": losses, "state": digest(optimizer_state(optimizer))}
    result.write_text(json.dumps(page))


class ScriptProgress(KillingFiles):
    """A counter of a training script's saves and of the files that it deletes from old checkpoints.

    The counter kills the process at the save (``on_save``), or at the deleted file (``rotation``), that a `Kill` names.
    """

    _rotating = False

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """Count the files that a training script deletes from an old checkpoint.

        Python calls this as an audit hook before each file operation of this process.
        """
        if event == "shutil.rmtree":
            self._rotating = "checkpoint" in Path(str(args[0])).name
        elif event == "os.remove" and self._rotating:
            self.point("rotation")


def _config(script: Script) -> dict[str, Any]:
    zero = {
        "stage": 3,
        "sub_group_size": 20_000,
        "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # torch's Adam, because DeepSpeed's own rounds powers of beta differently after a resume.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "ebbtide": {"checkpoint": script.checkpoint},
    }


def _examples() -> list[dict[str, Any]]:
    import torch

    made = []
    for number in range(2 * STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 64, (16,), generator=generator)
        made.append({"input_ids": tokens, "labels": tokens})
    return made


def _model() -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    size: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def _trainer(script: Script, folder: Path, progress: ScriptProgress) -> tuple[int, list[float], Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Saves(TrainerCallback):
        resumed = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.resumed = state.global_step

        def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            progress.point("on_save")

    saves = Saves()
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        save_total_limit=script.limit,
        deepspeed=_config(script),
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(_model(), arguments, train_dataset=_examples(), callbacks=[saves])
    there = folder.is_dir() and any(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if there else None)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    engine: Any = trainer.model_wrapped
    engine.checkpoint_engine.wait()
    return saves.resumed, losses, engine.optimizer


def _engine(script: Script) -> Any:
    import deepspeed
    import torch

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(script))
    return engine


def _step(engine: Any, examples: list[dict[str, Any]], step: int) -> float:
    import torch

    two = examples[2 * step : 2 * step + 2]
    tokens = torch.stack([example["input_ids"] for example in two])
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def _newest(script: Script, folder: Path) -> int:
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - as people write it
    pattern = FOLDER[script.name]
    return max((s for s in range(STEPS + 1) if pattern.format(s) in names), default=0)


def _trained(
    script: Script,
    folder: Path,
    progress: ScriptProgress,
    engine: Any,
    load: Callable[[str], object],
    save: Callable[[str], object],
) -> tuple[int, list[float], Any]:
    examples, losses, pattern = _examples(), list[float](), FOLDER[script.name]
    first = _newest(script, folder)
    if first:
        load(str(folder / pattern.format(first)))
    for step in range(first, STEPS):
        losses.append(_step(engine, examples, step))
        if (step + 1) % SAVE_EVERY:
            continue
        place = folder / pattern.format(step + 1)
        save(str(place))
        (place / "done").write_text("")
        numbered = ((int(p.name[len(pattern) - 2 :]), p) for p in folder.glob(pattern.format("*")))
        for _, gone in sorted(numbered)[: -script.limit]:
            shutil.rmtree(gone)
        progress.point("on_save")
    engine.checkpoint_engine.wait()
    return first, losses, engine.optimizer


def _loop(script: Script, folder: Path, progress: ScriptProgress) -> tuple[int, list[float], Any]:
    engine = _engine(script)
    return _trained(script, folder, progress, engine, engine.load_checkpoint, engine.save_checkpoint)


def _accelerate(script: Script, folder: Path, progress: ScriptProgress) -> tuple[int, list[float], Any]:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=_config(script))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    loader: Any = torch.utils.data.DataLoader(_examples(), batch_size=2)  # type: ignore[arg-type]
    engine, _, _ = accelerator.prepare(model, optimizer, loader)
    return _trained(script, folder, progress, engine, accelerator.load_state, accelerator.save_state)


_SCRIPTS = {"trainer": _trainer, "accelerate": _accelerate, "loop": _loop}

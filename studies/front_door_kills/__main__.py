"""A study that kills training scripts while they save or delete checkpoints, and resumes them.

The scripts run unchanged with ebbtide: one uses Hugging Face's Trainer, one Accelerate, and one is
a plain loop. Each keeps one or two checkpoints and deletes older ones. A script is killed with
SIGKILL right after a save, while an older checkpoint is being deleted, or at a random moment.

Then the script starts again, looks for its newest checkpoint itself, and trains to the end. The
step that it resumed from is compared with the newest checkpoint that stock DeepSpeed would have
had on disk at the kill. The final state is compared, bit by bit, with that of an uninterrupted run.

    python -m studies.front_door_kills --kills 30 --json studies/results/checkpoint/front_door.json
"""

import json
import random
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from studies.bench.console import kill_parser
from studies.bench.forked import Child
from studies.bench.killed import campaign, concluded
from studies.bench.many_engines import freeze_heap
from studies.checkpoints.run import warm_up
from studies.front_door_kills.scripts import SAVE_EVERY, SCRIPTS, STEPS, Kill, Script, train

RUN_LIMIT_S = 300.0


@dataclass
class Trial:
    """The outcome of one attempt to kill an unchanged training script with SIGKILL and to resume it.

    Attributes:
        stock_step: Step of the newest checkpoint that stock DeepSpeed would have had at the kill.
        resumed_step: Step that the script resumed from. 0 if it started from the beginning, and -1 if
            it failed.
    """

    script: Script
    kill: Kill
    fired: bool = False
    stock_step: int = 0
    resumed_step: int = -1
    identical: bool = False
    log: str = ""

    @property
    def lost(self) -> bool:
        """Return True if the killed training script lost its checkpoints.

        The script has lost them if it fails when it is started again. It has also lost them if it then trains from the
        beginning although stock DeepSpeed would have resumed from a checkpoint.
        """
        return self.fired and (self.resumed_step < 0 or self.resumed_step == 0 < self.stock_step)

    @property
    def older(self) -> bool:
        return self.fired and self.resumed_step < self.stock_step

    @property
    def sound(self) -> bool:
        return not (self.lost or self.older or (self.fired and not self.identical))


def trials(number: int, seed: int, names: list[str]) -> list[Trial]:
    """Return the list of kill trials to make, each with a training script and the number of checkpoints that it keeps.

    The trials alternate between the scripts, between the numbers of checkpoints, and between the kinds of kill. The
    exact moment of each kill is random.
    """
    rng, made = random.Random(seed), []
    kinds = ("on_save", "rotation", "random")
    for count in range(number):
        # Two of three are the Trainer: it is what most people run.
        name = names[0] if count % 3 else names[count // 3 % len(names)]
        where = kinds[count // 2 % 3]
        saves = STEPS // SAVE_EVERY
        occurrence = rng.randint(1, saves) if where == "on_save" else rng.randint(1, 12)
        # A loop of one's own is told to return when the files are in place, as trainers are.
        mode = "in_place" if name == "loop" else "auto"
        checkpoint: dict[str, Any] = {"mode": mode, "copy_budget_bytes": 2**20}
        if name == "loop":  # the model has dropout, and only trainers restore the random states themselves
            checkpoint["restore_random"] = True
        script = Script(name, 1 + count % 2, checkpoint)
        made.append(Trial(script, Kill(where, occurrence, rng.random())))
    return made


def run(trial: Trial, truth: dict[str, Any], length_s: float, scratch: Path) -> Trial:
    """Kill a training script, resume it, and compare its results with those of an uninterrupted run.

    If the trial found no fault, its folder is removed.
    """
    _run(trial, truth, length_s, scratch)
    if trial.sound:
        shutil.rmtree(scratch)
    return trial


def _run(trial: Trial, truth: dict[str, Any], length_s: float, scratch: Path) -> None:
    folder, result = scratch / "out", scratch / "result.json"
    delay_s = trial.kill.delay_s * length_s if trial.kill.where == "random" else None
    for _ in range(4):
        folder.mkdir(parents=True)
        child = Child(lambda: train(trial.script, folder, trial.kill, result), scratch / "log")
        status = child.ended(RUN_LIMIT_S if delay_s is None else delay_s)
        trial.fired = status == -signal.SIGKILL
        if trial.fired or delay_s is None:
            break
        shutil.rmtree(folder)  # it was over before its moment came: an earlier one
        delay_s /= 2
    if not trial.fired:
        return
    trial.stock_step = max(trial.script.saved(folder), default=0)
    child = Child(lambda: train(trial.script, folder, Kill(), result), scratch / "log")
    if child.ended(RUN_LIMIT_S) != 0:
        trial.log = child.output
        return
    page = json.loads(result.read_text())
    trial.resumed_step = page["resumed"]
    losses = page["losses"]  # none where nothing was left to train
    same_losses = losses == truth["losses"][len(truth["losses"]) - len(losses) :]
    trial.identical = page["state"] == truth["state"] and same_losses


def reference(script: Script, scratch: Path) -> tuple[dict[str, Any], float]:
    """Run a training script without interruption, and return its results and its time in seconds.

    Raises:
        RuntimeError: If the script fails.
    """
    begin = time.monotonic()
    scratch.mkdir(parents=True)
    result = scratch / "result.json"
    Child(lambda: train(script, scratch / "out", Kill(), result), scratch / "log").wait(RUN_LIMIT_S)
    return json.loads(result.read_text()), time.monotonic() - begin


def figures(done: list[Trial], wall_s: float) -> dict[str, Any]:
    return {
        "kills": len(done),
        "fired": sum(t.fired for t in done),
        "resumed": sum(t.fired and t.resumed_step > 0 for t in done),
        "lost": sum(t.lost for t in done),
        "older_than_stock": sum(t.older for t in done),
        "not_bit_identical": sum(t.fired and t.resumed_step >= 0 and not t.identical for t in done),
        "by_script": {n: sum(t.script.name == n for t in done) for n in SCRIPTS},
        "by_kill": {k: sum(t.fired and t.kill.where == k for t in done) for k in ("on_save", "rotation", "random")},
        "wall_s": round(wall_s, 1),
        "failures": [asdict(t) for t in done if not t.sound],
    }


def warm() -> None:
    """Import modules once, before the study forks training scripts, without starting a thread or a process
    group.
    """
    warm_up()
    import transformers.integrations.deepspeed
    import transformers.models.gpt2.modeling_gpt2
    import transformers.trainer  # noqa: F401

    freeze_heap()


def main(arguments: list[str] | None = None) -> int:
    parser = kill_parser("front_door_kills", __doc__, 30)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    options = parser.parse_args(arguments)
    console, begin = Console(), time.monotonic()
    warm()
    scratch = Path(tempfile.mkdtemp(prefix="ebbtide-front-door-"))
    planned = trials(options.kills, options.seed, options.scripts)
    truth = {}
    for trial in planned:
        name = trial.script.name
        if name not in truth:
            truth[name] = reference(trial.script, scratch / f"reference_{name}")
    tried = (run(trial, *truth[trial.script.name], scratch / f"trial_{number}") for number, trial in enumerate(planned))
    done = campaign(tried, len(planned), console)
    result = figures(done, time.monotonic() - begin)
    return concluded("front_door_kills", options.json, result, scratch, console)


if __name__ == "__main__":
    raise SystemExit(main())

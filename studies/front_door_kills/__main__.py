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
import signal
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from studies.bench import killed
from studies.bench.console import kill_parser
from studies.bench.forked import Child
from studies.bench.killed import Kill, campaign, concluded, counted, until_fired
from studies.bench.many_engines import answer_once
from studies.checkpoints.run import warm_up
from studies.front_door_kills.scripts import SAVE_EVERY, SCRIPTS, STEPS, Script, train

RUN_LIMIT_S = 300.0
KINDS = ("on_save", "rotation", "")  # points of `scripts.Progress`, or "" for a random moment
NEVER = Kill("never")


@dataclass(kw_only=True)
class ScriptTrial(killed.KillTrial):
    """The outcome of one attempt to kill an unchanged training script with SIGKILL and to resume it.

    Attributes:
        stock_step: Step of the newest checkpoint that stock DeepSpeed would have had at the kill.
        resumed_step: Step that the script resumed from. 0 if it started from the beginning, and -1 if it failed.
    """

    script: Script
    stock_step: int = 0

    @property
    def older(self) -> bool:
        return self.fired and self.resumed_step < self.stock_step


Truth = tuple[dict[str, Any], float]  # results of an uninterrupted run, and its seconds


def planned(number: int, seed: int, names: list[str]) -> list[tuple[Script, Kill]]:
    """Return the list of kills to make, each with a training script and the number of checkpoints that it keeps.

    The kills alternate between the scripts, between the numbers of checkpoints, and between the kinds of kill. The
    exact moment of each kill is random.
    """
    rng, made = random.Random(seed), []
    for count in range(number):
        # Two of three runs use the Trainer, as most users do.
        name = names[0] if count % 3 else names[count // 3 % len(names)]
        point = KINDS[count // 2 % 3]
        saves = STEPS // SAVE_EVERY
        occurrence = rng.randint(1, saves) if point == "on_save" else rng.randint(1, 12)
        # A plain loop gets the mode in which a save returns when the files are in place, which trainers get by default.
        mode = "in_place" if name == "loop" else "auto"
        checkpoint: dict[str, Any] = {"mode": mode, "copy_budget_bytes": 2**20}
        if name == "loop":  # the model has dropout, and only trainers restore random states themselves
            checkpoint["restore_random"] = True
        made.append((Script(name, 1 + count % 2, checkpoint), Kill(point, occurrence, rng.random())))
    return made


def one_trial(kill: Kill, scratch: Path, script: Script, truth: Truth) -> ScriptTrial:
    """Kill a training script, resume it, and compare its results with those of an uninterrupted run."""
    trial, (expected, length_s) = ScriptTrial(kill, script=script), truth
    folder, result = scratch / "out", scratch / "result.json"
    folder.mkdir(parents=True)
    child = Child(lambda: train(script, folder, kill, result), scratch / "log")
    trial.fired = child.ended(RUN_LIMIT_S if kill.point else kill.delay_s * length_s) == -signal.SIGKILL
    if not trial.fired:
        return trial
    trial.stock_step = max(script.saved(folder), default=0)
    child = Child(lambda: train(script, folder, NEVER, result), scratch / "log")
    if child.ended(RUN_LIMIT_S) != 0:
        trial.lost.append(f"the script did not resume: {child.output}")
        return trial
    page = json.loads(result.read_text())
    trial.resumed_step = page["resumed"]
    if trial.older:
        trial.lost.append(f"resumed from step {trial.resumed_step}, but stock DeepSpeed had step {trial.stock_step}")
    losses = page["losses"]  # empty if nothing was left to train
    same_losses = losses == expected["losses"][len(expected["losses"]) - len(losses) :]
    if page["state"] != expected["state"] or not same_losses:
        trial.differing.append("final state or losses")
    return trial


def reference(script: Script, scratch: Path) -> Truth:
    """Run a training script without interruption, and return its results and its time in seconds.

    Raises:
        RuntimeError: If the script fails.
    """
    begin = time.monotonic()
    scratch.mkdir(parents=True)
    result = scratch / "result.json"
    Child(lambda: train(script, scratch / "out", NEVER, result), scratch / "log").wait(RUN_LIMIT_S)
    return json.loads(result.read_text()), time.monotonic() - begin


def figures(done: list[ScriptTrial], wall_s: float) -> dict[str, Any]:
    # A run is lost if the script fails, or starts from the beginning although DeepSpeed alone would have resumed.
    lost = [t for t in done if t.fired and (t.resumed_step < 0 or t.resumed_step == 0 < t.stock_step)]
    kinds = [t.kill.point or "random" for t in done if t.fired]
    return {
        **counted(done),
        "resumed": sum(t.fired and t.resumed_step > 0 for t in done),
        "lost": len(lost),
        "older_than_stock": sum(t.older for t in done),
        "by_script": {n: sum(t.script.name == n for t in done) for n in SCRIPTS},
        "by_kill": {kind or "random": kinds.count(kind or "random") for kind in KINDS},
        "wall_s": round(wall_s, 1),
    }


def warm() -> None:
    """Import modules once, before the study forks training scripts, without starting a thread or a process group."""
    warm_up()
    import transformers.integrations.deepspeed
    import transformers.models.gpt2.modeling_gpt2
    import transformers.trainer  # noqa: F401

    answer_once()


def main(arguments: list[str] | None = None) -> int:
    parser = kill_parser("front_door_kills", __doc__, 30)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    options = parser.parse_args(arguments)
    console, begin = Console(), time.monotonic()
    warm()
    scratch = Path(tempfile.mkdtemp(prefix="ebbtide-front-door-"))
    truth: dict[str, Truth] = {}
    kills = planned(options.kills, options.seed, options.scripts)
    for script, _ in kills:
        if script.name not in truth:
            truth[script.name] = reference(script, scratch / f"reference_{script.name}")
    tried = (
        until_fired(kill, partial(one_trial, script=script, truth=truth[script.name]), scratch / f"trial_{number}")
        for number, (script, kill) in enumerate(kills)
    )
    done = campaign(tried, len(kills), console)
    result = figures(done, time.monotonic() - begin)
    return concluded("front_door_kills", options.json, result, scratch, console)


if __name__ == "__main__":
    raise SystemExit(main())

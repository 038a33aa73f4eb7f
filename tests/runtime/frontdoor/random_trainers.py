"""Trainer runs with random options for saving and random placements. Each run must end, and each
complete checkpoint must load.

python -m tests.runtime.frontdoor.random_trainers 40 [SEED]
"""

import random
import sys
import tempfile
from pathlib import Path

import ebbtide.runtime
from ebbtide.runtime.storage.hulls import list_checkpoints
from ebbtide.simulator.plan import Plan

import tests.conftest  # noqa: F401 - where compiled ops lie
from studies.bench.rank import become_only_rank
from tests.runtime.frontdoor import trainers

PLACES = ("host", "device", "resident", "stored")
STEPS = 10


def drawn(rng, folder):
    """Return random options of a Trainer for saving checkpoints, and a random value of the config key
    ``ebbtide``.
    """
    every = rng.randint(1, 4)
    options = {"save_strategy": "steps", "save_steps": every, "save_total_limit": rng.choice([None, 1, 2, 3])}
    if rng.random() < 0.5:
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        options |= {"eval_strategy": "steps", "eval_steps": every, "greater_is_better": rng.random() < 0.5}
    if rng.random() < 0.2:
        return options, {"plan": "auto", "device": "emulated"}
    count = Plan.from_fields(drawn.key["plan"]).subgroup_count
    placements = [rng.choice(PLACES) for _ in range(count)]
    staged = "device" in placements
    fields = {"staging_slots": int(staged), "prefetch": int(staged)}
    if "stored" in placements:
        fields["storage_dir"] = str(folder / "state")
    made = Plan.from_fields(drawn.key["plan"]).placed(placements, **fields)
    return options, {"plan": made.model_dump(mode="json"), "device": "emulated"}


def run(rng, folder):
    """Train with the Trainer, and load each checkpoint that is listed as complete. Return a text that tells how
    many of all listed checkpoints are complete, such as "3 whole of 4".

    Raises:
        AssertionError: If no checkpoint is complete, or a complete one does not load.
    """
    options, key = drawn(rng, folder)
    out = folder / "out"
    engine, _ = trainers.with_trainer(key, max_steps=STEPS, output_dir=str(out), **options)
    listed = [(one, entry) for one in sorted(out.glob("checkpoint-*")) for entry in list_checkpoints(one)]
    whole = [one for one, entry in listed if entry.status == "committed"]
    assert whole, listed
    for one in rng.sample(whole, len(whole)):
        path, _ = engine.load_checkpoint(str(one))
        assert path is not None, one
        assert engine.global_steps == int(one.name.split("-")[1])
    engine.destroy()
    return f"{len(whole)} whole of {len(listed)}"


def main(count, seed):
    become_only_rank()
    trainers.settle_imports()
    drawn.key = trainers.key_for(trainers.with_trainer(None, max_steps=1)[0])
    ebbtide.runtime.enable()
    failed = 0
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = run(rng, Path(folder))
            except BaseException as error:  # the other runs continue, and the result names the failed ones
                failed += 1
                said = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"RUN {number}: {said}", flush=True)
    print(f"RUNS {count - failed} of {count} ended, and every whole checkpoint loaded", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))

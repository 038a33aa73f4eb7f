"""A check on this machine that ebbtide trains the same bits as stock DeepSpeed.

Many configurations and placements of optimizer state are compared. Stock DeepSpeed trains each
configuration twice. If its own two runs differ, because a kernel adds numbers in a varying order,
then a difference between ebbtide and stock DeepSpeed means nothing, and the result says so.

The project's tests compare more configurations. This module needs only the installed package.
"""

import itertools
import math
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from ebbtide.runtime import session_of
from ebbtide.simulator import Plan

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step
from studies.bench.many_engines import answer_once
from studies.bench.record import write_record
from studies.gpu.suite import Figures, OutOfTimeError, Suite
from studies.trials.offload_trial import same_sums

STEPS, SAVED_AT = 6, 3
LONGEST_DELAY_S = 0.004
Outcome = tuple[dict[str, torch.Tensor], list[torch.Tensor], list[float]]

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "clipping": {},
    "accumulation": {"accumulation": 2},
    "below ZeRO-3": {"stage": 2},
    "pieces of DeepSpeed's subgroups": {"subgroup": 10**9},
    "clips hard": {"clipping": 0.01},
    "no clipping": {"clipping": 0.0},
    "fp32 sums": {"accumulation": 2, "extra": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16", "extra": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}},
    "no persistent parameters": {"stage3_param_persistence_threshold": 0},
    "gradients larger than a bucket": {"reduce_bucket_size": 5_000, "stage3_prefetch_bucket_size": 10_000},
    "ZeRO-1": {"stage": 1},
    "parameters in host memory": {"offload_param": {"device": "cpu"}, "homes": ("host", "device")},
    "frozen parameters": {"frozen": True},
}
PLACEMENTS = {
    "all three": ["host", "device", "resident"],
    "host": ["host"],
    "device": ["device"],
    "resident": ["resident"],
}
RESUMED = "saved and resumed in another placement"
STORED, AUTO = "stored", "auto"
IN_REHEARSAL = ("clipping", "accumulation", "below ZeRO-3", "fp16", "parameters in host memory", "frozen parameters")


def contract(suite: Suite) -> Figures:
    """Compare the training results of ebbtide and stock DeepSpeed bit by bit, in all configurations that the time
    allows.

    ``correct`` in the returned dict is True if all compared results are bit-identical, and None if nothing was
    compared.
    """
    settle()
    rows: list[Figures] = []
    names = IN_REHEARSAL if suite.emulated else tuple(CONFIGURATIONS)
    left_out = list(names)
    for name in names:
        try:
            suite.left_s()
        except OutOfTimeError:
            break
        rows += _configuration(name, suite)
        left_out.remove(name)
        # Written after each row, so that a section that is killed or hangs later loses nothing.
        write_record(suite.out / "contract.json", "gpu.contract", _figures(rows, left_out) | {"size": suite.size})
    return _figures(rows, left_out)


def _figures(rows: list[Figures], left_out: list[str]) -> Figures:
    compared = [row for row in rows if row["identical"] is not None]
    differing = [row for row in compared if not row["identical"]]
    return {
        "rows": rows,
        "compared": len(compared),
        "differing": len(differing),
        "left_out": list(left_out),
        "correct": not differing if compared else None,
        "summary": f"{len(compared) - len(differing)} of {len(compared)} bit-identical",
    }


def settle() -> None:
    """Select kernels that add numbers in a fixed order, and speed up the building of engines in this process.

    If a kernel still has no fixed order, two runs of stock DeepSpeed differ, which shows this. No engine of
    this process may be timed after this call.
    """
    answer_once()
    if torch.cuda.is_available():
        same_sums()
        return
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on CPUs, although torch supports it.
    get_accelerator().is_fp16_supported = lambda: True


def _configuration(name: str, suite: Suite) -> list[Figures]:
    options = dict(CONFIGURATIONS[name])
    homes = options.pop("homes", ())
    try:
        stock = train(start(**options))
        control = differing(train(start(**options)), stock)
        check_steps(stock)
    except Exception as error:  # the error is not ebbtide's, and the other configurations still run
        failed = f"{type(error).__name__}: {error}"
        return [{"configuration": name, "placement": "stock", "identical": None, "failed": failed}]
    rows = []
    placements = dict(itertools.islice(PLACEMENTS.items(), 2 if suite.emulated else None))
    ways: dict[str, Callable[[], Outcome]] = {
        of: lambda pattern=pattern, of=of: train(  # type: ignore[misc]
            attached(start(**options), pattern, suite.emulated, seed=of, homes=homes)
        )
        for of, pattern in placements.items()
    }
    if name == "clipping":
        ways[RESUMED] = lambda: _resumed(options, suite.emulated)
        ways[STORED] = lambda: _stored(options, suite.emulated)
        ways[AUTO] = lambda: _automatic(options, suite.emulated)
    for of, run in ways.items():
        row: Figures = {"configuration": name, "placement": of, "control_differing": control}
        try:
            result = differing(run(), stock)
        except Exception as error:  # the row records the error, and the others still run
            rows.append(row | {"identical": False, "failed": f"{type(error).__name__}: {error}"})
            continue
        # If two control runs differ, a difference from ebbtide means nothing, but an equality still counts.
        rows.append(row | {"differing": result[:8], "identical": not result or (None if control else False)})
    return rows


def _resumed(options: dict[str, Any], emulated: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        saving = attached(start(**options), PLACEMENTS["all three"], emulated)
        losses, norms = _steps(saving, 0, SAVED_AT)
        saving.save_checkpoint(folder)
        saving.destroy()
        resumed = attached(start(**options), ["resident", "host"], emulated)
        path, _ = resumed.load_checkpoint(folder)
        if path is None:
            raise RuntimeError("the checkpoint that was just saved cannot be found")
        more, more_norms = _steps(resumed, SAVED_AT, STEPS)
        state = state_of(resumed)
        resumed.destroy()
    return state, losses + more, norms + more_norms


def _stored(options: dict[str, Any], emulated: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return train(attached(start(**options), ["stored", "host"], emulated, storage_dir=folder))


def _automatic(options: dict[str, Any], emulated: bool) -> Outcome:
    import ebbtide.runtime
    from ebbtide.profiler import measure_machine

    engine = start(**options)
    machine = measure_machine(fresh=True, seconds=0.5 if emulated else 5.0, elements=100_000 if emulated else 4_000_000)
    ebbtide.runtime.attach(engine, "auto", device="emulated" if emulated else "cuda", machine=machine)
    return train(engine)


def start(
    stage: int = 3, extra: dict[str, Any] | None = None, subgroup: int = 20_000, *, frozen: bool = False, **options: Any
) -> Any:
    """Return a DeepSpeed engine on a tiny model, with the same initial weights at each call.

    Args:
        frozen: True to leave every second parameter untrained.
    """
    import deepspeed

    torch.manual_seed(0)
    config = ds_config(2, subgroup, learning_rate=1e-3, **{"stage": stage, **options})
    model = ByteGPT(SIZES["tiny"])
    for parameter in list(model.parameters())[1::2] if frozen else ():
        parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config={**config, **(extra or {})})[0]


def attached(engine: Any, pattern: list[str], emulated: bool, seed: str = "", **fields: Any) -> Any:
    """Attach a plan to a DeepSpeed engine, with a random delay before each op, and return the engine.

    ``pattern`` is a list of placements, which the plan repeats over the subgroups of optimizer state. A
    placement tells where a subgroup's state is kept and updated.
    """
    import ebbtide.runtime

    # One sum stays on the GPU if there is accumulation, and one update of each queue begins before the norm.
    early = int(engine.zero_optimization_stage() == 3)
    early_updates = {"speculate": early, "speculate_visits": early}
    plan = plan_of(engine, pattern, device_sums=1, **(early_updates | fields))
    ebbtide.runtime.attach(engine, plan, device="emulated" if emulated else "cuda")
    rng = random.Random(seed)
    session_of(engine).executor.gradients.before_op = lambda _: time.sleep(rng.random() * LONGEST_DELAY_S)
    return engine


def plan_of(engine: Any, pattern: list[str], subgroup: int = 20_000, **fields: Any) -> Plan:
    """Return a plan that repeats a list of placements over the subgroups of an engine's optimizer state.

    A placement tells where a subgroup's state is kept and updated. With ZeRO-1 and ZeRO-2, the plan cuts
    the optimizer state into subgroups of ``subgroup`` elements.
    """
    from ebbtide.runtime.zero.flat_partitions import subgroups_of

    count = len(subgroups_of(engine.optimizer, subgroup))
    placements: list[Any] = [pattern[i % len(pattern)] for i in range(count)]
    slots = 2 if "device" in placements else 0
    homes = fields.pop("homes", ())
    values = {"staging_slots": slots, "prefetch": min(1, slots)} | fields
    if homes:
        values["parameter_home"] = Plan.runs([homes[i % len(homes)] for i in range(count)], "home")
    return Plan.from_fields({"subgroup_size": subgroup, "placement": Plan.runs(placements), **values})


def train(engine: Any) -> Outcome:
    """Train a DeepSpeed engine for a fixed number of steps. Return its final state, losses and gradient norms.

    The engine is destroyed afterwards.
    """
    losses, norms = _steps(engine, 0, STEPS)
    state = state_of(engine)
    engine.destroy()
    return state, losses, norms


def _steps(engine: Any, first: int, end: int) -> tuple[list[torch.Tensor], list[float]]:
    batches = Batches(2, SIZES["tiny"].sequence)
    losses, norms = [], []
    for number in range(first, end):
        losses.append(train_step(engine, batches.at(number, engine.device)))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    return losses, norms


def check_steps(outcome: Outcome) -> None:
    """Raise RuntimeError if a training run skipped some of its steps and took none of the others.

    Such a run has updated nothing, so that a comparison with it proves nothing.
    """
    if not any(math.isfinite(norm) for norm in outcome[2]):
        raise RuntimeError(
            f"stock DeepSpeed must take at least one step, but it skipped all {len(outcome[2])}. "
            "Set a smaller loss scale (initial_scale_power)"
        )


def differing(ours: Outcome, stock: Outcome) -> list[str]:
    """Return a list of the names of tensors, losses and gradient norms that differ between two training runs."""
    result = list(differences(ours[0], stock[0]))
    pairs = zip(ours[1], stock[1], strict=True)
    result += [f"loss {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return result + [f"norm {i}" for i, (a, b) in enumerate(zip(ours[2], stock[2], strict=True)) if a != b]

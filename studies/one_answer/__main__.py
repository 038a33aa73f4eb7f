"""Check that all entry points of ebbtide give the same answer to the same planning question.

    python -m studies.one_answer --json one_answer.json

The study asks the command line, the Python functions and the HTTP service for a plan of the same training
job. It compares the predicted mean iteration times under the returned plans. Nothing is measured or fitted:
the machines are presets.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ebbtide
import ebbtide.tuner
from click.testing import CliRunner
from ebbtide.simulator import Machine, Plan, Workload
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.plan import Way
from ebbtide.tuner.advice.tried import faster
from ebbtide.tuner.answer.rows import StockTraining, best_stock, compare
from ebbtide.tuner.answer.verdict import BEST, role_of
from ebbtide.tuner.cli import main as tune
from ebbtide.tuner.configurations.deciding import explore
from ebbtide.tuner.configurations.evaluation import SearchQuestion as Configurations
from ebbtide.tuner.configurations.space import Configuration, Space
from ebbtide.tuner.placements.planning import quick_plan, quicker_plan
from ebbtide.tuner.placements.storage import with_storage
from ebbtide.tuner.service import answers
from ebbtide.tuner.service.requests import MODELS, Answer, PlanJob, WhatIf

from studies.bench.console import publish, study_parser
from studies.one_answer.automatic import automatic

# (model, machine, settings other than one GPU, micro-batch 1 and 2048 tokens).
JOBS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("Llama 3.2 3B", "rtx4090", {}),
    ("Llama 3 8B", "a100-node", {}),
    ("Llama 3 8B", "a100-node", {"accumulation": 16}),
    ("Llama 2 13B", "a100-node", {"gpus": 4}),
    ("Qwen3 14B", "h100-node", {"gpus": 2}),
    ("Llama 3 70B", "h200", {"gpus": 8}),
    ("Llama 3 8B", "gh200", {}),
    ("Qwen3 4B", "rtx4090", {"accumulation": 4}),
    ("Llama 2 7B", "a100-node", {"gpus": 2, "device_memory_bytes": 24 * 2**30}),
    ("Mistral 7B", "h100-node", {"device_memory_bytes": 30 * 2**30}),
    ("Qwen3 8B", "h100-node", {"gpus": 4, "sequence": 4096}),
    ("Llama 3 8B", "h100-node", {"storage_bytes": 10**12, "host_memory_bytes": 96 * 2**30}),
    ("Llama 3.2 1B", "rtx4090", {"zero_stage": 2}),
    ("Mixtral 8x7B", "h200", {"gpus": 8}),
    ("Mixtral 8x7B", "b200", {"gpus": 4, "accumulation": 16}),
    ("Llama 2 7B", "a100-80gb", {"accumulation": 4}),
    ("Mistral 7B", "h100-node", {"accumulation": 8}),
)
# Jobs of several samples a step, for which the offered changes are compared with `tune search`.
HINTED: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("Llama 3.2 3B", "rtx4090", {"accumulation": 16}),
    ("Llama 3 8B", "rtx4090", {"accumulation": 8, "sequence": 1024}),
    ("Llama 3 8B", "a100-40gb", {"accumulation": 16}),
    ("Llama 3 8B", "a100-80gb", {"accumulation": 8}),
    ("Llama 3 8B", "gh200", {"accumulation": 16}),
    ("Llama 2 13B", "a100-node", {"accumulation": 4, "gpus": 4}),
    ("Qwen3 14B", "h100-node", {"accumulation": 8, "gpus": 2}),
    ("Llama 3 70B", "h200", {"accumulation": 4, "gpus": 8}),
    ("Qwen3 4B", "rtx4090", {"accumulation": 4}),
    ("Mistral 7B", "h100-node", {"accumulation": 16}),
)
FULL, QUICK = (
    ("tune plan", "tuner.plan", "HTTP full", "HTTP job", "estimate full"),
    ("HTTP quick", "Python quick", "estimate", "what_if", "HTTP what-if", "tune search", "live re-plan"),
)


@dataclass(frozen=True)
class DoorAnswers:
    """The answers of ebbtide's entry points to one planning question, as predicted seconds of an iteration.

    An entry point is a command, a Python function or an HTTP request. It gives a full answer, from a complete search
    for a plan, or a quick one.

    Attributes:
        answers: Predicted seconds, by entry point.
        possible_s: Predicted seconds of the faster plan of two other full searches: one with another random seed, and
            one that keeps all parameters on the GPU. The default search may choose such plans too, so a faster plan
            shows what the default search missed.
        full_spread_pct: Difference between the slowest and the fastest full answer, in percent.
        quick_spread_pct: Difference between the slowest quick answer and the fastest full one, in percent.
        cpu_s: Processor seconds that ``tuner.plan`` took.
        auto_expected_s: Seconds of an iteration that ``"plan": "auto"`` expects of the plan that it makes.
        auto_truth_s: Seconds of that plan by a simulation that knows the whole workload.
    """

    job: str
    answers: Mapping[str, float]
    possible_s: float
    full_spread_pct: float
    quick_spread_pct: float
    default_over_possible_pct: float
    cpu_s: float
    auto_expected_s: float
    auto_truth_s: float

    @property
    def auto_expected_over_truth_pct(self) -> float:
        """Return by how many percent the iteration time that ``"plan": "auto"`` expects exceeds the true time."""
        return 100 * (self.auto_expected_s / self.auto_truth_s - 1)


def main() -> None:
    parser = study_parser("one_answer", __doc__)
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(JOBS),
        help="use only this number of training jobs, from the start of the study's list (default: all jobs)",
    )
    args = parser.parse_args()
    publish("one_answer", args.json, measure(JOBS[: args.jobs]))


def measure(jobs: Any = JOBS, *, effort: float | None = None) -> dict[str, Any]:
    """Ask all entry points of ebbtide for a plan of each training job. Return the answers and their largest
    differences.
    """
    rows = [_asked(model, machine, about, effort) for model, machine, about in jobs]
    hints = [hinted(*job) for job in HINTED[: len(rows)]]
    stocks = [stock_names(*job) for job in HINTED[: len(rows)]]
    return {
        "hint_over_search_pct": max(row["hint_over_search_pct"] for row in hints),
        "stock_best_told": all(len(set(names.values())) == 1 for names in stocks),
        "hints": hints,
        "stocks": stocks,
        "full_spread_pct": max(row.full_spread_pct for row in rows),
        "quick_spread_pct": max(row.quick_spread_pct for row in rows),
        "default_over_possible_pct": max(row.default_over_possible_pct for row in rows),
        "auto_expected_over_truth_pct": max((row.auto_expected_over_truth_pct for row in rows), key=abs),
        "longest_cpu_s": max(row.cpu_s for row in rows),
        "cannot_be_influenced": [
            "A live re-plan keeps the subgroups, threads and drives of the plan that runs. It is asked with the "
            "subgroups of the full answer, and not of jobs that need storage.",
            "A what-if stores no state, so that it is not asked of jobs that need storage.",
            "HTTP and page have no local drives: state on storage goes to a drive as fast as the preset's.",
            "On several nodes, auto counts the GPU's waits for the network as computation.",
            "auto keeps DeepSpeed's sub_group_size and plans pieces of its subgroups, from four watched steps.",
        ],
        "jobs": [asdict(row) | {"auto_expected_over_truth_pct": row.auto_expected_over_truth_pct} for row in rows],
        "device_kind": "simulated",
    }


def _asked(model: str, machine: str, about: Mapping[str, Any], effort: float | None) -> DoorAnswers:
    scenario = {"model": model, "machine": machine, **about}
    have = _machine(machine, about)
    work = estimated(_job(model, about), have)
    storage = {"": int(about["storage_bytes"])} if "storage_bytes" in about else None
    begun_s = time.process_time()
    made = ebbtide.tuner.plan(work, have, storage=storage, effort=effort)
    python_s = _seconds(made)
    cpu_s = time.process_time() - begun_s
    asked: dict[str, Callable[[], float]] = {
        "tuner.plan": lambda: python_s,
        "tune plan": lambda: _by_command(work, have, storage),
        "HTTP full": lambda: _row(answers.answer(Answer(**scenario, effort="full", timelines=False), _silent)),
        "HTTP job": lambda: _seconds(Plan.model_validate(answers.plan_job(PlanJob(**scenario), _silent)["plan"])),
        "HTTP quick": lambda: _row(answers.answer(Answer(**scenario, timelines=False), _silent)),
        "Python quick": lambda: _quick_s(work, have, storage),
        "tune search": lambda: search_s(model, about, have, storage),
    }
    if storage is None:  # what-ifs support no drives, and live plans store only state that is on drives already
        asked["live re-plan"] = lambda: replanned_s(work, have, made)
        grid = WhatIf(**scenario, strategies=["ebbtide"])
        asked |= {
            "what_if": lambda: float(ebbtide.what_if(work, have, ["ebbtide"], n_jobs=1).iteration_s[0]),
            "HTTP what-if": lambda: _by_grid(grid),
            "estimate": lambda: _estimated_s(model, about, have),
            "estimate full": lambda: _estimated_s(model, about, have, full=True),
        }
    if effort is not None:  # only these entry points take an effort
        some = ("tuner.plan", "HTTP quick", "Python quick", "tune search", "live re-plan")
        asked = {name: asked[name] for name in some if name in asked}
    found = {name: ask() for name, ask in asked.items()}
    possible_s = _possible_s(work, have, storage, effort)
    full = [seconds for name, seconds in found.items() if name in FULL]
    quick = [seconds for name, seconds in found.items() if name in QUICK]
    least_s = min([possible_s, *full])
    return DoorAnswers(
        " ".join([model, machine, *(f"{key}={value}" for key, value in about.items())]),
        found,
        possible_s,
        100 * (max(full) / min(full) - 1),
        100 * (max(quick) / min(full) - 1),
        100 * (python_s / least_s - 1),
        cpu_s,
        *automatic(work, have, stores=storage is not None),
    )


def _possible_s(work: Workload, machine: Machine, storage: Mapping[str, int] | None, effort: float | None) -> float:
    other = ebbtide.tuner.plan(work, machine, storage=storage, effort=effort, seed=1)
    fixed = ebbtide.tuner.plan(work, machine, storage=storage, effort=effort, offload_parameters=False)
    return min(_seconds(other), _seconds(fixed))


def _machine(name: str, about: Mapping[str, Any]) -> Machine:
    memory = {key: about[key] for key in ("device_memory_bytes", "host_memory_bytes") if key in about}
    return preset(name).with_rates(**memory) if memory else preset(name)


def _job(model: str, about: Mapping[str, Any]) -> Job:
    return Job.of_deepspeed(
        MODELS[model],
        sequence=about.get("sequence", 2048),
        data_parallel=about.get("gpus", 1),
        accumulation=about.get("accumulation"),
        zero_stage=about.get("zero_stage"),
    )


def _by_command(work: Workload, machine: Machine, storage: Mapping[str, int] | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.json" for name in ("work", "machine", "plan")}
        work.save(paths["work"])
        machine.save(paths["machine"])
        flags = ["plan", "--machine", str(paths["machine"]), "--workload", str(paths["work"]), "-o", str(paths["plan"])]
        flags += [flag for size in (storage or {}).values() for flag in ("--storage", f"{folder}:{size}B")]
        done = CliRunner().invoke(tune, [*flags, "--json"])
        if done.exit_code:
            raise RuntimeError(done.output)
        return float(json.loads(paths["plan"].read_text())["prediction"]["iteration_s"])


def _quick_s(work: Workload, machine: Machine, storage: Mapping[str, int] | None) -> float:
    limits, drives, folders = with_storage(work, machine, storage)
    return _seconds(quick_plan(work, drives, limits, folders=folders))


def _estimated_s(model: str, about: Mapping[str, Any], machine: Machine, *, full: bool = False) -> float:
    zero = {"stage": about.get("zero_stage", 3), "offload_optimizer": {"device": "cpu"}}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero, "ebbtide": {"plan": "auto"}}
    more = {"gpus": about.get("gpus", 1), "accumulation": about.get("accumulation"), "ds_config": config}
    shape = {"batch": 1, "sequence": about.get("sequence", 2048)}
    return ebbtide.estimate(MODELS[model], **shape, gpu=machine, **more, full=full).iteration_s


def search_s(model: str, about: Mapping[str, Any], machine: Machine, storage: Mapping[str, int] | None) -> float:
    """Return the seconds of an iteration that `tune search` predicts for a job, if it may choose only what is offloaded
    and the subgroup size.
    """
    job = Configurations(MODELS[model], machine, sequence=about.get("sequence", 2048), storage=storage or {})
    base = Configuration(**{name: about[name] for name in ("accumulation", "zero_stage", "gpus") if name in about})
    space = Space.of(base, ("offload", "sub_group_size"))
    found = [o for o in explore(job, space).fitting if o.plan is not None]
    return found[0].iteration_s


def hinted(model: str, machine: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the best change that `tune plan` offers for the same samples with the result of `tune search`.

    The search may not change the kernels or the loss, which the offered change may.
    """
    have, job = _machine(machine, about), _job(model, about)
    work = estimated(job, have)
    plan_s = _seconds(quick_plan(work, have, Limits.of(work, have)))
    begun_s = time.process_time()
    lines = faster(job, have, plan_s)
    hint_cpu_s = time.process_time() - begun_s
    hint_s = lines[-1].outcome.iteration_s if lines else plan_s
    question = Configurations(MODELS[model], have, sequence=job.sequence)
    base = Configuration(gpus=job.data_parallel, accumulation=job.accumulation)
    free = ("micro_batch", "zero_stage", "recompute", "offload", "sub_group_size")
    begun_s = time.process_time()
    best = explore(question, Space.of(base, free, base.global_batch)).fitting[0]
    return {
        "job": " ".join([model, machine, *(f"{key}={value}" for key, value in about.items())]),
        "plan_s": plan_s,
        "hint": lines[-1].label if lines else "",
        "hint_s": hint_s,
        "hint_cpu_s": hint_cpu_s,
        "search": best.configuration.text(),
        "search_s": best.iteration_s,
        "search_cpu_s": time.process_time() - begun_s,
        "hint_over_search_pct": 100 * (hint_s / best.iteration_s - 1),
    }


def stock_names(model: str, machine: str, about: Mapping[str, Any]) -> dict[str, str]:
    """Return the label that each entry point gives to DeepSpeed alone at its best."""
    have, job = _machine(machine, about), _job(model, about)
    work = estimated(job, have)
    limits = Limits.of(work, have)
    told = answers.answer(Answer(model=model, machine=machine, **about, timelines=False, peers=False), _silent)
    made = ebbtide.tuner.plan(work, have, effort=0.05)
    alone = [p for p in made.alternatives if p.fits and role_of(p.strategy) in ("stock", "best stock")]
    python, readme = best_stock(compare(work, have, limits, None, others=False)), StockTraining(work, have, limits).best
    return {
        "HTTP": told["best_stock"]["name"] if told["best_stock"] else "",
        "Python": python.name if python else "",
        "README": "" if readme.lacking_bytes else readme.name,
        "plan file": _name_of(min(alone, key=lambda p: p.iteration_s).strategy, job.zero_stage) if alone else "",
    }


def _name_of(label: str, zero_stage: int) -> str:
    if label.startswith(BEST):
        return label.removeprefix(f"{BEST} (").removesuffix(")")
    return label.replace(f"stock ZeRO-{zero_stage} offload", f"ZeRO-{zero_stage}")


def replanned_s(work: Workload, machine: Machine, made: Plan) -> float:
    """Return the predicted seconds of an iteration under the plan that a plan search during training (`quicker_plan`)
    chooses.

    The search starts from a plan that updates all state on the CPU, in the subgroups of the plan ``made``. It gets the
    same machine and memory limits as the search that found ``made``, so that the two results can be compared.
    """
    cut, limits = work.cut_as(made), Limits.of(work, machine)
    first = made.with_ways([Way("host")] * made.subgroup_count, staging_slots=0, prefetch=0, prediction=None)
    room = {"device_bytes": limits.device_bytes, "host_bytes": limits.host_bytes}
    return quicker_plan(cut, machine, first, **room).iteration_s


def _by_grid(asked: WhatIf) -> float:
    answer = answers.what_if(asked, _silent)
    assert not isinstance(answer, str)
    return float(answer["rows"][0]["iteration_s"])


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.iteration_s


def _row(answer: Mapping[str, Any]) -> float:
    return float(next(row["iteration_s"] for row in answer["rows"] if row["role"] == "plan"))


def _silent(_share: float, _what: str) -> None:
    """Ignore a report on the progress of a planning request, so that the study prints no progress."""


if __name__ == "__main__":
    main()

"""The table that compares the simulated iteration under a plan with the iterations of other ways to train, such as
DeepSpeed alone with its own offload settings.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ebbtide.simulator.analysis.best_setting import (
    FEW_MICRO_BATCHES,
    Compile,
    StrategyResult,
    best_setting,
    compiled,
    simulated,
    under_plan,
)
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import SimResult, simulate_fast
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG, Offloading
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan, Prediction, Way
from ebbtide.simulator.schedule import Schedule
from ebbtide.simulator.schedules.strategies import build_strategy, settings, stages
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.verdict import BEST, BY_KIND, SETTING, Role
from ebbtide.tuner.calibrate.interval import Spread, plan_spread

STAGES = (3, 2, 1)
FASTER = 1e-3  # share of the time that another setting must save to count as faster


@dataclass(frozen=True)
class StockSetting:
    """One offload setting of DeepSpeed alone, with its simulation.

    Attributes:
        workload: Training job at this stage.
        lacking_bytes: Bytes that GPU and host memory lack together. 0 if the training fits.
    """

    zero_stage: int
    workload: Workload
    offload: Offloading
    simulated: StrategyResult
    lacking_bytes: int

    @property
    def name(self) -> str:
        """Return the ZeRO stage, and the settings that differ from DeepSpeed's offload to pinned host memory."""
        return ", ".join([f"ZeRO-{self.zero_stage}", *offload_words(self.offload)])

    @property
    def offloads(self) -> bool:
        return self.offload.optimizer not in (None, "none")

    @property
    def rank(self) -> tuple[bool, float]:
        return self.lacking_bytes > 0, self.lacking_bytes or self.simulated.result.iteration_s


@dataclass(frozen=True)
class StockTraining:
    """DeepSpeed's own ways to train a job on a machine, without a plan.

    Attributes:
        workload: Training job of one rank, with the subgroups that DeepSpeed makes.
    """

    workload: Workload
    machine: Machine
    limits: Limits
    compile_: Compile = compiled

    @cached_property
    def given(self) -> StockSetting:
        """Return the fastest setting at the job's own ZeRO stage that offloads optimizer state and fits."""
        # If none fits, return the one that lacks the fewest bytes. The settings are that of the job's DeepSpeed config,
        # and both of ``offload_param.device``.
        return min(self._offloading, key=lambda one: one.rank)

    @cached_property
    def best(self) -> StockSetting:
        """Return the fastest setting at any ZeRO stage that fits, Twin-Flow's ratio, SuperOffload and no offload
        included. Return `given` if no setting is clearly faster, or if none fits.

        The ZeRO stage of a measured workload stays.
        """
        best = min(self._others(), key=lambda one: one.rank, default=self.given)
        if best.lacking_bytes:
            return self.given
        apart = self.given.lacking_bytes or best.rank[1] < (1 - FASTER) * self.given.rank[1]
        return best if apart else self.given

    @cached_property
    def plain(self) -> tuple[StrategyResult, Workload]:
        """Return training without offload: at the fastest ZeRO stage if that is `best`, else at the job's own."""
        if not self.best.offloads:
            return self.best.simulated, self.best.workload
        return simulated("no_offload", self.workload, self.machine, self.limits, {}, self.compile_), self.workload

    def beside(self, *, pinning: bool) -> Iterator[tuple[str, StrategyResult]]:
        """Yield simulations of the job's ZeRO stage with other settings than `given`, each with its name.

        They have the other ``offload_param.device`` or, if ``pinning`` is True, the other ``pin_memory``. If `given`
        is not the setting of the job's DeepSpeed config, that one is included.
        """
        chosen, stage = self.given.offload, self.workload.zero_stage
        others: dict[Offloading, str] = {}
        if stage == 3 and not self.machine.unified_memory:
            device = "none" if chosen.parameters == "cpu" else "cpu"
            others[replace(_plain(chosen), parameters=device)] = f"offload_param {device}"
        if pinning and not chosen.superoffload:  # SuperOffload has pinned buffers of its own
            pinned = not chosen.pinned
            moved = replace(chosen, pinned=pinned, pinned_parameters=pinned)
            others[moved] = f"pin_memory {str(pinned).lower()}"
        configured = _configured(self.workload)
        if configured != chosen:
            others.setdefault(configured, ", ".join(["as configured", *offload_words(configured)]))
        for offload, name in others.items():
            yield name, self._run(self.workload, offload)

    @cached_property
    def _offloading(self) -> list[StockSetting]:
        return self._settings(self.workload, _offloaded(self.workload, self.machine, self.limits))

    def _others(self) -> Iterator[StockSetting]:
        for stage, work in self._at_stages():
            moved = [] if self.machine.unified_memory else [replace(WITHOUT_CONFIG, optimizer="none")]
            if stage == self.workload.zero_stage:
                yield from self._offloading
            else:
                moved += _offloaded(work, self.machine, self.limits)
            if stage == 3:
                base = replace(_plain(_configured(work)), optimizer="cpu", parameters="none")
                moved += [replace(base, superoffload=True), *self._shared(work, base)]
            yield from self._settings(work, moved)

    def _shared(self, work: Workload, base: Offloading) -> list[Offloading]:
        few = work
        if work.gradient_accumulation_steps > FEW_MICRO_BATCHES:
            few = work.model_copy(update={"gradient_accumulation_steps": FEW_MICRO_BATCHES})
        ratios = [one["ratio"] for one in settings("twin_flow", len(work.subgroups)) if one["ratio"] < 1]
        tried = self._settings(few, [replace(base, ratio=ratio) for ratio in ratios])
        return [min(tried, key=lambda one: one.rank).offload] if tried else []

    def _at_stages(self) -> Iterator[tuple[int, Workload]]:
        own, job = self.workload.zero_stage, self.workload.job
        yield own, self.workload
        for stage in STAGES if job is not None else ():
            if stage != own:
                with suppress(ModelError):  # for example, DeepSpeed has no pipeline under ZeRO-2
                    offload = replace(_plain(_configured(self.workload)), parameters="none")
                    there = estimated(job.changed(zero_stage=stage, offload=offload), self.machine)
                    yield stage, there.model_copy(update={"clip_rate": self.workload.clip_rate})

    def _settings(self, work: Workload, moved: list[Offloading]) -> list[StockSetting]:
        found = []
        for offload in dict.fromkeys(moved):
            with suppress(ModelError):
                one = self._run(work, offload)
                found.append(StockSetting(work.zero_stage, work, offload, one, self.limits.missing_bytes(one.result)))
        return found

    def _run(self, work: Workload, offload: Offloading) -> StrategyResult:
        name, options = offload.strategy(work.zero_stage)
        return simulated(name, work, self.machine, self.limits, options, self.compile_)


def offload_words(offload: Offloading) -> list[str]:
    """Return the settings that differ from DeepSpeed's offload of optimizer state to pinned host memory."""
    if offload.optimizer in (None, "none"):
        return ["no offload"]
    words = {
        "offload_optimizer nvme": offload.optimizer == "nvme",
        "pipelined": offload.optimizer == "nvme" and offload.pipelined,
        "offload_param cpu": offload.parameters == "cpu",
        f"ratio {offload.ratio:g}": offload.ratio < 1,
        "super_offload": offload.superoffload,
        "torch_adam": offload.torch_adam,
        "pin_memory false": not offload.pinned,
    }
    return [word for word, on in words.items() if on]


def _offloaded(work: Workload, machine: Machine, limits: Limits) -> list[Offloading]:
    given = _configured(work)
    three = work.zero_stage == 3
    optimizers = ["cpu"]
    if three and (given.optimizer == "nvme" or limits.storage_bytes is not None):
        optimizers.append("nvme")
    parameters = ("none", "cpu") if three and not machine.unified_memory else ("none",)
    pinned = replace(_plain(given), pinned=True, pinned_parameters=True)
    return [
        given,
        *(
            replace(pinned, optimizer=optimizer, parameters=device, pipelined=optimizer == "nvme")
            for optimizer in optimizers
            for device in parameters
        ),
    ]


def _configured(workload: Workload) -> Offloading:
    # If there is no config, if it does not offload, or if its offload cannot be simulated, return the settings of
    # DeepSpeed's optimizer offload to host memory.
    default = replace(WITHOUT_CONFIG, optimizer="cpu")
    offload: Offloading = workload.offload or default
    if offload.optimizer in (None, "none"):
        return default
    with suppress(ModelError):
        offload.strategy(workload.zero_stage)
        return offload
    return default


def _plain(offload: Offloading) -> Offloading:
    return replace(offload, ratio=1.0, superoffload=False)


# Other systems, each simulated with its best setting.
PEERS = ("twin_flow", "deep_optimizer_states", "superoffload")
# SuperOffload's updates overlap backward only if the config turns clipping off (DeepSpeed 0.19.8, its
# ``partition_grads``), which changes the results of training.
WAITS_FOR_NORM, OVERLAPS = "SuperOffload, no overlap while clipping", "SuperOffload, gradient_clipping 0"
_LABELS = {
    "twin_flow": "Twin-Flow",
    "deep_optimizer_states": "Deep Optimizer States",
    "superoffload": "SuperOffload",
    "no_offload": "no offload",
}


@dataclass(frozen=True)
class Row:
    """A row of the table that compares training under a plan with other ways to train: one simulated way.

    Attributes:
        role: Kind of the row: the plan, stock DeepSpeed, DeepSpeed alone at its best, no offload, a variant of the
            plan, or another system.
        label: Text that names the row and its setting.
        limits: Memory that training may use.
        name: ZeRO stage and settings of DeepSpeed alone, such as "ZeRO-2". Empty for other rows.
        workload: Training job that was simulated, for DeepSpeed alone and no offload, which may have another ZeRO stage
            than the asker's job. None for other rows.
        spread: Uncertainty of the predicted time, if it was asked for. Only rows that gains are told of have one.
        stock: The row of DeepSpeed alone, for the gain of this row over it.
    """

    role: Role
    label: str
    simulated: StrategyResult
    limits: Limits
    name: str = ""
    workload: Workload | None = None
    spread: Spread | None = None
    plan: "Row | None" = None
    stock: "Row | None" = None

    @property
    def schedule(self) -> Schedule:
        """Return the simulated schedule. Only DeepSpeed alone and no offload know their workload."""
        assert self.workload is not None
        return build_strategy(self.simulated.strategy, self.workload, **self.simulated.setting)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Return the interval of the iteration time in seconds: the time itself twice, if the spread is not known."""
        seconds, factor = self.result.iteration_s, self.spread.factor if self.spread else 1.0
        return seconds / factor, seconds * factor

    def over(self, other: "Row | None") -> tuple[float, float] | None:
        """Return the interval of this row's iteration time divided by another row's. None if it is not known."""
        if other is None or other.role == self.role or self.spread is None or other.spread is None:
            return None
        ratio, factor = self.result.iteration_s / other.result.iteration_s, self.spread.factor_over(other.spread)
        return ratio / factor, ratio * factor

    @property
    def result(self) -> SimResult:
        return self.simulated.result

    @property
    def prediction(self) -> Prediction:
        """Return the prediction for one way to train, such as DeepSpeed without a plan, as a plan file stores it.

        Rows without a spread have no interval: their low and high times equal the predicted time. Memory by kind of
        data is given only for the plan, for DeepSpeed without a plan, and for training without offload.
        """
        low_s, high_s = self.interval_s
        over_low, over_high = self.over(self.plan) or (0.0, 0.0)
        return Prediction(
            strategy=self.label,
            iteration_s=self.result.iteration_s,
            iteration_low_s=low_s,
            iteration_high_s=high_s,
            over_plan_low=over_low,
            over_plan_high=over_high,
            **self.result.phases,
            device_peak_bytes=self.result.device_peak_bytes,
            host_peak_bytes=self.result.host_peak_bytes,
            storage_bytes=self.result.storage_bytes,
            note=self.simulated.lacks,
            memory=self.simulated.memory if self.role in BY_KIND else {},
            limits=self.limits.by_memory,
        )

    def fields(self, stock_s: float | None, best_s: float | None, tokens: int | None) -> dict[str, Any]:
        """Return a row of the table that compares ways to train, as JSON data.

        Args:
            stock_s, best_s: Seconds per iteration of DeepSpeed without a plan, and of DeepSpeed alone at its best, for
                the speedups. None: it does not fit, and the row has no speedup.
            tokens: Number of tokens per iteration, or None if unknown.
        """
        low_s, high_s = self.interval_s if self.spread else (None, None)
        gain = (self.stock.over(self) if self.stock and stock_s else None) or (None, None)
        return {
            "role": self.role,
            "label": self.label,
            "strategy": self.simulated.strategy,
            "setting": self.simulated.setting_text() if self.role == "peer" else "",
            "fits": self.simulated.fits,
            "reason": self.simulated.lacks,
            **figures(self.result, tokens),
            "iteration_low_s": low_s,
            "iteration_high_s": high_s,
            "speedup": stock_s and stock_s / self.result.iteration_s,
            "speedup_low": gain[0],
            "speedup_high": gain[1],
            "speedup_over_best": best_s and best_s / self.result.iteration_s,
        }


def figures(result: SimResult, tokens: int | None) -> dict[str, Any]:
    """Return a dict with the seconds, the memory peaks in bytes and the tokens per second of a simulated
    training iteration, as JSON data.
    """
    return {
        "iteration_s": result.iteration_s,
        **result.phases,
        "device_peak_bytes": result.device_peak_bytes,
        "host_peak_bytes": result.host_peak_bytes,
        "storage_bytes": result.storage_bytes,
        "tokens_per_s": tokens / result.iteration_s if tokens else None,
    }


def compare(
    workload: Workload,
    machine: Machine,
    limits: Limits,
    plan: Plan | None,
    *,
    others: bool = True,
    compile_: Compile = compiled,
    sweep: PlanSweep | None = None,
    spreads: bool = True,
) -> list[Row]:
    """Simulate a training plan and other ways to train, and return a row of the comparison table for each.

    The other ways are DeepSpeed's own offload at the job's ZeRO stage, DeepSpeed alone at its best if that is another
    setting, no offload (unless memory is unified), DeepSpeed with the other ``offload_param.device``, other systems,
    and variants of the plan.

    Args:
        plan: Plan, or None if no plan fits.
        others: True to include the systems in `PEERS`, DeepSpeed with the other ``pin_memory``, and variants of the
            plan. Each variant does without one technique.
        sweep: Predictor for the training job with the plan's subgroups. If None, a new one is made.
        spreads: True to give the plan, DeepSpeed alone and no offload their spreads.
    """

    def run(name: str, **setting: Any) -> StrategyResult:
        return simulated(name, workload, machine, limits, setting, compile_)

    def row(role: Role, one: StrategyResult) -> Row:
        return Row(role, ", ".join(filter(None, [_LABELS[one.strategy], one.setting_text()])), one, limits)

    alone = StockTraining(workload, machine, limits, compile_)
    stock, best = alone.given, alone.best
    rows, variants = [stock_row(alone)], list[Row]()
    if best is not stock:
        rows.append(Row("best stock", f"{BEST} ({best.name})", best.simulated, limits, best.name, best.workload))
    if not machine.unified_memory:
        plain, at_stage = alone.plain
        rows.append(Row("no offload", _LABELS["no_offload"], plain, limits, workload=at_stage))
    if plan is not None:
        sweep = sweep or PlanSweep(workload.cut_as(plan), machine)
        rows.insert(0, Row("plan", "ebbtide", under_plan(plan, sweep, limits), limits))
        lesser = _variants(workload, plan) if others else ()
        variants = [Row("variant", label, under_plan(less, sweep, limits), limits) for label, less in lesser]
    rows.extend(Row("peer", SETTING + name, one, limits) for name, one in alone.beside(pinning=others))
    if others:
        known = (name for name in PEERS if workload.zero_stage in stages(name))
        peers = (best_setting(name, workload, machine, limits, compile_=compile_) for name in known)
        rows.extend(row("peer", one) for one in peers)
        if workload.clip and workload.zero_stage == 3:
            rows[-1] = replace(rows[-1], label=WAITS_FOR_NORM)
            rows.append(Row("peer", OVERLAPS, run("superoffload", clip=False), limits))
    if spreads:
        rows = _with_spreads(rows, machine, plan, sweep, compile_)
    return rows + variants


def _with_spreads(
    rows: Sequence[Row], machine: Machine, plan: Plan | None, sweep: PlanSweep | None, compile_: Compile
) -> list[Row]:
    # The plan, DeepSpeed alone and no offload have spreads. Each row also gets the rows of the plan and of DeepSpeed
    # alone, with which it is compared.
    known: dict[int, Spread] = {}  # DeepSpeed alone at its best and no offload may be one simulation

    def spread_of(row: Row) -> Spread | None:
        one = row.simulated
        if row.role == "plan" and plan is not None and sweep is not None:
            return plan_spread(sweep.of_plan(plan), plan)
        if row.workload is None:
            return None

        def seconds(on: Machine, work: Workload) -> float:
            return simulate_fast(compile_(one.strategy, work, one.setting), on).iteration_s

        if id(one) not in known:
            known[id(one)] = Spread.of(seconds, row.workload, machine, one.strategy)
        return known[id(one)]

    spread = [replace(row, spread=spread_of(row)) for row in rows]
    of_plan = next((row for row in spread if row.role == "plan"), None)
    of_stock = next(row for row in spread if row.role == "stock")
    return [replace(row, plan=of_plan, stock=of_stock) for row in spread]


def best_stock(rows: Sequence[Row]) -> Row | None:
    """Return the row for the fastest way of DeepSpeed alone that fits, or None if none fits."""
    alone = [row for row in rows if row.role in ("stock", "best stock") and row.simulated.fits]
    return min(alone, key=lambda row: row.result.iteration_s, default=None)


def stock_row(alone: StockTraining) -> Row:
    """Return the row of DeepSpeed alone at the job's ZeRO stage (see `StockTraining.given`)."""
    given = alone.given
    label = _stock_label(alone.workload, given.offload)
    return Row("stock", label, given.simulated, alone.limits, given.name, given.workload)


def stock_beside(
    workload: Workload, machine: Machine, limits: Limits, compile_: Compile = compiled
) -> tuple[str, dict[str, Any]]:
    """Return DeepSpeed's fastest offload at the job's ZeRO stage that fits (see `StockTraining`)."""
    chosen = StockTraining(workload, machine, limits, compile_).given.simulated
    return chosen.strategy, dict(chosen.setting)


def _stock_label(workload: Workload, offload: Offloading) -> str:
    threads = workload.stock_threads
    few = [f"{threads} thread{'s' * (threads != 1)} a rank"] if threads is not None else []
    return ", ".join([f"stock ZeRO-{workload.zero_stage} offload", *few, *offload_words(offload)])


def _variants(workload: Workload, plan: Plan) -> Iterator[tuple[str, Plan]]:
    yield (
        "ebbtide, all on the host",
        Plan(
            subgroup_size=plan.subgroup_size,
            ways=tuple(Way("host", way.parameters) for way in plan.ways),
            staging_slots=0,
            threads=plan.threads,
            overlap_forward=workload.overlaps_forward,
        ),
    )
    if workload.overlaps_forward:
        yield ("ebbtide, no overlap with forward", plan.model_copy(update={"overlap_forward": False}))


def alternatives(rows: Sequence[Row]) -> tuple[Prediction, ...]:
    """Return the predictions for all ways to train except the plan itself, such as DeepSpeed without a plan."""
    return tuple(row.prediction for row in rows if row.role != "plan")

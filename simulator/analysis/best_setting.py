"""A search for the fastest setting of an offloading strategy, such as Twin-Flow's ratio, that fits into memory."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ebbtide.simulator.analysis.many_plans import PlanSweep, expected, peaks_by_kind
from ebbtide.simulator.engines.compiled import CompiledSchedule, SimResult, compile_schedule, simulate_fast
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.schedules.ebbtide import check_plan
from ebbtide.simulator.schedules.loop import check_passes
from ebbtide.simulator.schedules.strategies import build_strategy, settings
from ebbtide.simulator.update.holding import ByKind
from ebbtide.simulator.workload import Workload

# Number of micro-batches that are built: the first, two equal ones (the second one is repeated), and the last.
BUILT = 4
FEW_MICRO_BATCHES = 3  # more micro-batches change neither whether training fits nor which ops overlap with the update
Compile = Callable[[str, Workload, Mapping[str, Any]], CompiledSchedule]


@dataclass(frozen=True)
class StrategyResult:
    """The result of simulating training under an offloading strategy at one setting, such as Twin-Flow at ratio 0.3.

    Attributes:
        setting: Options that were passed to `build_strategy`.
        lacks: Sentence that says how much memory is missing. Empty if the training fits into memory.
    """

    strategy: str
    setting: Mapping[str, Any]
    memory_of: Callable[[], ByKind] = field(repr=False, compare=False)
    result: SimResult
    lacks: str

    @property
    def fits(self) -> bool:
        return not self.lacks

    @cached_property
    def memory(self) -> ByKind:
        """Return the peak of each memory under a simulated offloading strategy."""
        return self.memory_of()

    def setting_text(self, between: str = " ") -> str:
        """Return the setting of a simulated offloading strategy as text for people, such as ``ratio 0.3``."""
        return ", ".join(
            f"{key}{between}{value:g}"
            if isinstance(value, int | float) and not isinstance(value, bool)
            else f"{key}{between}{value}"
            for key, value in self.setting.items()
        )


def compiled(name: str, workload: Workload, options: Mapping[str, Any]) -> CompiledSchedule:
    """Return an offloading strategy's schedule of ops for a workload, as arrays for the compiled simulator.

    If the workload has more than `BUILT` micro-batches, and its strategy permits, only so many are built, and the last
    but one of them is repeated. The result is the same, except that it then has no op objects.

    Args:
        name: Name of the strategy, such as "zero3_offload".
    """
    micro = workload.gradient_accumulation_steps
    # A measured time of copies covers a whole step and is divided by the number of micro-batches, so it needs all of
    # them. Under a plan, gradients may wait for the gradients of several earlier micro-batches.
    if micro <= BUILT or workload.stock_backward_extra_s is not None or name == "ebbtide":
        return compile_schedule(build_strategy(name, workload, **options))
    if isinstance(asked := options.get("iterations"), int):
        check_passes(workload, asked)  # refused before ops are built
    few = workload.model_copy(update={"gradient_accumulation_steps": BUILT})
    schedule = build_strategy(name, few, **options)
    check_passes(workload, schedule.iterations)
    begun = [op.id for op in schedule.ops if op.kind == OpKind.FORWARD and op.layer == 0]
    repeated = list(zip(begun[BUILT - 2 :: BUILT], begun[BUILT - 1 :: BUILT], strict=True))
    return compile_schedule(schedule).repeating(repeated, 1 + micro - BUILT)


@dataclass(frozen=True)
class _Strategy:
    """An offloading strategy for one workload on one machine, to be simulated at several settings (such as ratios)."""

    name: str
    workload: Workload
    machine: Machine
    limits: Limits
    compile_: Compile

    def best(self, settings: Iterable[Mapping[str, Any]]) -> StrategyResult:
        return min(map(self._run, settings), key=self._rank)

    def _rank(self, one: StrategyResult) -> tuple[bool, float]:
        lacking = self.limits.missing_bytes(one.result)
        return lacking > 0, lacking or one.result.iteration_s

    def _run(self, setting: Mapping[str, Any]) -> StrategyResult:
        plan = setting.get("plan")
        if self.name == "ebbtide" and isinstance(plan, Plan) and len(setting) == 1:
            return under_plan(plan, PlanSweep(self.workload, self.machine), self.limits)
        schedule = self.compile_(self.name, self.workload, setting)
        result = simulate_fast(schedule, self.machine)
        held = schedule.schedule.held
        memory_of = partial(peaks_by_kind, held, schedule.ops, result)
        if isinstance(plan, Plan):  # with a number of iterations
            right, work = result, self.workload.cut_as(plan)

            def run(other: Plan) -> SimResult:
                if other is plan:
                    return right
                return simulate_fast(self.compile_(self.name, self.workload, {**setting, "plan": other}), self.machine)

            result = expected(work, self.machine, plan, run)
        return StrategyResult(self.name, setting, memory_of, result, self.limits.shortfall(result))


def under_plan(plan: Plan, sweep: PlanSweep, limits: Limits) -> StrategyResult:
    """Simulate training under a plan, and check whether it fits into memory.

    Raises:
        PlanError: The plan does not fit the job.
    """
    check_plan(plan, sweep.workload.cut_as(plan))
    sweep = sweep.of_plan(plan)
    result = expected(sweep.workload, sweep.machine, plan, sweep.result)
    return StrategyResult("ebbtide", {"plan": plan}, partial(sweep.memory, plan), result, limits.shortfall(result))


def fastest_plan(
    plans: Iterable[Plan], workload: Workload, machine: Machine, limits: Limits
) -> tuple[float, Plan] | None:
    """Return the fastest of those plans that fit a job and its memory, after its iteration time in seconds."""
    sweeps, best = dict[tuple[int, ...], PlanSweep](), None
    for plan in plans:
        with suppress(RuleError):  # for other subgroups, such as those of another number of ranks
            if plan.subgroups not in sweeps:
                sweeps[plan.subgroups] = PlanSweep(workload.cut_as(plan), machine)
            found = under_plan(plan, sweeps[plan.subgroups], limits)
            if found.fits and (best is None or found.result.iteration_s < best[0]):
                best = found.result.iteration_s, plan
    return best


def simulated(
    name: str,
    workload: Workload,
    machine: Machine,
    limits: Limits,
    setting: Mapping[str, Any],
    compile_: Compile = compiled,
) -> StrategyResult:
    """Simulate an offloading strategy at one setting, and check whether the training fits into memory."""
    return _Strategy(name, workload, machine, limits, compile_).best([setting])


def best_setting(
    name: str,
    workload: Workload,
    machine: Machine,
    limits: Limits,
    setting: Mapping[str, Any] | None = None,
    compile_: Compile = compiled,
) -> StrategyResult:
    """Return the simulation of a strategy at its fastest setting that fits into memory.

    If none fits, it is the one that needs the least additional memory. ``setting`` is the only one to simulate.
    """
    one = _Strategy(name, workload, machine, limits, compile_)
    options = [setting] if setting else settings(name, len(workload.subgroups))
    if len(options) > 1 and workload.gradient_accumulation_steps > FEW_MICRO_BATCHES:
        few = workload.model_copy(update={"gradient_accumulation_steps": FEW_MICRO_BATCHES})
        options = [replace(one, workload=few).best(options).setting]
    return one.best(options)

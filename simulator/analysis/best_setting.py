"""A search for the fastest setting of an offloading strategy, such as Twin-Flow's ratio, that fits into memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ebbtide.simulator.analysis.expected import early_updates_worth, expected
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.analysis.memory_kinds import peaks_by_kind
from ebbtide.simulator.engines.compiled import CompiledSchedule, SimResult, compile_schedule, simulate_fast
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.schedules.ebbtide import check_plan
from ebbtide.simulator.schedules.loop import check_passes
from ebbtide.simulator.schedules.settings import settings
from ebbtide.simulator.schedules.strategies import build_strategy, shared_plan
from ebbtide.simulator.update.footprint import footprint, slots_within, tallies
from ebbtide.simulator.update.holding import ByKind, Holding
from ebbtide.simulator.update.steps import Slot
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import Workload

FEW = 8  # number of best settings that are also tried with early updates
# Number of micro-batches that are built: the first, two equal ones (the second one is repeated), and the last.
BUILT = 4
FEW_MICRO_BATCHES = 3  # more micro-batches change neither whether training fits nor which ops overlap with the update
SLOTS = 2  # most staging buffers of a plan with evenly spread placements
Compile = Callable[[str, Workload, Mapping[str, Any]], CompiledSchedule]


@dataclass(frozen=True)
class Simulated:
    """The result of simulating training under an offloading strategy at one setting, such as Twin-Flow at ratio 0.3.

    Attributes:
        setting: Options that were passed to `build_strategy`.
        memory_of: Function that returns `memory`.
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
        """Return the peak of each memory under a simulated offloading strategy.

        Returns:
            By memory ("device", "host" ...), a dict from the kind of contents (parameters, state ...) to bytes.
        """
        return self.memory_of()

    def told(self, between: str = " ") -> str:
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
        options: Options of the strategy, as for `build_strategy`.
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

    def best(self, settings: Iterable[Mapping[str, Any]]) -> Simulated:
        """Simulate an offloading strategy with each of the given settings, and return the fastest simulation that fits
        into memory.

        If the strategy is ebbtide, the fastest of its plans are simulated a second time, with early updates where they
        are possible. An early update starts before the gradient norm is known. If no simulation fits into memory,
        return the one that needs the least additional memory.

        Args:
            settings: Sets of options for the strategy, such as different ratios of Twin-Flow.
        """
        tried = [self._plain(setting) for setting in settings]
        for plain in sorted(tried, key=self._rank)[:FEW]:
            tried += self._early_variants(plain)
        return min(tried, key=self._rank)

    def _rank(self, one: Simulated) -> tuple[bool, float]:
        lacking = self.limits.missing_bytes(one.result)
        return lacking > 0, lacking or one.result.iteration_s

    def _run(self, setting: Mapping[str, Any], options: Mapping[str, Any]) -> Simulated:
        plan = options.get("plan")
        if self.name == "ebbtide" and isinstance(plan, Plan) and len(options) == 1:
            return replace(under_plan(plan, self.sweep, self.limits), setting=setting)
        schedule = self.compile_(self.name, self.workload, options)
        result = simulate_fast(schedule, self.machine)
        held = schedule.schedule.held
        memory_of = partial(peaks_by_kind, held, schedule.ops, result)
        if isinstance(plan, Plan):  # a plan with more options than its placements
            right, work = result, self.workload.cut_as(plan)

            def run(other: Plan) -> SimResult:
                if other is plan:
                    return right
                return simulate_fast(self.compile_(self.name, self.workload, {**options, "plan": other}), self.machine)

            result = expected(work, self.machine, plan, run)
        return Simulated(self.name, setting, memory_of, result, self.limits.shortfall(result))

    @cached_property
    def sweep(self) -> PlanSweep:
        return PlanSweep(self.workload, self.machine)

    def _spreads(self, setting: Mapping[str, Any]) -> bool:
        return self.name == "ebbtide" and set(setting) == {"resident_share", "device_share"}

    def _plain(self, setting: Mapping[str, Any]) -> Simulated:
        if not self._spreads(setting):
            return self._run(setting, dict(setting))
        plan = _spread(self.workload, **setting)
        if not self.machine.unified_memory:
            plan = _fitted(plan, self.workload, self.limits)
        return self._run(setting, {"plan": plan})

    def _early_variants(self, plain: Simulated) -> Iterator[Simulated]:
        """Yield up to two simulations of ebbtide's plan with early updates, which start before the gradient norm is
        known.

        In the first simulation, the CPU's updates are early, as many as memory and time allow. In the second
        simulation, the GPU's updates of subgroups with state in host memory are early too.

        Args:
            plain: Simulation of the plan without early updates.
        """
        work, machine, setting = self.workload, self.machine, plain.setting
        silent = work.zero_stage < 3 or machine.unified_memory
        if silent or not self._spreads(setting):
            return
        plan = _spread(work, **setting)
        left = self.limits.host_bytes - plain.result.host_peak_bytes
        able = [i for i, way in enumerate(plan.ways) if way == Way("host")]
        count = early_updates_worth(
            work, machine, Holding.of_workload(work), [work.subgroups[i] for i in able[::-1]], left
        )
        hosts = {*able[len(able) - count :]}
        for staged in {False, plan.count("device") > 0}:
            ways = [
                way._replace(early=i in hosts or (staged and way == Way("device"))) for i, way in enumerate(plan.ways)
            ]
            if not any(way.early for way in ways):
                continue
            made = _fitted(plan.model_copy(update={"ways": tuple(ways)}), work, self.limits)
            yield self._run(setting, {"plan": made})


def under_plan(plan: Plan, sweep: PlanSweep, limits: Limits) -> Simulated:
    """Simulate training under a plan, and check whether the training fits into memory.

    Args:
        sweep: Predictor for the job. It is replaced by another one if the plan has other subgroups.

    Raises:
        PlanError: The plan does not fit the job.
    """
    work, machine = sweep.workload.cut_as(plan), sweep.machine
    check_plan(plan, work)
    sweep = sweep if work is sweep.workload else PlanSweep(work, machine)
    result = expected(work, machine, plan, sweep.result)
    return Simulated("ebbtide", {"plan": plan}, partial(sweep.memory, plan), result, limits.shortfall(result))


def _spread(workload: Workload, device_share: float, resident_share: float) -> Plan:
    """Return a plan that updates given fractions of the subgroups on the GPU, with up to `SLOTS` staging buffers.

    Staged subgroups are spread evenly among the subgroups that the CPU updates. The state of a staged subgroup is
    copied from host memory to a staging buffer in GPU memory for the update. A subgroup far larger than the others,
    such as an embedding's, is not staged, because every staging buffer would have to be as large. Another subgroup is
    staged instead.

    Args:
        device_share: Fraction of all subgroups that are staged.
        resident_share: Fraction of all subgroups that have their state in GPU memory.
    """
    plan = shared_plan(workload, device_share, resident_share)
    placements, large = list(plan.placements), workload.large_subgroups
    moved = [i for i in large if placements[i] == "device"]
    places = [i for i, p in enumerate(placements) if p == "host" and i not in large]
    for one, other in zip(moved, reversed(places), strict=False):
        placements[one], placements[other] = "host", "device"
    slots = min(SLOTS, plan.count("device"))
    return plan.placed(placements, staging_slots=slots, prefetch=slots)


def _fitted(plan: Plan, workload: Workload, limits: Limits) -> Plan:
    """Return the plan with as many staging buffers as fit into GPU memory.

    The rest of GPU memory is then used to accumulate the gradients of several micro-batches on the GPU, for as many
    subgroups as fit.
    """
    held = Holding.of_workload(workload)
    if plan.staging_slots and workload.zero_stage == 3:
        bare = plan.model_copy(update={"staging_slots": 0})
        left = limits.device_bytes - workload.activation_bytes - footprint(workload, bare)["device"]
        slots = slots_within(left, plan.staging_slots, held.each_bytes(Slot.STAGING, tallies(workload.subgroups, plan)))
        plan = plan.model_copy(update={"staging_slots": slots, "prefetch": slots})
    if not held.sums:
        return plan
    able = [i for i, way in enumerate(plan.ways) if way.can_sum_on_device]
    taken = footprint(workload, plan)["device"] + workload.activation_bytes
    count = held.most_sums([workload.subgroups[i] for i in able], limits.device_bytes - taken)
    sums = {*able[:count]}
    ways = tuple(way._replace(sum_on_device=i in sums) for i, way in enumerate(plan.ways))
    return plan.model_copy(update={"ways": ways})


def simulated(
    name: str,
    workload: Workload,
    machine: Machine,
    limits: Limits,
    setting: Mapping[str, Any],
    compile_: Compile = compiled,
) -> Simulated:
    """Simulate an offloading strategy at one setting, and check whether the training fits into memory."""
    return _Strategy(name, workload, machine, limits, compile_).best([setting])


def best_setting(
    name: str,
    workload: Workload,
    machine: Machine,
    limits: Limits,
    setting: Mapping[str, Any] | None = None,
    compile_: Compile = compiled,
) -> Simulated:
    """Return the simulation of an offloading strategy at its fastest setting that fits into memory.

    If the argument ``setting`` is given, only this setting is simulated. If no setting fits into memory, return
    the simulation that needs the least additional memory.

    Args:
        compile_: Function that builds a schedule from the strategy's name, the workload and the setting.
    """
    one = _Strategy(name, workload, machine, limits, compile_)
    options = [setting] if setting else list(settings(name, len(workload.subgroups)))
    if len(options) > 1 and workload.gradient_accumulation_steps > FEW_MICRO_BATCHES:
        few = workload.model_copy(update={"gradient_accumulation_steps": FEW_MICRO_BATCHES})
        options = [replace(one, workload=few).best(options).setting]
    return one.best(options)

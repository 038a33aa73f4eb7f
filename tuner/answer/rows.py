"""The table that compares the simulated iteration under a plan with the iterations of other ways to train,
such as DeepSpeed's own offload.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.simulator.analysis.best_setting import Compile, Simulated, best_setting, compiled, simulated, under_plan
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import SimResult
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG, Offloading
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan, Way
from ebbtide.simulator.prediction import Prediction
from ebbtide.simulator.schedules.strategies import stages
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.roles import BY_KIND, SETTING, Role

# Other systems, each simulated with its best setting.
PEERS = ("twin_flow", "deep_optimizer_states", "superoffload")
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
        role: Kind of the row: the plan, stock DeepSpeed, no offload, a variant of the plan, or another system.
        label: Text that names the row and its setting.
        simulated: Result of the simulation.
        limits: Memory that training may use.
    """

    role: Role
    label: str
    simulated: Simulated
    limits: Limits

    @property
    def result(self) -> SimResult:
        return self.simulated.result

    @property
    def prediction(self) -> Prediction:
        """Return the prediction for one way to train, such as DeepSpeed without a plan, as a plan file stores it.

        The prediction has no interval: its low and high times equal the predicted time. Memory by kind of data is given
        only for the plan, for DeepSpeed without a plan, and for training without offload.
        """
        seconds = self.result.iteration_s
        return Prediction(
            strategy=self.label,
            iteration_s=seconds,
            iteration_low_s=seconds,
            iteration_high_s=seconds,
            **self.result.phases,
            device_peak_bytes=self.result.device_peak_bytes,
            host_peak_bytes=self.result.host_peak_bytes,
            storage_bytes=self.result.storage_bytes,
            note=self.simulated.lacks,
            memory=self.simulated.memory if self.role in BY_KIND else {},
            limits=self.limits.by_memory,
        )

    def fields(self, stock_s: float | None, tokens: int | None) -> dict[str, Any]:
        """Return a row of the table that compares ways to train, as JSON data.

        Args:
            stock_s: Seconds per iteration of DeepSpeed without a plan, for the speedup. If None, DeepSpeed without a
                plan does not fit, and the row has no speedup.
            tokens: Number of tokens per iteration, or None if unknown.
        """
        return {
            "role": self.role,
            "label": self.label,
            "strategy": self.simulated.strategy,
            "setting": self.simulated.told() if self.role == "peer" else "",
            "fits": self.simulated.fits,
            "reason": self.simulated.lacks,
            **figures(self.result, tokens),
            "speedup": stock_s and stock_s / self.result.iteration_s,
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
) -> list[Row]:
    """Simulate a training plan and other ways to train, and return a row of the comparison table for each.

    The other ways are DeepSpeed's own offload, no offload (unless memory is unified), DeepSpeed with the other
    ``offload_param.device``, other systems, and variants of the plan.

    Args:
        plan: Plan, or None if no plan fits.
        others: True to include the systems in `PEERS`, DeepSpeed with the other ``pin_memory``, and variants of the
            plan. Each variant does without one technique.
        sweep: Predictor for the training job with the plan's subgroups. If None, a new one is made.
    """

    def run(name: str, **setting: Any) -> Simulated:
        return simulated(name, workload, machine, limits, setting, compile_)

    def row(role: Role, one: Simulated) -> Row:
        return Row(role, ", ".join(filter(None, [_LABELS[one.strategy], one.told()])), one, limits)

    def deepspeed(role: Role, label: str, offload: Offloading) -> Row:
        name, setting = offload.strategy(workload.zero_stage)
        return Row(role, label, run(name, **setting), limits)

    stock = _offload_beside(workload, plan, limits)
    rows, variants = [deepspeed("stock", _stock_label(workload, stock), stock)], list[Row]()
    if not machine.unified_memory:
        rows.append(row("no offload", run("no_offload")))
    if plan is not None:
        sweep = sweep or PlanSweep(workload.cut_as(plan), machine)
        rows.insert(0, Row("plan", "ebbtide", under_plan(plan, sweep, limits), limits))
        lesser = _variants(workload, plan) if others else ()
        variants = [Row("variant", label, under_plan(less, sweep, limits), limits) for label, less in lesser]
    moves = workload.zero_stage == 3 and not machine.unified_memory
    settings = _other_settings(stock, parameters=moves, pinning=others)
    rows.extend(deepspeed("peer", SETTING + name, other) for name, other in settings)
    if others:
        known = (name for name in PEERS if workload.zero_stage in stages(name))
        best = (best_setting(name, workload, machine, limits, compile_=compile_) for name in known)
        rows.extend(row("peer", one) for one in best)
    return rows + variants


def stock_beside(workload: Workload, plan: Plan | None, limits: Limits | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name and options of DeepSpeed's own training strategy that a plan is compared with.

    The strategy is what the job's DeepSpeed config sets. Without a config, or if the config does not offload, the
    strategy is DeepSpeed's optimizer offload to host memory. There are two exceptions. If the plan stores optimizer
    state on a drive, DeepSpeed does so too. If the plan keeps parameters in host memory that GPU memory cannot hold,
    DeepSpeed keeps all parameters in host memory.

    Args:
        plan: Plan, or None if no plan fits.
        limits: Memory that training may use. If None, the limits that the plan was made for.
    """
    return _offload_beside(workload, plan, limits).strategy(workload.zero_stage)


def _offload_beside(workload: Workload, plan: Plan | None, limits: Limits | None) -> Offloading:
    """Return the offload settings of DeepSpeed that a plan is compared with. See `stock_beside`."""
    offload = _configured(workload)
    if plan is None:
        return offload
    made_for = plan.prediction.limits if plan.prediction else {}
    device_bytes = limits.device_bytes if limits else made_for.get("device", 0)
    if plan.stores and offload.optimizer != "nvme":
        offload = replace(_alone(offload), optimizer="nvme", pipelined=True)
    all_on_device_bytes = workload.device_base_bytes + workload.activation_bytes
    if "host" in plan.parameter_locations and all_on_device_bytes > device_bytes:
        offload = replace(_alone(offload), parameters="cpu")
    return offload


def _configured(workload: Workload) -> Offloading:
    """Return the offload settings of the job's DeepSpeed config.

    If there is no config, if it does not offload, or if its offload cannot be simulated, return the settings of
    DeepSpeed's optimizer offload to host memory.
    """
    default = replace(WITHOUT_CONFIG, optimizer="cpu")
    offload: Offloading = workload.offload or default
    if offload.optimizer in (None, "none"):
        return default
    with suppress(ModelError):
        offload.strategy(workload.zero_stage)
        return offload
    return default


def _alone(offload: Offloading) -> Offloading:
    """Return offload settings without Twin-Flow and SuperOffload, which DeepSpeed does not combine with others."""
    return replace(offload, ratio=1.0, superoffload=False)


def _other_settings(offload: Offloading, *, parameters: bool, pinning: bool) -> Iterator[tuple[str, Offloading]]:
    """Yield DeepSpeed's offload settings with the other ``offload_param.device`` or ``pin_memory``, each with its name.

    Args:
        parameters: True to yield the other ``offload_param.device``.
        pinning: True to yield the other ``pin_memory``.
    """
    if parameters:
        device = "none" if offload.parameters == "cpu" else "cpu"
        yield f"offload_param {device}", replace(_alone(offload), parameters=device)
    if pinning and not offload.superoffload:  # SuperOffload has pinned buffers of its own
        pinned = not offload.pinned
        yield f"pin_memory {str(pinned).lower()}", replace(offload, pinned=pinned, pinned_parameters=pinned)


def _stock_label(workload: Workload, offload: Offloading) -> str:
    """Return the label of the row for DeepSpeed alone, which names the settings that differ from DeepSpeed's optimizer
    offload to pinned host memory with all cores.
    """
    threads = workload.stock_threads
    settings = {
        f"{threads} thread{'s' * (threads != 1)} a rank": threads is not None,
        "offload_optimizer nvme": offload.optimizer == "nvme",
        "pipelined": offload.pipelined,
        "offload_param cpu": offload.parameters == "cpu",
        f"ratio {offload.ratio:g}": offload.ratio < 1,
        "super_offload": offload.superoffload,
        "torch_adam": offload.torch_adam,
        "pin_memory false": not offload.pinned,
    }
    return ", ".join([f"stock ZeRO-{workload.zero_stage} offload", *(name for name, on in settings.items() if on)])


def _variants(workload: Workload, plan: Plan) -> Iterator[tuple[str, Plan]]:
    yield (
        "ebbtide, all on the host",
        Plan(
            subgroup_size=plan.subgroup_size,
            ways=tuple(Way("host", way.parameters) for way in plan.ways),
            staging_slots=0,
            threads=plan.threads,
            overlap_forward=workload.zero_stage == 3,
        ),
    )
    if workload.zero_stage == 3:
        yield ("ebbtide, no overlap with forward", plan.model_copy(update={"overlap_forward": False}))


def alternatives(rows: Sequence[Row]) -> tuple[Prediction, ...]:
    """Return the predictions for all ways to train except the plan itself, such as DeepSpeed without a plan.

    A plan file stores these predictions in its field ``alternatives``.
    """
    return tuple(row.prediction for row in rows if row.role != "plan")

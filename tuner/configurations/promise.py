"""What a configuration can give at best, in microseconds: what cannot win is never simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ebbtide.simulator import Machine, Workload
from ebbtide.simulator.analysis.bound import fluid_bound
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.estimates.blocks import ModelError
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.schedules.peers import HOST_GRADIENT_BYTES
from ebbtide.simulator.update.footprint import Holding, moved_out
from ebbtide.simulator.update.optimizer import FP32_BYTES
from ebbtide.simulator.update.recipes import Bytes
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.update.way import plain_ways
from ebbtide.tuner.configurations.outcome import Question
from ebbtide.tuner.configurations.space import Configuration
from ebbtide.tuner.placements.moves import STORED


@dataclass(frozen=True)
class Promise:
    """Bounds: no simulation of the configuration is faster or takes less.

    Attributes:
        device_bytes: its peak there.
        missing_bytes: of both memories, at the least; above 0 it cannot fit.
        refused: why it cannot be simulated; empty: it can.
        tight: that of the linear program is in it.
    """

    tokens_per_s: float = 0.0
    device_bytes: int = 0
    missing_bytes: int = 0
    refused: str = ""
    tight: bool = False


def promise(question: Question, c: Configuration) -> Promise:
    """From the workload alone. Its subgroups, which change no bound here, are not made."""
    try:
        work = question.workload(c.changed(sub_group_size=10**9))
        name, options = question.strategy(c)
    except ModelError as error:
        return Promise(refused=str(error))
    busy_s = work.pipeline_idle_s + work.forward_s + work.backward_s
    if name == "zero_infinity":  # stock: beside the update nothing is computed
        adams = Bytes.of(work).adams
        busy_s += work.params * adams / question.machine.rate("host_adam_params_per_s")
    if options.get("optimizer") == "nvme" and not options["pipelined"]:
        busy_s += _storage_s(work, question.machine)
    device, missing = _bytes(work, question.limits(work), name, options)
    best = (work.tokens_per_iteration or 0) / busy_s
    return Promise(best, device, missing, tight=name != "ebbtide")


def tightened(question: Question, c: Configuration, loose: Promise) -> Promise:
    """With the bound of every plan, which takes milliseconds."""
    if loose.tight or loose.refused:
        return loose
    work = question.workload(c)
    anywhere = question.strategy(c)[1].get("parameters") == "cpu"
    device_bytes = question.limits(work).device_bytes
    try:
        homes = None if anywhere else ()
        bound = fluid_bound(work, question.machine, device_bytes, homes)
    except ValueError:  # not even the workload fits: the simulation says how much is missing
        return replace(loose, tight=True)
    best = (work.tokens_per_iteration or 0) / bound.iteration_s
    return replace(loose, tokens_per_s=min(loose.tokens_per_s, best), tight=True)


def _storage_s(work: Workload, machine: Machine) -> float:
    """Of the step: reads, updates and writes follow each other."""
    rates = capacities(machine, work.ranks_per_node)
    state_bytes = work.params * work.optimizer_state.state_bytes
    read_bytes = state_bytes + work.params * FP32_BYTES
    return read_bytes / rates["storage_read"] + state_bytes / rates["storage"]


def _bytes(work: Workload, limits: Limits, name: str, options: Mapping[str, object]) -> tuple[int, int]:
    """Of the device's peak, and of what is missing in both memories."""
    state = work.params * work.optimizer_state.state_bytes
    kept = 0 if options.get("activations") == "cpu" else work.activation_bytes
    device, host = work.device_base_bytes + kept, 0
    away = moved_out(work, [layer.params for layer in work.layers]) * work.wire_bytes
    if name == "ebbtide":  # state, gradients and perhaps parameters are here or there, whole
        held = Holding.of_workload(work)
        kinds = zip(plain_ways(), *(held.per_param[memory] for memory in TIERS), strict=True)
        stores = limits.storage_bytes is not None
        least = min(
            sum(each) for way, *each in kinds if way.parameters == "device" and (stores or way.placement not in STORED)
        )
        beyond_both = device + work.params * least - limits.total_bytes
        if options.get("parameters") == "cpu":
            device = max(0, device - away)
        return device, max(0, beyond_both, *limits.missing(device, 0).values())
    if name == "no_offload":
        device += state
    if name == "zero_infinity" and options["optimizer"] == "cpu":
        host = state + work.params * HOST_GRADIENT_BYTES
    if options.get("parameters") == "cpu":
        device = max(0, device - away)
        host += work.params * work.wire_bytes
    return device, sum(limits.missing(int(device), int(host)).values())

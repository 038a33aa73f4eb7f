"""DeepSpeed alone, with its own offload settings: the comparison for a plan.

A setting that does not fit into memory is not the comparison, and of those that fit the fastest one is.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from ebbtide.simulator.analysis.best_setting import FEW_MICRO_BATCHES, Compile, Simulated, compiled, simulated
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG, Offloading
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedules.strategies import settings
from ebbtide.simulator.workload import Workload

STAGES = (3, 2, 1)
FASTER = 1e-3  # share of the time that another setting must save to count as faster


@dataclass(frozen=True)
class Setting:
    """One offload setting of DeepSpeed alone, with its simulation.

    Attributes:
        workload: Training job at this stage.
        lacking_bytes: Bytes that GPU and host memory lack together. 0 if the training fits.
    """

    zero_stage: int
    workload: Workload
    offload: Offloading
    simulated: Simulated
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
class Alone:
    """DeepSpeed's own ways to train a job on a machine, without a plan.

    Attributes:
        workload: Training job of one rank, with the subgroups that DeepSpeed makes.
    """

    workload: Workload
    machine: Machine
    limits: Limits
    compile_: Compile = compiled

    @cached_property
    def given(self) -> Setting:
        """Return the fastest setting at the job's own ZeRO stage that offloads optimizer state and fits."""
        # If none fits, return the one that lacks the fewest bytes. The settings are that of the job's DeepSpeed config,
        # and both of ``offload_param.device``.
        return min(self._offloading, key=lambda one: one.rank)

    @cached_property
    def best(self) -> Setting:
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
    def plain(self) -> tuple[Simulated, Workload]:
        """Return training without offload, and its workload: at the fastest ZeRO stage if that is `best`, else at the
        job's own.
        """
        if not self.best.offloads:
            return self.best.simulated, self.best.workload
        return simulated("no_offload", self.workload, self.machine, self.limits, {}, self.compile_), self.workload

    def beside(self, *, pinning: bool) -> Iterator[tuple[str, Simulated]]:
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
    def _offloading(self) -> list[Setting]:
        return self._settings(self.workload, _offloaded(self.workload, self.machine, self.limits))

    def _others(self) -> Iterator[Setting]:
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

    def _settings(self, work: Workload, moved: list[Offloading]) -> list[Setting]:
        found = []
        for offload in dict.fromkeys(moved):
            with suppress(ModelError):
                one = self._run(work, offload)
                found.append(Setting(work.zero_stage, work, offload, one, self.limits.missing_bytes(one.result)))
        return found

    def _run(self, work: Workload, offload: Offloading) -> Simulated:
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

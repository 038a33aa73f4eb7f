"""The prediction of a training iteration that a plan file holds: times, memory peaks and limits."""

from typing import Any

from ebbtide.simulator.limits import missing
from ebbtide.simulator.page import Page
from ebbtide.simulator.schedule import Kind
from ebbtide.simulator.update.pausing import StepTimes
from ebbtide.simulator.update.tiers import Memory
from pydantic import Field, NonNegativeInt

PHASES = ("forward_s", "backward_s", "step_s", "loop_s")


class Prediction(Page):
    """The simulator's prediction of one rank's training iteration under a plan. Times are in seconds.

    Attributes:
        strategy: Name of the predicted strategy: ``ebbtide`` for training under a plan, or another system.
        iteration_s: Time of an iteration: one optimizer step with all its micro-batches.
        iteration_low_s: Lower end of the uncertainty interval of ``iteration_s``.
        iteration_high_s: Upper end of the uncertainty interval of ``iteration_s``.
        tokens_per_s: Tokens that all ranks together train on per second. 0 if unknown.
        forward_s: Time of the forward passes of an iteration.
        backward_s: Time of the backward passes of an iteration.
        device_peak_bytes: Largest number of bytes in use in GPU memory.
        host_peak_bytes: Largest number of bytes in use in host memory.
        memory: Bytes in use at the peak of each memory, by kind (parameters, state ...). The kinds add up to the
            peak. Empty if unknown, as for other systems.
        limits: Bytes of each memory that may be used. A memory without a limit is left out. If device memory is
            host memory, only the host has a limit.
        clip_rate: Fraction of steps that are assumed to clip or overflow in ``iteration_s``. None if the plan has
            no early updates.
        unclipped_s: Time of an iteration that does not clip, so that no early update is redone. 0 if
            ``clip_rate`` is None.
        waiting_s: Time of an iteration whose updates all wait for the gradient norm. 0 if ``clip_rate`` is None.
        clipped_s: Time of an iteration that clips, so that early updates are redone. 0 if ``clip_rate`` is None.
        lower_bound_s: Lower bound of ``iteration_s``, which no plan can beat.
        over_plan_low, over_plan_high: Ends of the uncertainty interval of ``iteration_s`` divided by that of the plan,
            so of the gain of the plan over this way to train. 0 if unknown, and for the plan itself.
        note: Sentence about the memory that is too small. Empty if the strategy fits.
    """

    strategy: str = "ebbtide"
    iteration_s: float = Field(gt=0)
    iteration_low_s: float = Field(gt=0)
    iteration_high_s: float = Field(gt=0)
    tokens_per_s: float = Field(0.0, ge=0)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    step_s: float = Field(ge=0, description="Seconds for which optimizer.step() blocks the training loop.")
    update_s: float = Field(ge=0, description="Seconds from the gradient norm to the last updated parameter.")
    loop_s: float = Field(
        0.0, ge=0, description="Seconds of the training loop outside forward, backward and optimizer step."
    )
    device_peak_bytes: int = Field(0, ge=0)
    host_peak_bytes: int = Field(0, ge=0)
    storage_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of drive space for optimizer state, for the version being written and all kept versions.",
    )
    memory: dict[Memory, dict[Kind, NonNegativeInt]] = Field(default_factory=dict)
    limits: dict[Memory, NonNegativeInt] = Field(default_factory=dict)
    stall_s: float = Field(0.0, ge=0, description="Seconds for which one checkpoint stops training.")
    lower_bound_s: float = Field(0.0, ge=0)
    clip_rate: float | None = Field(None, ge=0, le=1)
    unclipped_s: float = Field(0.0, ge=0)
    waiting_s: float = Field(0.0, ge=0)
    clipped_s: float = Field(0.0, ge=0)
    over_plan_low: float = Field(0.0, ge=0)
    over_plan_high: float = Field(0.0, ge=0)
    note: str = ""

    @property
    def missing(self) -> dict[str, int]:
        """Return the bytes of each memory that a predicted plan needs beyond the memory's limit."""
        return missing(self.limits, self.device_peak_bytes, self.host_peak_bytes, self.storage_bytes)

    @property
    def step_times(self) -> StepTimes | None:
        """Return the predicted iteration times of a plan with early updates, in steps that clip and other steps."""
        if self.clip_rate is None or not self.waiting_s:
            return None
        return StepTimes(self.unclipped_s, self.waiting_s, self.clipped_s)

    @property
    def fits(self) -> bool:
        """Return True if the memory peaks of a plan's or strategy's prediction stay within the limits of the memories.

        A prediction in a plan file of an older version has no limits. It counts as fitting if ``note`` is empty.
        """
        return not self.missing if self.limits else not self.note

    @property
    def record(self) -> dict[str, Any]:
        """Return the row of a table for a prediction. Times are in seconds, memory in GiB."""
        return {
            "strategy": self.strategy,
            "iteration_s": self.iteration_s,
            **{name: getattr(self, name) for name in PHASES},
            "device_GiB": self.device_peak_bytes / 2**30,
            "host_GiB": self.host_peak_bytes / 2**30,
            "fits": not self.note,
            "note": self.note,
        }

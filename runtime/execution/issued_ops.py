"""The copies and updates that training steps under a plan have issued, with methods that wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.clock import Mark
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.subgroup_state import SubgroupState
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.update.recipes import RECIPES

HISTORY_STEPS = 8
KEPT_FETCHES = 4096
# After the last op of one of these kinds, a subgroup's state is in its own memory again.
STATE_ENDS = {OpKind.STATE_D2H, OpKind.STATE_WRITE, OpKind.UPDATE_DEVICE, OpKind.UPDATE_HOST, OpKind.UPDATE_HOST_EARLY}

IssuedOp = tuple[Op, Completion]


@dataclass(slots=True)
class StepRecord:
    """The operations of one training step, each with its start and end.

    The measured timeline is made from them.

    Attributes:
        origin: The GPU event of the previous step from which the times of this step's events are measured.
    """

    number: int
    origin: Mark | None = None
    ops: list[IssuedOp] = field(default_factory=list)


class IssuedOps:
    """The copies, updates and other operations of the latest optimizer steps, with methods that wait for them.

    The executor adds operations. Only the training thread uses this object. Every wait raises the errors of the
    operations that it waits for.

    Attributes:
        history: The operations of each of the latest steps, oldest step first.
        stored: Subgroups with optimizer state on a drive.
    """

    def __init__(self, device: Device, states: list[SubgroupState], store: ExtentStore | None) -> None:
        self.device, self.states, self.store = device, states, store
        self.history: deque[StepRecord] = deque(maxlen=HISTORY_STEPS)
        self.stored = frozenset(s.index for s in states if RECIPES[s.placement].state == "storage")
        # Since the latest launch: all ops of updates, and the op that completed the latest update of each subgroup.
        self._issued: list[IssuedOp] = []
        self._latest = dict[int, Completion]()
        self._published = dict[int, Completion]()  # of the latest step, keyed by subgroup
        self._own: list[IssuedOp] = []  # ops of the latest step
        self._ahead: list[IssuedOp] = []  # ops that the latest step has begun for the next one
        self._ended = 0  # number of the first ops of ``_own`` that have ended
        # Copies of parameters for forward and backward since the latest launch, for the timeline.
        self._beside: deque[IssuedOp] = deque(maxlen=KEPT_FETCHES)
        self._latest_fetch = Completion.done()

    def wait_parameters(self, subgroups: Iterable[int]) -> None:
        """Make the training streams wait for the updates that write subgroups' new parameters."""
        # Without CUDA, the calling thread waits.
        if not self.busy:
            return  # no updates are running, so nothing has to be asked of the device
        self.device.training_waits(self._published[s] for s in subgroups)

    def updates_of(self, subgroups: Iterable[int]) -> list[Completion]:
        """Return the operations that must end before the given subgroups have their new parameters."""
        return [self._published[subgroup] for subgroup in subgroups] if self.busy else []

    def wait_state(self, subgroup: int) -> None:
        """Wait until a subgroup's latest update has ended and its new state is back in host memory or on the drive."""
        for op, completion in reversed(self._own):
            if op.subgroup == subgroup and op.kind in STATE_ENDS:
                completion.wait_host()
                break
        if self.store is not None and subgroup in self.stored:
            self.store.check_restored([subgroup])

    def wait_all(self) -> None:
        """Wait until all operations of the launched optimizer steps have ended. Raise the first error of an operation.

        Operations that were started in advance for a step that is not launched yet are not waited for (see
        `wait_ahead`).
        """
        _wait(self._own)
        self._latest_fetch.wait_host()

    def wait_ahead(self) -> None:
        """Wait until the operations that the latest optimizer step started in advance for the next step have ended."""
        _wait(self._ahead)

    def wait_memory(self) -> None:
        """Wait until all operations on subgroups whose optimizer state is in memory have ended."""
        _wait(pair for pair in (*self._own, *self._ahead) if pair[0].subgroup not in self.stored)
        self._latest_fetch.wait_host()

    def wait_under_way(self) -> None:
        """Wait until the operations that were started in advance for the coming optimizer step, such as
        copies, have ended.
        """
        _wait(self._issued)

    @property
    def busy(self) -> bool:
        """Return whether an operation of the latest optimizer step is still running or has failed."""
        # Each op is asked until it has ended, and not again by every reader.
        while self._ended < len(self._own):
            _, completion = self._own[self._ended]
            if not completion.ended or completion.error is not None:
                return True
            self._ended += 1
        return False

    def raise_if_failed(self) -> None:
        """Raise the error of a background operation that has already failed. Do not wait for other operations."""
        for _, completion in (*self._own, *self._ahead):
            if completion.issued.is_set() and completion.error is not None:
                completion.wait_issued()


def _wait(ops: Iterable[IssuedOp]) -> None:
    for _, completion in ops:
        completion.wait_host()

"""Messages that the ranks exchange for checkpoints, such as each rank's status when a save begins.

The messages go through a process group of their own.
"""

import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from ebbtide.runtime.checkpoint.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Agreement:
    """The result of the ranks' agreement at the start of a save, identical on every rank.

    Attributes:
        nonce: Identifier of the attempt to save, as chosen by rank 0.
        running: True if any rank is still writing an earlier checkpoint.
        failure: Error of the first rank that reports one. Empty if no rank does.
        targets: The folder of each rank's checkpoint, with the tag.
    """

    nonce: str
    running: bool
    failure: str
    targets: tuple[str, ...]

    @property
    def together(self) -> bool:
        return len(set(self.targets)) == 1


class Peers:
    """A gloo process group of all ranks with a deadline, for checkpoints. A dead rank causes an error, not a hang.

    Creating the group is a collective call. A single process needs no group.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.world_size = dist.get_world_size() if together else 1
        self._group = None
        if self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))

    def agree(self, *, running: bool, failure: str, target: str) -> Agreement:
        """Exchange the status of all ranks at the start of a save. Return the combined status, which all ranks share.

        Args:
            running: True if this rank is still writing an earlier checkpoint.
            failure: This rank's error. Empty if it has none.
        """
        every = self._gather((secrets.token_hex(6), running, failure, target))
        return Agreement(
            nonce=every[0][0],
            running=any(r for _, r, _, _ in every),
            failure=next((f"rank {i}: {f}" for i, (_, _, f, _) in enumerate(every) if f), ""),
            targets=tuple(target for _, _, _, target in every),
        )

    def concat(self, items: list[T]) -> list[T]:
        """Return the lists of all ranks joined in rank order. Every rank must call this and gets the same result."""
        return [item for held in self._gather(items) for item in held]

    def close(self) -> None:
        """Destroy the process group for checkpoints, which must not outlive the training job's other groups."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _gather(self, mine: Any) -> list[Any]:
        if self.world_size == 1:
            return [mine]
        if self._group is None:
            raise CheckpointError("this engine was destroyed, so it can no longer save or load checkpoints")
        every: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(every, mine, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(
                f"every rank must reach the checkpoint within {self._deadline_s:g} s "
                f"(checkpoint.deadline_s), but a rank did not: {error}"
            ) from error
        return every

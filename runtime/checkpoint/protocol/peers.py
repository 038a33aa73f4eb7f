"""Messages between ranks in the foreground, on their own process group."""

import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from ebbtide.runtime.checkpoint.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """The same on every rank.

    Attributes:
        running: a checkpoint is still being written by some rank.
        failure: of the first rank that reports one; empty: none.
        together: all save to the same folder under the same tag.
    """

    nonce: str
    running: bool
    failure: str
    together: bool


class Peers:
    """The ranks of the job: a gloo group with a deadline. A dead rank is an error, not a hang.

    Making the group is a collective. A single process needs none.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.world_size = dist.get_world_size() if together else 1
        self._group = None
        if self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))

    def agree(self, *, running: bool, failure: str, target: str) -> Verdict:
        """Called by every rank at the begin of a save, with where it is about to save to."""
        every = self._gather((secrets.token_hex(6), running, failure, target))
        return Verdict(
            nonce=every[0][0],
            running=any(r for _, r, _, _ in every),
            failure=next((f"rank {i}: {f}" for i, (_, _, f, _) in enumerate(every) if f), ""),
            together=len({target for _, _, _, target in every}) == 1,
        )

    def concat(self, items: list[T]) -> list[T]:
        """Return every rank's items, in rank order, on every rank."""
        return [item for held in self._gather(items) for item in held]

    def close(self) -> None:
        """Give the group back; it must not outlive the job's own groups."""
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
                f"(checkpoint.deadline_s), but one did not: {error}"
            ) from error
        return every

"""The resources that all requests of the planning service share: database, worker processes, background
jobs and limits.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ebbtide.tuner.service.jobs import Feed, Jobs
from ebbtide.tuner.service.pool import Pool
from ebbtide.tuner.service.requests import Quota
from ebbtide.tuner.service.store import Store

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Service:
    """The shared resources of the planning service: database, worker processes, background jobs and limits.

    The web application owns and closes these resources.
    """

    store: Store
    quota: Quota = field(default_factory=Quota)
    token: str | None = None
    hosts: tuple[str, ...] = LOOPBACK
    light_workers: int | None = None
    examples: dict[str, Any] = field(default_factory=dict)

    @property
    def shown_machine(self) -> str:
        """Return the name of the machine that the planning server was started with, or an empty string.

        No uploaded machine can have this name.
        """
        machine = self.examples.get("machine")
        return f"{machine.name} ({self.examples.get('kind', 'shown')})" if machine else ""

    @cached_property
    def pool(self) -> Pool:
        return Pool(self.quota, self.light_workers)

    @cached_property
    def feed(self) -> Feed:
        return Feed()

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(self.store, self.pool, self.quota, self.feed)

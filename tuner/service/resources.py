"""The resources that all requests of the planning service share: database, worker processes, background
jobs and limits.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from ebbtide.simulator.estimates.presets import preset, preset_name, preset_names
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import RuleError, explain
from ebbtide.tuner.service.jobs import Feed, Jobs
from ebbtide.tuner.service.pool import Pool
from ebbtide.tuner.service.quota import Quota
from ebbtide.tuner.service.requests import Scenario
from ebbtide.tuner.service.store import Store
from pydantic import ValidationError

S = TypeVar("S", bound=Scenario)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Service:
    """The shared resources: database, worker processes, background jobs and limits.

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
        """Return the name of the machine that the server was started with, or an empty string."""
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


class Names:
    """The names that a request to the service may use for a machine or for a measured workload.

    The service knows the presets, the uploaded machines, and the machine and the workload that the server was started
    with.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def machines(self) -> tuple[dict[str, Machine], dict[str, str]]:
        """Return two dicts by machine name: the machines that the server knows, and the reason for each stored machine
        that cannot be read.
        """
        known = {name: preset(name) for name in preset_names()}
        if self._service.shown_machine:
            known[self._service.shown_machine] = self._service.examples["machine"]
        unreadable = {}
        for name, text in self._service.store.machines().items():
            try:
                known[name] = Machine.model_validate_json(text)
            except ValidationError as error:
                unreadable[name] = explain(error, model=Machine)
        return known, unreadable

    def machine(self, name: str) -> Machine | None:
        """Return the machine of a given name, or None if the server does not know the name.

        The server knows the presets, the uploaded machines, and the machine that the server was started with.

        Raises:
            RuleError: The machine is stored in a form that this version of ebbtide cannot read.
        """
        if name in preset_names():
            return preset(name)
        if name == self._service.shown_machine:
            return cast("Machine", self._service.examples["machine"])
        stored = self._service.store.machine(name)
        try:
            return None if stored is None else Machine.model_validate_json(stored)
        except ValidationError as error:
            raise RuleError(
                f"machine {name!r} is stored in a form that this ebbtide cannot read "
                f"({explain(error, model=Machine)}): profile and upload it again, or delete it",
                key="machine",
            ) from None

    def fill(self, scenario: S) -> S:
        """Return a copy of a request with two kinds of names replaced by their contents.

        These are the name of an uploaded machine, and the name of the measured workload that the server was started
        with. Other names, such as those of presets, stay.

        Raises:
            RuleError: The server does not know the machine, or cannot read it.
        """
        changes: dict[str, Any] = {}
        if isinstance(scenario.machine, str) and scenario.machine not in preset_names():
            machine = self.machine(scenario.machine)
            if machine is None:
                machine = self.machine(preset_name(scenario.machine, self.machines()[0], "machine"))
            changes["machine"] = machine
        workload = self._service.examples.get("workload")
        if workload is not None and scenario.workload == workload.name:
            changes["workload"] = workload
        return scenario.model_copy(update=changes)

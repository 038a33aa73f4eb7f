"""Partitions of parameters on their way to the device: what one rank does in a gather's place."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.zero.checks import private


class Partitions:
    """The location of each parameter's partition, and copies of partitions in host memory.

    Training thread only.

    Attributes:
        subgroup_of: ds_id -> subgroup.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.subgroup_of = {
            param.ds_id: subgroup
            for subgroup in range(len(optimizer._pieces.cuts))
            for param, _, _ in optimizer._pieces.params(subgroup)
        }

    def subgroups(self, params: Iterable[Any]) -> list[int]:
        """Return the subgroups of these parameters, ascending. Frozen parameters are in none."""
        ids = {param.ds_id for param in params}
        return sorted({self.subgroup_of[i] for i in ids if i in self.subgroup_of})

    def live_on_host(self, param: Any, executor: Executor) -> bool:
        """A pass needs a copy of them."""
        if executor.device.unified:
            return False
        subgroup = self.subgroup_of.get(param.ds_id)
        if subgroup is None:  # it is not trained: DeepSpeed keeps it
            return private.parameter_location(self._optimizer) == "host"
        return executor.states[subgroup].parameter_location == "host"

    def bring(self, params: Iterable[Any], executor: Executor) -> dict[Any, tuple[torch.Tensor, list[Completion]]]:
        """Return each parameter's partition on the device, and the completions to await before its use.

        This call does not wait. A copy begins as soon as its update has ended, in the order of the calls.
        """
        held = {param: param.ds_tensor.data for param in params}
        there = {p: self._on_device(p, source, executor) for p, source in held.items()}
        # Memory for a copy may have been another's, in the order of the current stream.
        free = Completion.done(executor.device.current_event())
        brought = {}
        for param, source in held.items():
            tensor, ends = there[param], executor.updates_of(self.subgroups([param]))
            if tensor is not source:
                ends = [executor.fetch(tensor, source, [free, *ends])]
            brought[param] = tensor, ends
        return brought

    def _on_device(self, param: Any, held: torch.Tensor, executor: Executor) -> torch.Tensor:
        """Return the partition itself if it is on the device, otherwise device memory to copy it to."""
        if not self.live_on_host(param, executor):
            return held
        return executor.device.device_empty(held.numel(), held.dtype)

    def fetch(self, params: list[Any], executor: Executor) -> "Fetches | None":
        """Bring parameters in on one rank, without waiting. Return None if DeepSpeed has to gather them.

        DeepSpeed may thus request parameters of later modules while their updates still run, and only
        the module itself waits.
        """
        if not all(map(private.is_whole, params)):
            return None
        private.mark_in_flight(params)
        brought = self.bring(sorted(params, key=lambda p: p.ds_id), executor)
        return Fetches(
            {param: Fetch(param, tensor, ends, executor.device) for param, (tensor, ends) in brought.items()}
        )


class Fetch:
    """A parameter on its way to the device: DeepSpeed waits for it where its module begins."""

    def __init__(self, param: Any, tensor: torch.Tensor, ends: list[Completion], device: Device) -> None:
        """``tensor``: what the parameter is once all of ``ends`` have ended, on the device."""
        self._param, self._tensor, self._ends = param, tensor, ends
        self._device = device

    def wait(self, **_: Any) -> None:
        """Make the training streams, or without any the caller, wait; show the parameter.

        Raises:
            BackgroundError: an update or a copy has failed.
        """
        self._device.training_waits(self._ends)
        self._param.data = self._tensor.view(self._param.ds_shape)
        private.mark_available(self._param)


class Fetches:
    """Parameters that were requested together. Each can be awaited alone."""

    def __init__(self, fetches: Mapping[Any, private.Handle]) -> None:
        self._fetches = fetches

    def of(self, param: Any) -> private.Handle:
        return self._fetches[param]

    def wait(self, **_: Any) -> None:
        """Wait for all of them."""
        for fetch in self._fetches.values():
            fetch.wait()

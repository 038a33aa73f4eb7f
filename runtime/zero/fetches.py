"""Copies of parameters from host memory to the GPU before use. With one rank, they replace DeepSpeed's gathers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.zero.checks import private


class Partitions:
    """A table of where each parameter's ZeRO-3 partition is, in host or GPU memory, with methods to copy it to the GPU.

    Only the training thread uses it.

    Attributes:
        subgroup_of: Subgroup of each trained parameter, by its ``ds_id``.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.subgroup_of = {
            param.ds_id: subgroup
            for subgroup in range(len(optimizer._pieces.cuts))
            for param, _, _ in optimizer._pieces.params(subgroup)
        }

    def subgroups(self, params: Iterable[Any]) -> list[int]:
        """Return the subgroups that the given parameters belong to, in ascending order."""
        ids = {param.ds_id for param in params}
        return sorted({self.subgroup_of[i] for i in ids if i in self.subgroup_of})

    def live_on_host(self, param: Any, executor: Executor) -> bool:
        """Return whether a parameter's partition is in host memory, so that forward and backward need a copy of it."""
        if executor.device.unified:
            return False
        subgroup = self.subgroup_of.get(param.ds_id)
        if subgroup is None:  # a parameter that is not trained, which DeepSpeed manages
            return private.parameter_location(self._optimizer) == "host"
        return executor.states[subgroup].parameter_location == "host"

    def bring(self, params: Iterable[Any], executor: Executor) -> dict[Any, tuple[torch.Tensor, list[Completion]]]:
        """Start to copy parameters' partitions from host memory to the GPU, without waiting.

        The copies run one after the other, in the order of ``params`` and after the copies of earlier calls. Each copy
        also waits until the update of the parameter's subgroup has ended. A partition that is already on the GPU is not
        copied.

        Returns:
            A dict from each parameter to a pair: the partition's tensor on the GPU, and the operations to wait for
            before the tensor is used.
        """
        held = {param: param.ds_tensor.data for param in params}
        there = {
            param: executor.device.device_empty(source.numel(), source.dtype)
            for param, source in held.items()
            if self.live_on_host(param, executor)
        }
        # Memory allocated for a copy may still be in use on the current stream.
        free = Completion.done(executor.device.current_event()) if there else None
        brought: dict[Any, tuple[torch.Tensor, list[Completion]]] = {}
        for param, source in held.items():
            subgroup, tensor = self.subgroup_of.get(param.ds_id), there.get(param)
            ends = [] if subgroup is None else executor.updates_of([subgroup])
            if tensor is None or free is None:
                brought[param] = source, ends
            else:
                brought[param] = tensor, [executor.fetch(tensor, source, [free, *ends])]
        return brought

    def fetch(self, params: list[Any], executor: Executor) -> "Fetches | None":
        """Start to copy parameters to the GPU, if this rank holds them whole. Return handles to wait for.

        DeepSpeed can thus request parameters of later modules while the updates of these parameters still
        run. Only the module that uses them waits. Return None if DeepSpeed has to gather the parameters.
        """
        if not all(map(private.is_whole, params)):
            return None
        private.mark_in_flight(params)
        brought = self.bring(sorted(params, key=lambda p: p.ds_id), executor)
        return Fetches(
            {param: Fetch(param, tensor, ends, executor.device) for param, (tensor, ends) in brought.items()}
        )


class Fetch:
    """The handle of a parameter being copied to the GPU. DeepSpeed waits for the copy when the module begins."""

    def __init__(self, param: Any, tensor: torch.Tensor, ends: list[Completion], device: Device) -> None:
        self._param, self._tensor, self._ends = param, tensor, ends
        self._device = device

    def wait(self, **_: Any) -> None:
        """Make the training streams wait for the copy to the GPU, and use it as the parameter's data.

        Raises:
            BackgroundError: An update or a copy has failed.
        """
        self._device.will_wait(self._ends)
        self._device.training_waits(self._ends)
        self._param.data = self._tensor.view(self._param.ds_shape)
        private.mark_available(self._param)


class Fetches:
    """The handle of all parameters that DeepSpeed requested in one call and that are being copied to the GPU.

    DeepSpeed can wait for all of them (`wait`), or for the copy of one parameter (`of`).
    """

    def __init__(self, fetches: Mapping[Any, private.Handle]) -> None:
        self._fetches = fetches

    def of(self, param: Any) -> private.Handle:
        return self._fetches[param]

    def wait(self, **_: Any) -> None:
        """Wait until all parameters that DeepSpeed requested together can be used."""
        for fetch in self._fetches.values():
            fetch.wait()

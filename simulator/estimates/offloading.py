"""The offload settings in a DeepSpeed config, translated for simulating DeepSpeed and for training with a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbtide.simulator.estimates.deepspeed_keys import (
    HELD,
    OPTIMIZER,
    PARAM,
    STATE,
    ZERO,
    at,
    at_least,
    loaded,
    section,
)
from ebbtide.simulator.estimates.models.blocks import ModelError

STORED = "ebbtide_state"  # folder under the config's nvme_path
_MATRIX_OPTIMIZERS = ("muon", "lamb")
_OWN_STEP = ("optimizer.params.torch_adam", "bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads")
_ACTIVATIONS = "activation_checkpointing.cpu_checkpointing"
# First versions of DeepSpeed in which ZeRO-3 converts gradients to fp32 on the GPU, without blocking backward (pull
# request 8207), and in which ZeRO-1 and 2 copy updated parameters to the GPU in fp32 (5301), and in 16 bits from a
# pinned buffer (7309).
_ASYNC_GRADIENTS, _WIDE_PARAMETERS, _PINNED_PARAMETERS = (0, 19, 5), (0, 14, 1), (0, 17, 0)
# First versions in which ZeRO-3 checks offloaded gradients for an overflow on the host (pull request 3622), and in
# which it does so for fp16 only.
_HOST_CHECK, _FP16_CHECK = (0, 9, 4), (0, 11, 2)


@dataclass(frozen=True)
class Offloading:
    """The offload settings in a DeepSpeed config.

    Attributes:
        optimizer: ``offload_optimizer.device``. None: the config has no such section.
        parameters: ``offload_param.device``.
        activations: ``activation_checkpointing.cpu_checkpointing``.
        pipelined: ``offload_optimizer.pipeline_read`` or ``pipeline_write``.
        ratio: ``offload_optimizer.ratio`` (Twin-Flow): fraction of the optimizer state that is offloaded.
        pinned: ``offload_optimizer.pin_memory``, or DeepSpeed's default for it.
        pinned_parameters: ``offload_param.pin_memory``, or DeepSpeed's default for it.
        superoffload: ``offload_optimizer.super_offload``.
        zenflow: True if the config has the section ``zenflow``.
        storage: Path of the folder where a plan keeps optimizer state on a drive. It is a subfolder of the config's
            ``offload_optimizer.nvme_path``. None if the config does not offload optimizer state to NVMe.
        given: True if there is a config at all.
        torch_adam: ``optimizer.params.torch_adam``: torch's own Adam updates on the CPU.
        deepspeed: DeepSpeed's version. None: the installed version, or the newest if there is none.
        keeps_parameters: True if ``offload_param.device`` is ``none``, and not merely absent. A plan then keeps the
            16-bit parameters on the GPU if it fits so.
    """

    optimizer: str | None = None
    parameters: str = "none"
    activations: bool = False
    pipelined: bool = False
    ratio: float = 1.0
    pinned: bool = True
    superoffload: bool = False
    zenflow: bool = False
    given: bool = True
    storage: str | None = None
    pinned_parameters: bool = True
    torch_adam: bool = False
    deepspeed: str | None = None
    keeps_parameters: bool = False

    @property
    def beyond_plans(self) -> str:
        """Return the DeepSpeed config's key of an offload that ebbtide cannot simulate under a plan."""
        if self.parameters == "nvme":
            return f"{HELD}.device (nvme)"
        return f"{_ACTIVATIONS} (true)" if self.activations else ""

    @property
    def beyond_state(self) -> str:
        """Return a config key that uses NVMe for state, or moves parameters or activations off the GPU."""
        if self.optimizer == "nvme":
            return f"{STATE}.device (nvme)"
        return self.beyond_plans or (f"{HELD}.device ({self.parameters})" if self.parameters != "none" else "")

    def strategy(self, zero_stage: int) -> tuple[str, dict[str, Any]]:
        """Return the name and options for `ebbtide.simulator.build_strategy` that simulate DeepSpeed with these
        offload settings.

        Without a config they simulate DeepSpeed's offload of optimizer state, which is the baseline of a plan.

        Raises:
            ModelError: An offload is not simulated (parameters on NVMe, ZenFlow), or DeepSpeed does not have it at
                this ZeRO stage (a ``ratio`` below ZeRO-3).
        """
        self._check(zero_stage)
        if self.beyond_state:
            return "zero_infinity", {
                "optimizer": self.optimizer,
                "parameters": "cpu" if self.parameters == "cpu" else "device",
                "activations": "cpu" if self.activations else "device",
                "pipelined": self.pipelined and self.optimizer == "nvme",
                "pinned": self.pinned,
                "pinned_parameters": self.pinned_parameters or self.parameters != "cpu",
                **self._copies,
            }
        if self.optimizer == "none" or (self.optimizer is None and self.given):
            return "no_offload", {}
        if zero_stage < 3:
            return "zero_offload", self._flat_copies
        share = {} if self.ratio == 1 else {"ratio": self.ratio}
        if self.superoffload:
            return "superoffload", share
        if share:
            flows = {"async_gradients": False} if self.pinned and self._blocks else {}
            return "twin_flow", {**share, "pinned": self.pinned, **flows, **self._checks}
        return ("zero3_offload" if self.pinned else "zero3_offload_unpinned"), self._copies

    @property
    def _blocks(self) -> bool:
        # Versions of DeepSpeed before 0.19.5, under ZeRO-3, block the host thread
        # until gradients have arrived in host memory, and then convert the gradients to fp32 on the CPU. Newer versions
        # convert on the GPU, and backward does not wait for the gradients.
        return not at_least(_ASYNC_GRADIENTS, self.deepspeed)

    @property
    def _copies(self) -> dict[str, Any]:
        blocks = {"async_gradients": False} if self._blocks else {}
        return {**blocks, **({"torch_adam": True} if self.torch_adam else {}), **self._checks}

    @property
    def _checks(self) -> dict[str, Any]:
        # The place is the host or the GPU. The newest versions do as `build_strategy` does by default: they check on
        # the host, and only in fp16.
        if not at_least(_HOST_CHECK, self.deepspeed):
            return {"overflow_check": "device"}
        return {} if at_least(_FP16_CHECK, self.deepspeed) else {"overflow_check": "host"}

    @property
    def _flat_copies(self) -> dict[str, Any]:
        # The options of `build_strategy` for ZeRO-1 or 2 offload depend on DeepSpeed's version, and on two
        # settings of the DeepSpeed config: whether host memory is pinned, and whether torch's own Adam updates on the
        # CPU.
        found: dict[str, Any] = {} if self.pinned else {"pinned": False}
        if not at_least(_WIDE_PARAMETERS, self.deepspeed):
            found["parameters"] = "fresh_16_bit"
        elif not at_least(_PINNED_PARAMETERS, self.deepspeed):
            found["parameters"] = "wide"
        return {**found, **({"torch_adam": True} if self.torch_adam else {})}

    def _check(self, zero_stage: int) -> None:
        beyond = self.beyond_state
        if self.zenflow:
            raise ModelError(
                f"{ZERO}.zenflow must be absent, but is present: training with stale updates (ZenFlow) is not simulated"
            )
        if beyond and zero_stage < 3:
            raise ModelError(
                f"{beyond} must be absent under ZeRO-{zero_stage}, because ebbtide simulates this offload only under "
                f"ZeRO-3. Remove the key, or set {ZERO}.stage to 3"
            )
        if self.parameters == "nvme":
            raise ModelError(f"{HELD}.device must be none or cpu to be simulated, but got 'nvme'")
        if beyond and self.optimizer in (None, "none"):
            raise ModelError(
                f"offload_optimizer.device must be cpu or nvme if the config sets {beyond}, but got {self.optimizer!r}"
            )
        if self.ratio < 1 and zero_stage < 3:
            raise ModelError(
                f"{STATE}.ratio must be 1 under ZeRO-{zero_stage}, since DeepSpeed has Twin-Flow "
                f"for ZeRO-3 only, but got {self.ratio:g}"
            )
        if beyond and (self.ratio < 1 or self.superoffload):
            key = "super_offload" if self.superoffload else f"ratio ({self.ratio:g})"
            raise ModelError(
                f"{STATE}.{key} must not be set together with {beyond}, because ebbtide does not simulate the two "
                "together. Remove one of them"
            )

    def keys_read(self, zero_stage: int) -> set[str]:
        """Return the offload keys of a DeepSpeed config that influence the simulation of DeepSpeed at a ZeRO stage."""
        keys = {f"{STATE}.device", f"{HELD}.device", f"{STATE}.ratio", _ACTIVATIONS}
        if self.optimizer == "nvme":
            keys |= {f"{STATE}.pipeline_read", f"{STATE}.pipeline_write"}
        if zero_stage == 3 and self.beyond_state:
            keys |= {f"{STATE}.pin_memory", f"{HELD}.pin_memory"}
        elif zero_stage < 3:
            keys.add(f"{STATE}.pin_memory")
        else:
            keys.add(f"{STATE}.super_offload")
            keys |= set() if self.superoffload else {f"{STATE}.pin_memory"}
        return keys


# The settings of the newest DeepSpeed, so that an answer does not depend on the version installed on this machine.
WITHOUT_CONFIG = Offloading(given=False, deepspeed="999")


def offloading(config: Mapping[str, Any] | str | Path | None, deepspeed: str | None = None) -> Offloading:
    """Read the offload settings in a DeepSpeed config."""
    if config is None and deepspeed is None:
        return WITHOUT_CONFIG
    return replace(offloading_of(loaded(config), deepspeed), given=config is not None)


def offloading_of(read: Mapping[str, Any], deepspeed: str | None = None) -> Offloading:
    """Return the offload settings in a DeepSpeed config that the function `loaded` has already read and checked."""
    zero = section(read, ZERO)
    state = _moved(zero, OPTIMIZER, "cpu_offload")
    held = _moved(zero, PARAM, "cpu_offload_param") or {}
    if zero.get("stage") in (1, 2):
        held = {}  # DeepSpeed reads this section under ZeRO-3 only
    optimizer = None if state is None else state.get("device") or "none"
    state = state or {}
    pinned, ratio = state.get("pin_memory"), state.get("ratio")
    return Offloading(
        optimizer,
        held.get("device") or "none",
        bool(section(read, "activation_checkpointing").get("cpu_checkpointing")),
        bool(state.get("pipeline_read") or state.get("pipeline_write")),
        1.0 if ratio is None or optimizer in (None, "none") else ratio,
        default_pinning(deepspeed) if pinned is None else pinned,
        bool(state.get("super_offload")),
        zero.get("zenflow") is not None,
        storage=_stored_at(optimizer, state.get("nvme_path")),
        pinned_parameters=default_pinning(deepspeed) if held.get("pin_memory") is None else bool(held["pin_memory"]),
        torch_adam=bool(at(read, "optimizer.params.torch_adam")),
        deepspeed=deepspeed,
        keeps_parameters=held.get("device") == "none",
    )


def _stored_at(optimizer: str | None, path: Any) -> str | None:
    return str(Path(path).absolute() / STORED) if optimizer == "nvme" and path else None


def _moved(zero: Mapping[str, Any], key: str, former: str) -> Mapping[str, Any] | None:
    result: Mapping[str, Any] | None = zero.get(key)
    return {"device": "cpu"} if result is None and zero.get(former) else result


def default_pinning(installed: str | None = None) -> bool:
    """Return True if DeepSpeed pins its offload buffers when ``pin_memory`` is absent: since version 0.19.5."""
    return at_least((0, 19, 5), installed)


def left_to_stock(config: Mapping[str, Any]) -> str:
    """Return the reason why a plan has nothing to do under a DeepSpeed config, or an empty string if there is none.

    The reason is ZeRO stage 0, or optimizer state that stays on the GPU.
    """
    stage = at(config, f"{ZERO}.stage") or 0
    if stage == 0:
        return f"{ZERO}.stage is 0, so nothing is partitioned over the ranks"
    if offloading_of(config).optimizer in (None, "none"):
        return f"{STATE}.device is 'none' or absent, so the optimizer state stays on the GPU"
    return ""


def replaced_by_a_plan(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of ``offload_optimizer`` in a DeepSpeed config that have no effect under a plan.

    Returns:
        A dict from each such key to a text for the user with the reason.
    """
    state = section(config, STATE)
    found = {}
    ratio = state.get("ratio")
    if ratio is not None and ratio != 1:
        found["ratio"] = (
            f"{STATE}.ratio (Twin-Flow, {ratio}) is replaced by the plan, which decides what stays on "
            "the GPU (`tune plan --gpu-memory`). Results are those of DeepSpeedCPUAdam, and "
            "Twin-Flow's GPU part would differ in the last bits"
        )
    if state.get("super_offload"):
        found["super_offload"] = (
            f"{STATE}.super_offload is replaced by the plan. Results are those of ZeRO-Offload, as without this key"
        )
    return found


def plan_obstacle(config: Mapping[str, Any]) -> str:
    """Return the reason why training with a DeepSpeed config cannot use a plan, or an empty string if it can.

    The reason names the key to change. ZeRO stage, device and optimizer are not checked here.
    """
    zero = section(config, ZERO)
    if zero.get("zenflow") is not None:
        return (
            f"{ZERO}.zenflow must be absent, but got {zero['zenflow']}: ZenFlow trains with stale "
            "updates, and a plan never does"
        )
    if (zero.get("mics_shard_size") or -1) > 0:
        return f"{ZERO}.mics_shard_size must be absent (MiCS is not supported), but got {zero['mics_shard_size']}"
    return _obstacle_outside_zero(config)


def _obstacle_outside_zero(config: Mapping[str, Any]) -> str:
    if str(at(config, "optimizer.type")).lower() in _MATRIX_OPTIMIZERS:
        return (
            f"optimizer.type must be one that updates each element by itself, but got "
            f"{at(config, 'optimizer.type')!r}, which needs whole matrices: train it without a plan"
        )
    if section(config, "hybrid_engine").get("enabled"):
        return (
            "hybrid_engine.enabled must be false, but got true: the hybrid engine gathers parameters for generation by "
            "itself, which was never tested under a plan. Train it without a plan"
        )
    if section(config, "compile").get("deepcompile"):
        return (
            "compile.deepcompile must be false, but got true: DeepCompile gathers parameters in "
            "compiled graphs that do not wait for a plan's updates. torch.compile of the model "
            "works under a plan"
        )
    return ""


def own_step_key(config: Mapping[str, Any]) -> str:
    """Return the key of a DeepSpeed config that keeps ebbtide from replacing the optimizer's step."""
    # With such a key, the optimizer's own ``step()`` updates state in host memory even if there is a plan.
    return next((key for key in _OWN_STEP if at(config, key)), "")


def plan_refusal(config: Mapping[str, Any], moved: Offloading) -> str:
    """Return the reason why no plan can be searched for a DeepSpeed config. Empty if a plan can be searched.

    The reason names the key of the config to change. There are three kinds of reasons:

    - Training with this config cannot use a plan.
    - The config has a key with which the optimizer's own ``step()`` makes all updates in host memory, even if there is
      a plan. So there is nothing to search.
    - The config has an offload that ebbtide does not simulate together with a plan.
    """
    own_step = own_step_key(config)
    if own_step:
        return (
            f"{own_step} must be absent or false to search a plan, but got true. With this key the optimizer "
            "runs its own step and keeps all state in host memory, so there is nothing to search. "
            'Train with "ebbtide": {"plan": "automatic"} in the config'
        )
    obstacle = plan_obstacle(config)
    if not obstacle and moved.optimizer == "nvme":
        obstacle = _storage_obstacle(config, moved)
    if obstacle or not moved.beyond_plans:
        return obstacle
    what = "parameters on a drive" if moved.parameters == "nvme" else "activations that move"
    return (
        f"{moved.beyond_plans} must be absent to plan, because plans with {what} are not simulated. "
        "Remove the key for planning (training under a plan accepts it), or simulate DeepSpeed alone "
        "(tune simulate or tune search with the same --ds-config)"
    )


def _storage_obstacle(config: Mapping[str, Any], moved: Offloading) -> str:
    stage = at(config, f"{ZERO}.stage")
    if moved.storage is None:
        return f"{STATE}.nvme_path must name a folder for a plan with {STATE}.device 'nvme', but it is absent"
    if stage in (3, "auto"):
        return ""
    return f"{STATE}.device must be 'cpu' under ZeRO-{stage}, but got 'nvme': state on a drive needs ZeRO-3"

"""A list of DeepSpeed's defects that make training wrong without an error, with the affected versions and
configurations.

A defect has its number in DeepSpeed's issue tracker. A defect without a number was found by this project. The
affected versions were found by reading DeepSpeed's sources.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
_URL = "https://github.com/deepspeedai/DeepSpeed/issues"


@dataclass(frozen=True)
class KnownWrong:
    """A known defect of some DeepSpeed versions that makes training wrong without an error.

    Attributes:
        since: First version with the defect. Empty if all older versions have it.
        fixed: First version without the defect. Empty if the newest checked version (0.19.8) still has it.
        issue: Number in DeepSpeed's issue tracker. 0 if there is none.
        what: Description of the defect as a user sees it.
        concerns: Function that returns True if a DeepSpeed config is affected.
        only_if: Further condition on the training script, which no config shows. Empty if there is none.
    """

    since: str
    fixed: str
    issue: int
    what: str
    concerns: Callable[[Config], bool]
    only_if: str = ""

    def __str__(self) -> str:
        where = f" ({_URL}/{self.issue})" if self.issue else ""
        cure = f"fixed in {self.fixed}" if self.fixed else "not fixed in 0.19.8"
        condition = f"only if {self.only_if}: " if self.only_if else ""
        return f"{condition}{self.what}; {cure}{where}"


def _zero(config: Config) -> Mapping[str, Any]:
    return config.get("zero_optimization") or {}


def _stage(config: Config) -> int:
    stage = _zero(config).get("stage")
    return stage if isinstance(stage, int) else 0  # "auto" is dropped by DeepSpeed


def _offloads(config: Config) -> bool:
    zero = _zero(config)
    place = zero.get("offload_optimizer") or {}
    return bool(zero.get("cpu_offload")) or place.get("device", "none") != "none"


def _accumulates(config: Config) -> bool:
    return config.get("gradient_accumulation_steps", 1) not in (1, None)


def _may_not_accumulate(config: Config) -> bool:
    return config.get("gradient_accumulation_steps", 1) in (1, None, "auto")


def _bf16(config: Config) -> bool:
    fields = config.get("bf16") or config.get("bfloat16") or {}
    return fields.get("enabled") in (True, "auto")


def _optimizer(config: Config) -> str:
    return str((config.get("optimizer") or {}).get("type", "")).lower()


def _scheduled(config: Config) -> Mapping[str, Any]:
    return (config.get("scheduler") or {}).get("params") or {}


def _cycles_momentum(config: Config) -> bool:
    kind = (config.get("scheduler") or {}).get("type")
    return kind == "OneCycle" and _scheduled(config).get("cycle_momentum", True) is not False


def _accumulates_in_fp32(config: Config) -> bool:
    return (config.get("data_types") or {}).get("grad_accum_dtype") == "fp32"


# Defects of the DeepSpeed versions that ebbtide can be installed with (0.18.6 or newer).
TABLE = (
    KnownWrong(
        "0.15.2",
        "0.19.0",
        7967,
        "ZeRO-1 and 2 with offload: the gradients of all but one micro-batch of an "
        "accumulation are left out of the norm, and clipping is too weak",
        lambda c: _stage(c) in (1, 2) and _offloads(c) and _accumulates(c),
    ),
    KnownWrong(
        "",
        "0.19.0",
        7981,
        "ZeRO-1 and 2 with offload and accumulation 1: the gradients of all but the last backward are lost",
        lambda c: _stage(c) in (1, 2) and _offloads(c) and _may_not_accumulate(c),
        only_if="a step has several backward() (set_gradient_accumulation_boundary)",
    ),
    KnownWrong(
        "",
        "0.19.0",
        7985,
        "ZeRO-1 in bf16 with grad_accum_dtype fp32 on several ranks: the last micro-batch's "
        "gradients are not averaged over them",
        lambda c: _stage(c) == 1 and _bf16(c) and _accumulates_in_fp32(c),
    ),
    KnownWrong(
        "",
        "0.19.8",
        8463,
        "Muon with offload: matrices are updated as flat vectors, not orthogonalised",
        lambda c: _optimizer(c) == "muon" and _offloads(c),
    ),
    KnownWrong(
        "", "0.19.7", 8441, "Muon without ZeRO trains as SGD", lambda c: _optimizer(c) == "muon" and _stage(c) == 0
    ),
    KnownWrong(
        "",
        "0.19.8",
        8443,
        "Muon with ZeRO-3 and accumulation: momentum advances once per micro-batch",
        lambda c: _optimizer(c) == "muon" and _stage(c) == 3 and _accumulates(c),
    ),
    KnownWrong(
        "",
        "0.19.8",
        0,
        "DeepSpeed's CPU Lion mangles the sign in its vector loop",
        lambda c: _optimizer(c) == "lion" and _offloads(c),
    ),
    KnownWrong(
        "",
        "0.19.8",
        0,
        "DeepSpeed's CPU Adagrad leaves the weight decay out in its scalar loop",
        lambda c: _optimizer(c) == "adagrad" and _offloads(c),
    ),
    KnownWrong("", "", 8495, "the OneCycle scheduler replaces every group's second beta with 0.99", _cycles_momentum),
    KnownWrong(
        "",
        "",
        8589,
        "the OneCycle scheduler lets the first beta grow past 1 in its decay phase",
        lambda c: _cycles_momentum(c) and bool(_scheduled(c).get("decay_mom_rate")),
    ),
    KnownWrong(
        "",
        "",
        0,
        "after a resume, losses differ from the second update on (huggingface/accelerate#3869)",
        lambda c: _stage(c) == 3 and not c.get("optimizer") and not c.get("scheduler"),
        "the script gives Accelerate its own optimizer and scheduler and resumes with load_state",
    ),
    KnownWrong(
        "0.19.8",  # older versions were not tested
        "",
        0,
        "below ZeRO-3 safe_get_full_optimizer_state finds the state of the first parameter group only, and raises "
        "ValueError for the others; under a plan it finds all",
        lambda c: _stage(c) in (1, 2) and not c.get("ebbtide"),
        "the script reads optimizer state and its optimizer has several parameter groups",
    ),
)


def known_wrong(version: str, config: Config) -> list[KnownWrong]:
    """Return a list of the known defects of a DeepSpeed version that make training with a DeepSpeed config wrong."""
    from packaging.version import Version

    installed = Version(version)
    return [
        row
        for row in TABLE
        if (not row.since or Version(row.since) <= installed)
        and (not row.fixed or installed < Version(row.fixed))
        and row.concerns(config)
    ]

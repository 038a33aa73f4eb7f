"""Settings and measurements of published DeepSpeed runs with offloaded optimizer state, read from a CSV file."""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 50304
GPUS_PER_NODE = 4
MEASURED = ("fwd_ms", "bwd_ms", "step_ms", "optimizer_ms", "iter_ms")
MEMORY = (
    "mem_before_fwd_gb",
    "mem_after_fwd_gb",
    "mem_fwd_peak_gb",
    "mem_after_bwd_gb",
    "mem_bwd_peak_gb",
    "mem_after_step_gb",
    "mem_step_peak_gb",
)
_NUMBERS = ("params_b", "tp", "dp", "layers", "hidden", "seq", "micro_batch", "offload_ratio", "subgroup")
MAY_BE_BLANK = ("layers", "hidden", "seq", "micro_batch", "offload_ratio", "subgroup", "prefetch")
KV_HEADS = 4
# Meaning of blank cells: the settings that most campaigns used, and the published models by label.
USUAL = {"seq": 2048.0, "micro_batch": 1.0, "offload_ratio": 1.0, "subgroup": 1e8, "stride": 2.0}
SHAPES = {7: (32, 4096), 8.3: (72, 3072), 10: (50, 4096), 13: (40, 5120), 20: (40, 6144)}
# Labels are rounded. If the logged shape differs by more than this share, it belongs to another model.
_LABEL_TOLERANCE = 0.2
_LABEL_LIMIT = 4.0  # if label and shape differ by more than this factor, one of them is a typing mistake
_HIDDEN_STEP = 512


class RunError(ValueError):
    """An error in a CSV file of published training runs. The message says what to change."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """The settings and measurements of one published training run with offloaded state.

    Attributes:
        async_grads: True if gradients were copied asynchronously. None if the log does not say so,
            as with older builds of DeepSpeed.
        stride: If ``n``, every ``n``-th subgroup was updated on the GPU. 0 if none was.
        accumulation: Micro-batches per iteration: global batch / (micro-batch x data-parallel ranks).
        family: Campaign (a series of runs) that the run belongs to: its source without model sizes.
        measured: Measured milliseconds and GiB by CSV column. Empty if only a prediction is wanted.
        unknown: Names of the CSV fields that were blank and got the usual setting.
        where: File and line of the run, for error messages.
    """

    testbed: str
    params_b: float
    layers: int
    hidden: int
    seq: int
    tp: int
    dp: int
    micro_batch: int
    offload_ratio: float
    subgroup: int
    prefetch: bool
    async_grads: bool | None
    stride: int
    family: str
    measured: dict[str, float] = field(default_factory=dict, compare=False)
    unknown: tuple[str, ...] = ()
    heads: int = 32
    accumulation: int = 1
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Check that the run's model label (such as "13B") agrees with the logged layers and hidden size.

        Raises:
            RunError: If the label is far off. For a smaller difference, `model_of` chooses a hidden size
                that agrees with the label.
        """
        if not self.contradicted:
            return
        logged = not {"layers", "hidden"} & set(self.unknown)
        off = abs(math.log(self.params_b * 1e9 / self.logged_params))
        if (logged and off > math.log(_LABEL_LIMIT)) or not self.labelled_hidden:
            raise RunError(
                f"{self.where or self.model}: params_b must agree with layers, hidden and seq (within a factor of "
                f"{_LABEL_LIMIT:g}), but params_b is {self.params_b:g}, and a model with layers {self.layers}, hidden "
                f"{self.hidden} and seq {self.seq} has {self.logged_params / 1e9:.3g} billion parameters"
            )

    @property
    def ranks_per_node(self) -> int:
        return min(GPUS_PER_NODE, self.dp * self.tp)

    @property
    def nodes(self) -> int:
        return math.ceil(self.dp * self.tp / GPUS_PER_NODE)

    @property
    def logged_params(self) -> float:
        """Return the number of parameters of the whole model, computed from the number of layers and the hidden size
        that the run's log has.
        """
        return 12 * self.layers * self.hidden**2 + (VOCABULARY + self.seq) * self.hidden

    @property
    def contradicted(self) -> bool:
        """Return True if the run's logged layers and hidden size contradict the size in its label, such as "13B"."""
        return abs(self.params_b * 1e9 / self.logged_params - 1) > _LABEL_TOLERANCE

    @property
    def labelled_hidden(self) -> int:
        """Estimate the hidden size of a published run's model from its number of layers and its label, such as 13B."""
        largest = math.sqrt(self.params_b * 1e9 / (12 * self.layers))
        return int(largest) // _HIDDEN_STEP * _HIDDEN_STEP

    @property
    def model(self) -> str:
        return f"{self.params_b:g}B"


def model_of(run: PublishedRun) -> dict[str, Any]:
    """Return the shape of the model that a published run trained, as `workload_from_model` takes it.

    The sources of the values:

    - The launch script that was published with the logs: swiglu, rmsnorm, untied embeddings, no biases, and separate
      key-value heads.
    - Megatron-LM: the matrix products of queries, keys and values are fused into one, and those of the MLP's gate and
      up projections into another one.
    - The defaults of Megatron-DeepSpeed's example script: the MLP size (8/3 of the hidden size) and the four key-value
      heads. They fit the number of parameters that follows from the logged memory of runs on 1 to 16 ranks: 5.90
      billion for the model called 7B, and 11.19 billion for 13B.
    - The log: the number of layers and the hidden size. If they contradict the model's name, such as 13B, the hidden
      size is instead the largest multiple of 512 for which the model has no more parameters than the name says. For
      20B, this is 6144, the hidden size of GPT-NeoX with 64 heads. The logged memory agrees with this size.
    """
    hidden = run.labelled_hidden if run.contradicted else run.hidden
    heads = run.heads if hidden % run.heads == 0 else max(1, hidden // 128)
    kv_heads = KV_HEADS if heads % KV_HEADS == 0 else heads
    return {
        "name": run.model,
        "layers": run.layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "vocabulary": VOCABULARY,
        "ffn": 8 * hidden // 3,
        "fused": True,
    }


def read_runs(path: str | Path, flag: str = "--calibrate", *, blanks: bool = False) -> list[PublishedRun]:
    """Read published training runs from a CSV file with the columns of the repository's published_offload_runs.csv.

    Args:
        flag: Command-line option that named the file, for error messages.
        blanks: True to allow blank fields in the columns of `MAY_BE_BLANK`. `PublishedRun.unknown` then names
            a run's blank fields.

    Raises:
        RunError: If the file is missing, lacks a column or has no row, or if a value is not a number.
    """
    try:
        with Path(path).open(newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunError(f"{flag} must be a readable CSV, but got {path}: {error}") from None
    required = ("testbed", *_NUMBERS, "prefetch", "async_grads", "stride", "source")
    missing = [name for name in required if name not in columns]
    if missing:
        raise RunError(f"{flag} {path} must have the columns {', '.join(required)}, but lacks {missing}")
    if not rows:
        raise RunError(f"{flag} {path} must hold at least one run, but holds none")
    return [_run(row, f"{path}, line {line}", blanks) for line, row in enumerate(rows, start=2)]


def _run(row: dict[str, str], where: str, blanks: bool) -> PublishedRun:
    beyond = row.get(None, ())  # type: ignore[call-overload]  # key under which `csv` puts cells without a column
    if any(cell.strip() for cell in beyond):
        raise RunError(f"{where}: each cell must have a column, but {list(beyond)} have none")
    unknown = [name for name in MAY_BE_BLANK if blanks and _blank(row, name)]
    if "micro_batch" in unknown and not _blank(row, "global_batch"):
        unknown.remove("micro_batch")  # the column is blank if the run does not accumulate
        share = _positive(row, "global_batch", where) / _positive(row, "dp", where)
        row = {**row, "micro_batch": str(share)}
    value = {name: _positive(row, name, where) for name in _NUMBERS if name not in unknown}
    if _blank(row, "testbed"):
        raise RunError(f"{where}: testbed must be named, but got ''")
    value = _usual(value["params_b"]) | value
    prefetch = bool(_switch(row, "prefetch", where))
    if prefetch and blanks and _blank(row, "stride"):
        unknown.append("stride")
    return PublishedRun(
        testbed=row["testbed"].strip(),
        params_b=value["params_b"],
        layers=int(value["layers"]),
        hidden=int(value["hidden"]),
        seq=int(value["seq"]),
        tp=int(value["tp"]),
        dp=int(value["dp"]),
        micro_batch=int(value["micro_batch"]),
        offload_ratio=value["offload_ratio"],
        subgroup=int(value["subgroup"]),
        prefetch=prefetch,
        async_grads=_switch(row, "async_grads", where),
        stride=_stride(row, where, prefetch),
        family=family_of(row["source"] or ""),
        measured=_measured(row, where),
        unknown=tuple(unknown),
        heads=_heads(row, where, int(value["hidden"])),
        accumulation=_accumulation(row, where, int(value["micro_batch"]), int(value["dp"])),
        where=where,
    )


def _switch(row: dict[str, str], name: str, where: str) -> bool | None:
    # None if an older DeepSpeed did not log the setting.
    if _blank(row, name):
        return None
    value = _number(row, name, where)
    if value not in (0, 1):
        raise RunError(f"{where}: {name} must be 0, 1 or blank, but got {row[name]!r}")
    return value == 1


def _stride(row: dict[str, str], where: str, prefetch: bool) -> int:
    stride = _number(row, "stride", where, USUAL["stride"])
    if stride != int(stride) or stride < int(prefetch):
        raise RunError(
            f"{where}: stride must be a whole number >= {int(prefetch)} if prefetch is {int(prefetch)}, but got "
            f"{row['stride']!r}. With prefetch 1, every stride-th subgroup is updated on the GPU"
        )
    return int(stride) if prefetch else 0


def _heads(row: dict[str, str], where: str, hidden: int) -> int:
    if "heads" not in row:
        return 32
    if _blank(row, "heads"):
        return max(1, hidden // 128)
    heads = int(_positive(row, "heads", where))
    if not _blank(row, "hidden") and hidden % heads:
        raise RunError(f"{where}: heads must divide hidden ({hidden}), but got {heads}")
    return heads


def _usual(params_b: float) -> dict[str, float]:
    # Settings get the value that most published runs have. The number of layers is that of the known model nearest to
    # ``params_b`` billion parameters, and the hidden size is chosen so that the model has about ``params_b`` billion
    # parameters.
    label = min(SHAPES, key=lambda known: abs(math.log(known / params_b)))
    layers, hidden = SHAPES[label]
    if abs(params_b / label - 1) > _LABEL_TOLERANCE:
        hidden = max(512, int(hidden * math.sqrt(params_b / label)) // 512 * 512)
    return {**USUAL, "layers": float(layers), "hidden": float(hidden)}


def _accumulation(row: dict[str, str], where: str, micro_batch: int, dp: int) -> int:
    if _blank(row, "global_batch"):
        return 1
    batch = int(_positive(row, "global_batch", where))
    if batch % (micro_batch * dp):
        raise RunError(
            f"{where}: global_batch must be a multiple of micro_batch x dp ({micro_batch} x {dp}), but got {batch}"
        )
    return batch // (micro_batch * dp)


def _blank(row: dict[str, str], name: str) -> bool:
    return not (row.get(name) or "").strip()


def _positive(row: dict[str, str], name: str, where: str) -> float:
    value = _number(row, name, where)
    if name == "offload_ratio":
        if not 0 <= value <= 1:
            raise RunError(f"{where}: {name} must lie in [0, 1], but got {row[name]!r}")
        return value
    if not value > 0:
        raise RunError(f"{where}: {name} must be > 0, but got {row[name]!r}")
    if name != "params_b" and value != int(value):
        raise RunError(f"{where}: {name} must be a whole number, but got {row[name]!r}")
    return value


def _measured(row: dict[str, str], where: str) -> dict[str, float]:
    result: dict[str, float] = {}
    for name in (*MEASURED, *MEMORY):
        if (row.get(name) or "").strip():
            result[name] = _number(row, name, where)
            if result[name] <= 0:
                raise RunError(f"{where}: {name} must be > 0, but got {row[name]!r}")
    return result


def _number(row: dict[str, str], name: str, where: str, default: float | None = None) -> float:
    text = (row[name] or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RunError(f"{where}: {name} must be a finite number, but got {text!r}")
    return value


def family_of(source: str) -> str:
    """Return the name of the campaign (series of runs) that a published run belongs to: its source without model sizes.

    ``act-output-13B-scale-DP`` and ``act-output-7B-scale-DP`` belong to the same campaign.
    """
    bare = re.sub(r"act-output-?|(?<![\w.])\d+(\.\d+)?B-?", "", source)
    return bare.strip("/-") or source


def testbeds(runs: Sequence[PublishedRun]) -> list[str]:
    return sorted({run.testbed for run in runs})

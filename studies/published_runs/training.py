"""Published training runs of many kinds, read from a CSV file and predicted from presets.

A run is predicted as its user could have done before training. The rows are in
studies/data/published_training_runs.csv, each with its source. Half of the rows of each source are
held out, which means that no constant of a preset was fitted on them.
"""

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbtide.simulator import Machine, Workload, build_strategy, preset, workload_from_model
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.offloading import offloading
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.schedule import Schedule
from ebbtide.tuner.calibrate.interval import workload_interval_s

ROWS = Path(__file__).parents[1] / "data" / "published_training_runs.csv"
# The share of every GPU's peak that was assumed before shares were fitted to published runs: Megatron-LM (Narayanan et
# al., SC 2021).
ONE_SHARE = 0.57
# Assumed DeepSpeed version of a run that does not give it. Nearly all published runs are older than the next version
# (0.19.5 of August 2026), which copies gradients in another way.
UNTOLD_VERSION = "0.19.4"
# Memory that PyTorch's allocator holds, divided by the memory it has allocated, for sources that publish the memory in
# use on the whole GPU: it holds cached blocks of other sizes. Found on the fitted rows of this kind (three of Qwen:
# 1.24, 1.24, 1.33). With expandable segments, which torchtitan uses, the allocator holds no more than is allocated.
ALLOCATOR_SLACK = 1.24
INFERRED = "?"  # after a cell that was not published, but inferred from the rows of its source that are not held out
# Keys of DeepSpeed whose "auto" Hugging Face's integration replaces by a number that depends on the model.
_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
# All families of runs. A family without a run is shown too.
SUPERCHIPS = ("gh200", "gh200-x4")
FAMILIES = ("a100", "h100", "consumer_one", "consumer_several", "superchip", "offloaded", "experts")
_MIXTURE = ("head_size", "experts", "experts_per_token")
_MODEL = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")


@dataclass(frozen=True)
class TrainingRun:
    """One published training run, read from a row of a CSV file.

    Attributes:
        measured_s: Seconds of one iteration: all micro-batches and the optimizer step.
        measured_gib: Memory in use on one GPU, in GiB. None if it was not published.
    """

    fields: Mapping[str, str]
    measured_s: float
    measured_gib: float | None

    @property
    def family(self) -> str:
        """Return the family of the training run.

        The family is ``experts`` for a mixture-of-experts model, ``superchip`` for a GPU with a coherent link to its
        host, and ``offloaded`` if the run offloads optimizer state or parameters. Otherwise it is the run's kind of
        GPU: ``a100``, ``h100``, or ``consumer_one`` and ``consumer_several`` by the number of cards.
        """
        if self.fields.get("experts"):
            return "experts"
        if self.fields["preset"] in SUPERCHIPS:
            return "superchip"
        if self.fields["family"] != "consumer":
            return self.fields["family"]
        return "consumer_one" if self.number("gpus") == 1 else "consumer_several"

    @property
    def held_out(self) -> bool:
        """Return True if the training run is held out: no constant of a preset was fitted on it."""
        return self.fields["held_out"] == "1"

    def number(self, name: str) -> int:
        """Return the cell of the training run's row in column ``name`` as a whole number."""
        return int(self.fields[name])

    @property
    def model(self) -> dict[str, Any]:
        """Return the shape of the model that the published run trained, as a mapping for `workload_from_model`."""
        numbers = {name: self.number(name) for name in _MODEL}
        flags = {name: self.fields[name] == "1" for name in ("gated", "tied") if self.fields[name]}
        more = {name: int(self.fields[name]) for name in _MIXTURE if self.fields.get(name)}
        layout = {"layout": self.fields["layout"]} if self.fields.get("layout") else {}
        return {"name": self.fields["model"], **numbers, **flags, **more, **layout}

    @property
    def as_published(self) -> "TrainingRun":
        """Return this training run with only the published values of its CSV row."""
        told = {name: "" if cell.endswith(INFERRED) else cell for name, cell in self.fields.items() if name != "note"}
        return replace(self, fields={**self.fields, **told})

    @property
    def config(self) -> dict[str, Any]:
        """Return a DeepSpeed config with the settings of the training run, such as ZeRO stage and offloading."""
        zero: dict[str, Any] = {"stage": self.number("zero_stage")}
        if buckets := (self.fields.get("buckets") or "").removesuffix(INFERRED):
            zero |= dict.fromkeys(_BUCKETS, buckets)
        host: dict[str, Any] = {"device": "cpu"}
        if self.fields["pinned"]:  # blank: the default of the DeepSpeed version
            host["pin_memory"] = self.fields["pinned"] == "1"
        if self.fields["offload"] != "none":
            zero["offload_optimizer"] = host
        if self.fields["offload"] == "parameters":
            zero["offload_param"] = host
        if overlaps := self.fields.get("overlap"):
            zero["overlap_comm"] = overlaps == "1"
        config: dict[str, Any] = {self.fields["precision"]: {"enabled": True}, "zero_optimization": zero}
        if self.fields.get("optimizer") == "torch":
            config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
        return config

    @property
    def recomputation(self) -> dict[str, Any]:
        """Return the keyword arguments of `workload_from_model` that describe the activation recomputation of this
        published run.

        The column ``recompute`` of the run's CSV row is ``full``, ``selective``, ``none``, or the fraction of each
        layer's forward that is computed again.
        """
        cell = self.fields["recompute"]
        if cell[0].isdigit():
            return {"activation_checkpointing": "full", "recompute_share": float(cell)}
        return {"activation_checkpointing": cell}

    def machine(self) -> Machine:
        """Return the preset machine for the hardware of the published training run.

        If the run had more GPUs than the preset's node, and the preset has no network, all GPUs are put into one node.
        """
        machine, gpus = preset(self.fields["preset"]), self.number("gpus")
        if gpus > machine.gpus_per_node and machine.network_bytes_per_s is None:
            return machine.model_copy(update={"gpus_per_node": gpus})
        return machine

    def workload(self, machine: Machine) -> Workload:
        """Estimate the training run's workload on a machine from its settings, without measurements."""
        return workload_from_model(
            self.model,
            machine,
            self.config,
            sequence=self.number("sequence"),
            micro_batch=self.number("micro_batch"),
            gradient_accumulation_steps=self.number("accumulation"),
            data_parallel=self.number("gpus") // self.number("tensor_parallel"),
            tensor_parallel=self.number("tensor_parallel"),
            **self.recomputation,
            flash_attention=self.fields["flash"] != "0",
            flash_version=int(self.fields["flash"][2:]) if self.fields["flash"].startswith("fa") else None,
            kernels=self.fields["kernels"],
            fused_loss=self.fields["loss"] == "fused",
            launcher=self.fields["launcher"],
        )

    def schedule(self, machine: Machine) -> Schedule:
        """Return the ops of one iteration of the training run, in the form that the simulator takes."""
        # The run's DeepSpeed config selects the strategy.
        return self.built(self.workload(machine))

    def built(self, workload: Workload) -> Schedule:
        """Return the ops of one iteration of the training run for a workload of it."""
        moved = offloading(self.config, self.fields.get("deepspeed") or UNTOLD_VERSION)
        name, options = moved.strategy(self.number("zero_stage"))
        return build_strategy(name, workload, iterations=1, **options)


@dataclass(frozen=True)
class RunPrediction:
    """The predicted time and memory of one published training run.

    Attributes:
        seconds: Predicted seconds of an iteration.
        low_s, high_s: Ends of the interval that is expected to hold the iteration times of nine runs in ten.
        one_share_s: Seconds by a simpler prediction, in which every GPU reaches the same fraction of its data sheet's
            FLOP/s.
        gib: Peak of GPU memory in GiB. If the published number is the memory of the whole GPU, ``gib`` includes memory
            outside of PyTorch's allocator, and memory that the allocator holds unused (`ALLOCATOR_SLACK`).
        told_gib: Peak of GPU memory, predicted as ``gib`` is, but only from settings that the run's source publishes.
            Settings that had to be inferred are left out. None: equal to ``gib``.
        bare_gib: ``told_gib`` without the memory that the allocator holds unused. None: equal to ``told_gib``.
    """

    seconds: float
    low_s: float
    high_s: float
    one_share_s: float
    gib: float
    told_gib: float | None = None
    bare_gib: float | None = None


def read_training_runs(path: Path = ROWS) -> list[TrainingRun]:
    """Read published training runs from a CSV file, and return a list with a run per row."""
    with path.open(newline="") as file:
        return [
            TrainingRun(row, float(row["s_per_iteration"]), float(row["memory_gib"]) if row["memory_gib"] else None)
            for row in csv.DictReader(file)
        ]


def predict_training(run: TrainingRun) -> RunPrediction:
    """Predict the time and memory of a published training run from its preset machine and its settings."""
    machine = run.machine()
    result, published = simulate_fast(run.schedule(machine), machine), run.as_published
    told = result if published == run else simulate_fast(published.schedule(machine), machine)
    low_s, high_s = workload_interval_s(run.built, run.workload(machine), machine)
    return RunPrediction(
        result.iteration_s,
        low_s,
        high_s,
        _one_share_s(run, machine),
        _gib(run, result.device_peak_bytes),
        _gib(published, told.device_peak_bytes),
        _gib(published, told.device_peak_bytes, slack=1.0),
    )


def _gib(run: TrainingRun, peak_bytes: int, slack: float = ALLOCATOR_SLACK) -> float:
    if run.fields["memory_kind"] == "device":
        return (slack * peak_bytes + run.machine().device_reserved_bytes) / GIB
    return peak_bytes / GIB


def _one_share_s(run: TrainingRun, machine: Machine) -> float:
    rate = Quantity.exact(ONE_SHARE * _sheet_flops(machine.device_name))
    former = machine.model_copy(update={"device_flops_per_s": rate, "attention_flops_per_s": rate})
    return simulate_fast(run.schedule(former), former).iteration_s


@functools.cache
def _sheet_flops(device_name: str) -> float:
    from ebbtide.simulator.estimates.presets import sheet_limits

    return sheet_limits(device_name)["device_flops_per_s"]

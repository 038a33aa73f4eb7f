"""The measurement of training configurations: a user's training command is run in each of them for some steps."""

import difflib
import json
import platform
import re
import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from ebbtide.simulator.estimates.deepspeed_keys import read_file
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.page import DEEPSPEED_CONFIG, kind_of, versions
from ebbtide.simulator.rules import RuleError
from ebbtide.tuner.answer.instructions import emitted_config
from ebbtide.tuner.configurations.evaluation import ConfigurationOutcome, SearchQuestion
from ebbtide.tuner.configurations.space import KNOBS, Configuration
from ebbtide.tuner.watched import TOO_LONG, ended, tail

STEPS = 12
WARM_UP = 4  # DeepSpeed records its trace in the first two steps, and the allocators need two more to settle
LIMIT_S = 1800.0
_PLACE = re.compile(r"\{(\w+)\}")
_OUT_OF_MEMORY = {
    "device": re.compile(r"^.*(?:OutOfMemoryError:|CUDA out of memory|CUDA error: out of memory).*$", re.MULTILINE),
    "host": re.compile(r"^.*(?:can't allocate memory|\bMemoryError\b|Cannot allocate memory).*$", re.MULTILINE),
}
_KILLED = re.compile(r"exitcode *: *-9\b|Signal 9 \(SIGKILL\)|return code = -9\b")


@dataclass(frozen=True)
class Measurement:
    """The measured time and memory of a training configuration on this machine, beside what was predicted.

    Attributes:
        seconds: Times of the measured steps, without the warm-up.
        device_peak_bytes: 0 without a GPU.
        tokens_per_sample: Mean of what the script trained with. None if unknown.
        why_not: The reason that nothing was measured, otherwise empty.
        lacks: ``device`` or ``host`` if that reason is a lack of this memory, otherwise empty.
        output: Last lines of the command's output, if it failed.
        held: True if it was measured in an earlier search.
    """

    outcome: ConfigurationOutcome
    seconds: tuple[float, ...] = ()
    device_peak_bytes: int = 0
    tokens_per_sample: float | None = None
    why_not: str = ""
    lacks: str = ""
    device: str = ""
    output: str = field(default="", compare=False)
    held: bool = False

    @property
    def out_of_memory(self) -> bool:
        return bool(self.lacks)

    def rules_out(self, outcome: ConfigurationOutcome) -> bool:
        """Return whether another configuration is predicted to take as much of the memory that this one lacked."""
        name = f"{self.lacks}_peak_bytes"
        return self.out_of_memory and getattr(outcome, name) >= getattr(self.outcome, name)

    @property
    def measured_s(self) -> float:
        """Return the median time of a step, or 0 if nothing was measured."""
        return statistics.median(self.seconds) if self.seconds else 0.0

    @property
    def ratio(self) -> float:
        """Return the measured time divided by the predicted one, or 0 if nothing was measured."""
        return self.measured_s / self.outcome.iteration_s

    @property
    def sentence(self) -> str:
        """Return what was measured as one line of text."""
        again = "measured in an earlier search: " if self.held else ""
        if self.why_not:
            return f"{again}not measured: {self.why_not}"
        return f"{again}{self.measured_s:.3g} s a step, {self.ratio:.2f} times the prediction"

    @property
    def tokens_per_s(self) -> float:
        return self._speed(self.measured_s) if self.seconds else 0.0

    @property
    def slowest_speed(self) -> float:
        """Return the tokens per second of a slow step: three steps in four are faster."""
        return self._speed(_quartiles(self.seconds)[2])

    @property
    def quickest_speed(self) -> float:
        """Return the tokens per second of a quick step: three steps in four are slower."""
        return self._speed(_quartiles(self.seconds)[0])

    def _speed(self, seconds: float) -> float:
        return self.outcome.tokens_per_s * self.outcome.iteration_s / seconds


def _quartiles(seconds: Sequence[float]) -> list[float]:
    return statistics.quantiles([*seconds, *seconds], n=4)  # twice, because one value has none


def places(command: Sequence[str]) -> set[str]:
    """Return the settings that a training command has a place for, such as ``{micro_batch}``.

    Raises:
        RuleError: A place is nearly the name of a setting.
    """
    named = {name for word in command for name in _PLACE.findall(word)}
    for name in sorted(named - {*KNOBS}):
        if near := difflib.get_close_matches(name, KNOBS, 1, 0.8):
            raise RuleError(
                f"the places in the command must be some of {', '.join(f'{{{knob}}}' for knob in KNOBS)}, but got "
                f"{{{name}}}. Did you mean {{{near[0]}}}?",
                key="command",
            )
    return named & {*KNOBS}


def filled(command: Sequence[str], c: Configuration) -> list[str]:
    """Return the words of a training command with the settings of a configuration in their places."""
    values = {name: _word(value) for name, value in asdict(c).items()}
    return [_PLACE.sub(lambda place: values.get(place[1], place[0]), word) for word in command]


def with_config(command: Sequence[str], wanted: Mapping[str, Any], folder: Path) -> list[str]:
    """Return a training command with a changed copy of each DeepSpeed config that it names.

    The training process changes the config that it gets anyway. The copy is for scripts that read it themselves, such
    as the micro-batch for their data.
    """
    from ebbtide.runtime.frontdoor.configured import configured

    words = list(command)
    for number, (path, config) in _configs(command).items():
        copy = folder / str(number) / Path(path).name
        copy.parent.mkdir()
        copy.write_text(json.dumps(configured(config, wanted)), encoding="utf-8")
        words[number] = f"{command[number].removesuffix(path)}{copy}"
    return words


def _configs(command: Sequence[str]) -> dict[int, tuple[str, dict[str, Any]]]:
    found = {}
    for number, word in enumerate(command):
        path = word.rpartition("=")[2]
        try:
            config = read_file(path) if Path(path).is_file() and path.endswith(".json") else {}
        except ModelError:
            continue
        if kind_of(config) == DEEPSPEED_CONFIG:
            found[number] = path, config
    return found


def config_of(
    question: SearchQuestion, outcome: ConfigurationOutcome, plan_file: Path, command: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the DeepSpeed config of a configuration: that of a command, or of the search, with the configuration in
    it. Its plan, if there is one, is written to a file.
    """
    from ebbtide.runtime.frontdoor.configured import KEY, configured

    made = dict(outcome.deepspeed)
    if outcome.plan is not None:
        outcome.plan.save(plan_file)
        work = question.workload(outcome.configuration)
        made = emitted_config(outcome.plan, str(plan_file), made, work.wire_dtype, work.zero_stage)
    named = next((config for _, config in _configs(command).values()), None)
    if named is None:  # without this key, the Trainer would not clip
        return made if question.ds_config else {"gradient_clipping": "auto", **made}
    own = {name: value for name, value in (named.get(KEY) or {}).items() if name != "plan"}
    made = configured(named, made)
    return {**made, KEY: {**own, **made[KEY]}} if KEY in made else made


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def measure(
    question: SearchQuestion, outcome: ConfigurationOutcome, command: Sequence[str], limit_s: float = LIMIT_S
) -> Measurement:
    """Run a training command in a configuration for some steps, and return the measured times.

    A command that fails, or trains in another configuration, gives the reason instead.
    """
    c = outcome.configuration
    with tempfile.TemporaryDirectory(prefix="ebbtide-measure-") as scratch:
        folder = Path(scratch)
        job = {
            "folder": scratch,
            "steps": STEPS,
            "warm_up": WARM_UP,
            "deepspeed": config_of(question, outcome, folder / "plan.json"),
            "precision": question.workload(c).wire_dtype,
            "parameters": question.job.architecture.elements,
            "sequence": question.sequence,
            **{name: getattr(c, name) for name in ("gpus", "micro_batch", "accumulation", "recompute")},
        }
        asked = {"EBBTIDE_MEASURE": json.dumps(job)}
        words = with_config(filled(command, c), job["deepspeed"], folder)
        code, text = ended(words, folder, asked, limit_s=limit_s)
        ranks = [_lines(path) for path in sorted(folder.glob("rank*.jsonl"))]
    return _read(outcome, ranks, code, text, limit_s)


def _lines(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    whole = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {name: value for line in whole for name, value in line.items()}


def _read(
    outcome: ConfigurationOutcome, ranks: Sequence[Mapping[str, Any]], code: int | None, text: str, limit_s: float
) -> Measurement:
    device = next((rank["device"] for rank in ranks if "device" in rank), "")
    done = [rank for rank in ranks if rank.get("seconds")]
    if done and len(done) == outcome.configuration.gpus:
        slowest = max(done, key=lambda rank: statistics.median(rank["seconds"]))
        return Measurement(
            outcome,
            tuple(slowest["seconds"]),
            max(rank["device_peak_bytes"] for rank in done),
            done[0]["tokens"],
            device=device,
        )
    refused = next((rank["refused"] for rank in ranks if "refused" in rank), None)
    why, lacks = (_other(refused), "") if refused else _failure(ranks, code, text, limit_s)
    return Measurement(outcome, why_not=why, lacks=lacks, device=device, output="" if refused else tail(text))


def _failure(ranks: Sequence[Mapping[str, Any]], code: int | None, text: str, limit_s: float) -> tuple[str, str]:
    steps = min((rank.get("step", 0) for rank in ranks), default=0)
    if code is TOO_LONG:
        return f"took {steps} of {STEPS} steps in {limit_s:.0f} s (--measure-timeout)", ""
    if code:
        for memory, words in _OUT_OF_MEMORY.items():
            if lacking := words.findall(text):
                return f"ran out of memory after {steps} steps: {lacking[-1].strip()[:300]}", memory
        if code in (-9, 137) or _KILLED.search(text):
            return f"was killed after {steps} steps. The system kills a process when host memory runs out", "host"
    if not ranks and not code:
        return "ended without a DeepSpeed engine that trains", ""
    if not code:
        return f"ended after {steps} of {STEPS} steps. Give the script enough steps to train", ""
    return f"failed with exit code {code} after {steps} steps: {_last(text)}", ""


def _last(text: str) -> str:
    errors = [line.strip() for line in text.splitlines() if re.search(r"\w*(Error|Exception)\b:? ", line)]
    lines = errors or [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\[rank\d+\]:\s*", "", lines[-1])[:300] if lines else "it printed nothing"


def _other(refused: Mapping[str, Any]) -> str:
    name, wanted, real = refused["setting"], refused["wanted"], refused["real"]
    if name in _INSTEAD:
        does = "recomputes" if real else "keeps"
        return _INSTEAD[name].format(wanted=wanted, real=real, does=does)
    flag = f", or search with --{name.replace('_', '-')} {real}" if name in _FLAGS else ""
    return (
        f"the script must train with {name} {wanted}, but has {real} ({refused['what']}). Write {{{name}}} for it in "
        f"the command, let the script read it from DeepSpeed's config{flag}"
    )


_FLAGS = ("micro_batch", "accumulation", "zero_stage")
_INSTEAD = {
    "gpus": "the command must start {wanted} ranks, but starts {real}. Search with --gpus {real}, or write {{gpus}} "
    "for the number in the command",
    "precision": "the script must train in {wanted}, but trains in {real}. Give its config to the search (--ds-config)",
    "parameters": "the script must train the model of --model, with {wanted:,} parameters, but its model has {real:,}",
    "recompute": "the script {does} activations, which is another configuration. Write {{recompute}} (true or false) "
    "in the command, or search for what the script does: with or without --keep-activations",
    "plan": "the plan must be in force, but DeepSpeed trains alone. `tune run` says why",
}


def key_of(command: Sequence[str]) -> dict[str, Any]:
    """Return what a measurement depends on beside its configuration: the command, its files and the machine."""
    from ebbtide.runtime.hardware.cores import cpu_name
    from ebbtide.runtime.hardware.usable import usable

    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    files = {word: sha256(Path(word).read_bytes()).hexdigest()[:16] for word in command if _is_script(word)}
    return {
        "command": shlex.join(command),
        "files": files,
        "machine": [platform.node(), cpu_name(), usable().cores, *(_gpu(path) for path in gpus)],
        **versions("deepspeed", "torch", "ebbtide"),
    }


def _is_script(word: str) -> bool:
    path = Path(word)
    return path.suffix in (".py", ".json", ".sh", ".yaml", ".yml") and path.is_file()


def _gpu(path: Path) -> str:
    found = re.search(r"^Model:\s*(.+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return found[1] if found else ""

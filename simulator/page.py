"""The base class of plans, profiles and other pydantic models that are stored as one JSON file, and functions for what
such files record: hashes, and versions of installed packages.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ebbtide.simulator.rules import RuleError, checked, explain
from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _OfModels
else:
    _OfModels = type(BaseModel)

DEEPSPEED_CONFIG, MODEL_CONFIG = "a DeepSpeed config", "a model's config"
# Keys that occur together only in files of this kind.
_OWN_FILES = {
    "a machine file": {"device_kind", "host_memory_bytes"},
    "a workload file": {"layers", "subgroups"},
    "a plan file": {"subgroup_size", "subgroups"},
    "a trace file": {"traceEvents"},
}
_DEEPSPEED = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
}
_FORMER = frozenset(
    {
        *("construct", "copy", "dict", "from_orm", "json", "parse_file", "parse_obj", "parse_raw", "schema"),
        *("schema_json", "update_forward_refs", "validate", "__fields__", "__fields_set__"),
    }
)
# Keys for the number of layers and the hidden size in models' configs.
LAYERS = ("num_hidden_layers", "n_layer", "layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "hidden")


class _Meta(_OfModels):
    """The class of `Page`, which hides the names of pydantic's former version from Tab."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _FORMER]


class Page(BaseModel, metaclass=_Meta):
    """A frozen pydantic model that is stored as one JSON file. It refuses unknown fields and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    _error: ClassVar[type[RuleError]] = RuleError  # raised for a file that cannot be used

    def __dir__(self) -> list[str]:
        """Return the names that Tab completes: those of pydantic's former version, which warn, are left out."""
        return [name for name in super().__dir__() if name not in _FORMER]

    def save(self, path: str | Path) -> None:
        """Write the JSON file, such that no reader ever sees it half-written."""
        write_whole(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    @checked
    def load(cls, path: str | Path) -> Self:
        """Read a plan, profile or other pydantic model from its JSON file.

        Raises:
            RuleError: The file cannot be read, is of another kind, has an unknown field, was written by a newer
                version, or breaks a rule.
        """
        name = cls.__name__.lower()
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise cls._error(f"{name} must be a readable JSON file, but got {path}: {error}") from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            kind = _kind(text)
            why = explain(error, model=cls) if kind in ("", f"a {name} file") else f"it is {kind}"
            raise cls._error(f"{path} is not a {name} this ebbtide can use: {why}") from None


def kind_of(document: Mapping[str, Any]) -> str:
    """Return which kind of file a JSON object comes from, such as ``"a plan file"``. Empty if it is none of ebbtide's
    inputs.
    """
    for kind, keys in _OWN_FILES.items():
        if keys <= document.keys():
            return kind
    if "model_type" in document or all(any(n in document for n in names) for names in (LAYERS, HIDDEN)):
        return MODEL_CONFIG
    return "" if _DEEPSPEED.isdisjoint(document) else DEEPSPEED_CONFIG


def _kind(text: str) -> str:
    try:
        document = json.loads(text)
    except ValueError:
        return ""
    return kind_of(document) if isinstance(document, dict) else ""


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file such that no reader ever sees it half-written: a new file is written, then renamed.

    If the path is a symbolic link, the link stays, and its target is replaced. A target that is not a regular
    file, such as a pipe or a terminal (``/dev/stdout``), is written to directly.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        _write(path, content)
        return
    path = path.resolve()
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        _write(temporary, content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)  # the partial file would take space on a disk that is already full
        # The error names the file that the caller asked for, not the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write(path: Path, content: str | bytes) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8")


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return a hash of a dict of JSON values as 16 characters. The order of the keys has no influence."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@cache
def versions(*packages: str) -> dict[str, str]:
    """Return a dict from each of the given packages to its installed version. Packages that are not installed are
    left out.
    """
    result: dict[str, str] = {}
    for package in packages:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result

"""The loading of checkpoint files: in parallel, without executing code, and into existing tensors if possible."""

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.memory import view_at
from ebbtide.runtime.checkpoint.format.plain_data import (
    ON_STORAGE,
    of_the_kind,
    plain_classes,
    replace_tensors,
    tensors_of,
)

CHUNK_BYTES = 16 * 2**20
READERS = 4  # threads that read one file


@contextlib.contextmanager
def safe_globals() -> Iterator[None]:
    """Allow ``torch.load(weights_only=True)`` to read DeepSpeed's own files and plain data in the ``with`` block."""
    # When torch's context ends, it forbids all classes that were passed to it, even those that were allowed before.
    allowed = torch.serialization.get_safe_globals()
    missing = [c for c in plain_classes() if c not in allowed]
    with torch.serialization.safe_globals(missing):
        yield


@contextlib.contextmanager
def only_weights() -> Iterator[None]:
    """Make every ``torch.load``, also in DeepSpeed's code, use ``weights_only=True`` inside the ``with`` block."""
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    forced_off = os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with safe_globals():
            yield
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before
        if forced_off is not None:
            os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = forced_off


def load_file(path: str | Path, into: dict[tuple[Any, ...], torch.Tensor] | None = None) -> Any:
    """Return what ``torch.load(path, map_location="cpu", weights_only=True)`` returns, but read with several threads.

    Args:
        into: Existing tensors to read into, by their path in the file's nested dicts and lists (see `tree.tensors_of`).
            They are part of the result, so that host memory holds no second copy of them.

    Raises:
        CheckpointError: The file cannot be read, or holds objects other than tensors and plain data.
    """
    try:
        with only_weights():
            return _load(Path(path), into or {})
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        refused = refused_names(path)
        why = f"it holds {refused}" if refused else _gist(error)
        raise CheckpointError(
            f"{path} must hold tensors and plain data only, readable by torch.load(weights_only=True), but {why}. "
            "If you trust the file, allow your own classes in client_state with "
            "torch.serialization.add_safe_globals"
        ) from error


def refused_names(path: str | Path | io.BytesIO) -> str:
    """Return the names, in one string, of what loading would refuse in a checkpoint's file. Empty if nothing."""
    with contextlib.suppress(Exception), only_weights():  # a damaged file has no names
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(_from_the_start(path))))
    return ""


def unreadable(path: str | io.BytesIO) -> str:
    """Return the reason why loading would refuse a checkpoint's file, or an empty string."""
    names = refused_names(path)
    if names:
        return names
    try:
        # Read no tensors. A FakeTensorMode would import torch's compiler, which takes over a second.
        with only_weights(), torch.serialization.skip_data():
            torch.load(_from_the_start(path), map_location="meta", weights_only=True)
    # Loading creates this tensor in host memory, which torch supports, for example a nested tensor.
    except NotImplementedError:
        return ""
    except Exception as error:  # loading would fail with any of these errors
        return _gist(error)
    return ""


def _from_the_start(path: str | Path | io.BytesIO) -> str | io.BytesIO:
    if not isinstance(path, io.BytesIO):
        return str(path)
    path.seek(0)
    return path


def _gist(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "WeightsUnpickler error" in line or "Can only" in line]
    return (telling or lines or [type(error).__name__])[-1].rstrip(".")


def _load(path: Path, into: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    try:
        return _load_in_parallel(path, into)
    except CheckpointError:
        raise
    except Exception:  # a FakeTensorMode cannot create all tensors, for example no compressed sparse ones
        tree = torch.load(path, map_location="cpu", weights_only=True)
        if any(t.device.type == "meta" for _, t in tensors_of(tree)):  # the tensor is on a drive, not in the file
            raise
        return tree


def _load_in_parallel(path: Path, into: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        tree = torch.load(path, map_location="cpu", weights_only=True)
    held_elsewhere = {id(t): (w, t) for w, t in tensors_of(tree) if t.device.type == "meta"}
    fakes = [(w, t) for w, t in tensors_of(tree) if id(t) not in held_elsewhere]
    if _legacy(fakes) or _hides_tensors(path, fakes):
        return torch.load(path, map_location="cpu", weights_only=True)
    if held_elsewhere:
        tree.pop(ON_STORAGE, None)
    reader = _TensorReader(path)
    real = {key: _elsewhere(path, *one, into) for key, one in held_elsewhere.items()}
    for where, fake in fakes:
        if isinstance(fake, FakeTensor):
            target = into.get(where)
            read = reader.tensor(fake, target)
            real[id(fake)] = read if read is target else of_the_kind(fake, read)
    reader.read()
    return replace_tensors(tree, lambda t: real.get(id(t), t))


def _elsewhere(
    path: Path, where: tuple[Any, ...], shape: Any, into: dict[tuple[Any, ...], torch.Tensor]
) -> torch.Tensor:
    found = into.get(where)
    if found is None or found.shape != shape.shape:
        raise CheckpointError(
            f"{path} must be loaded by an engine with a plan, because {where} is on a drive and "
            "not in the file: use ebbtide.initialize with the plan that wrote it, or export the "
            "checkpoint (`tune checkpoint export`)"
        )
    return of_the_kind(shape, found)


def _legacy(fakes: list[tuple[tuple[Any, ...], Any]]) -> bool:
    return any(getattr(t.untyped_storage(), "_checkpoint_offset", None) is None for _, t in fakes)


def _hides_tensors(path: Path, fakes: list[tuple[tuple[Any, ...], Any]]) -> bool:
    records = torch._C.PyTorchFileReader(str(path)).get_all_records()  # type: ignore[attr-defined]
    known = {t.untyped_storage()._checkpoint_offset for _, t in fakes}
    return sum(name.startswith("data/") for name in records) > len(known)


class _TensorReader:
    """A reader of a checkpoint file that first collects the tensors to read, then reads them with several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._storages: dict[int, torch.UntypedStorage] = {}  # keyed by file offset
        self._chunks: list[tuple[torch.Tensor, int]] = []  # (bytes to fill, file offset)

    def tensor(self, fake: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        storage: Any = fake.untyped_storage()
        offset: int = storage._checkpoint_offset
        if _fits(fake, target) and offset not in self._storages:
            assert target is not None
            self._plan(target.detach().view(-1).view(torch.uint8), offset)
            return target
        if offset not in self._storages:
            held = torch.UntypedStorage(storage.nbytes())
            self._storages[offset] = held
            self._plan(torch.empty(0, dtype=torch.uint8).set_(held), offset)
        made = torch.empty(0, dtype=fake.dtype)
        made.set_(self._storages[offset], fake.storage_offset(), fake.shape, fake.stride())
        return made

    def _plan(self, to: torch.Tensor, offset: int) -> None:
        for part in to.split(CHUNK_BYTES) if to.numel() else ():
            self._chunks.append((part, offset))
            offset += part.numel()

    def read(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(lambda chunk: _read_chunk(descriptor, *chunk), self._chunks))
        finally:
            os.close(descriptor)


def _read_chunk(descriptor: int, to: torch.Tensor, offset: int) -> None:
    if not on_host(to):
        passing = torch.empty(to.numel(), dtype=torch.uint8)
        _read_chunk(descriptor, passing, offset)
        to.copy_(passing)
        return
    view = view_at(to.data_ptr(), to.numel())
    end = offset + Files().read_into(descriptor, view, offset)
    if end < offset + len(view):
        raise ValueError(f"the checkpoint file was truncated: it ends at byte {end}, in the middle of a tensor")


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory, so that a checkpoint file can be read directly into the tensor."""
    return tensor.device.type == "cpu"


def _fits(fake: torch.Tensor, target: torch.Tensor | None) -> bool:
    return (
        target is not None
        and target.is_contiguous()
        and fake.is_contiguous()
        and target.dtype == fake.dtype
        and target.shape == fake.shape
        and fake.untyped_storage().nbytes() == target.numel() * target.element_size()
    )

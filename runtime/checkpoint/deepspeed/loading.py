"""The loading of a verified checkpoint into a DeepSpeed engine, directly into the tensors that training uses.

The checkpoint to resume from is the one that DeepSpeed would load. If files of this checkpoint are missing or damaged,
the load fails with an error that names the newest complete checkpoint.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME, RANKS_FOLDER, stored_name
from ebbtide.runtime.checkpoint.format.plain_data import tensors_of
from ebbtide.runtime.checkpoint.format.safe_load import load_file, only_weights
from ebbtide.runtime.checkpoint.live_state import LiveState
from ebbtide.runtime.checkpoint.protocol.folders import (
    Committed,
    being_read,
    committed,
    named_latest,
    recover_replaced,
    siblings,
)
from ebbtide.runtime.checkpoint.protocol.inspect import FileProblem, verify
from ebbtide.runtime.checkpoint.protocol.peers import Peers
from ebbtide.runtime.checkpoint.protocol.rotation import restore_deleted, settle


def random_states() -> dict[str, Any]:
    """Return the states of the random number generators of Python, numpy, torch and every CUDA device, in a dict."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": [version, torch.tensor(internal), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states of random number generators that `random_states` returned.

    The states of CUDA devices that this machine lacks are ignored.
    """
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(  # noqa: NPY002
        (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
    )
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)


def committed_at(candidate: Committed) -> float:
    """Return the Unix time in seconds at which a checkpoint was committed."""
    # These times tell which of two checkpoints in different folders is newer. The checkpoints' numbers cannot tell,
    # because each folder numbers its own checkpoints.
    return candidate.manifest.committed_unix_s


def newest_whole(
    directories: Sequence[Path],
    check: Callable[[Path, str], list[FileProblem]] = verify,
    when: Callable[[Committed], float] = lambda candidate: candidate.manifest.sequence,
) -> Committed | None:
    """Return the newest of several folders' checkpoints that passes verification. ``when`` gives their order."""
    for directory in directories:
        recover_replaced(directory, Files())
    candidates = [found for directory in directories for found in committed(directory)]
    newest_first = sorted(candidates, key=when, reverse=True)
    return next((c for c in newest_first if not check(c.folder.parent, c.folder.name)), None)


class Resumption:
    """The choice of the checkpoint that ``load_checkpoint`` loads, which is the same on all ranks.

    The choice follows the file ``latest``, as DeepSpeed does. Users edit this file to go back, and a save with
    ``save_latest=False`` leaves it unchanged. A damaged checkpoint is an error: an older checkpoint is never
    loaded silently in its place.
    """

    def __init__(self, peers: Peers, stored_problem: Callable[[Path], str] = lambda _: "") -> None:
        self._peers, self._stored_problem = peers, stored_problem
        self._needed: Callable[[str], bool] = lambda _: True

    def choose(self, load_dir: Path, tag: str | None, needed: Callable[[str], bool] = lambda _: True) -> str | None:
        """Return the tag of the checkpoint to load. It is None if the folder has no checkpoint, as in DeepSpeed.

        Args:
            needed: Function that returns whether a file, given by its path in the checkpoint, will be read.

        Raises:
            CheckpointError: The checkpoint is not complete. The message names the newest complete one.
        """
        self._needed = needed
        # Wait for rank 0, which writes `latest` last, after the others have seen the commit. A rank that read the older
        # `latest` would load nothing, and wait forever for the ranks that load.
        self._peers.concat([])
        settle(load_dir)
        restore_deleted(load_dir)
        restore_deleted(load_dir.parent)
        recover_replaced(load_dir, Files())
        if tag is None:
            tag = named_latest(load_dir)
            if tag is None:
                return None
            if not tag:
                raise CheckpointError(
                    f"the file {load_dir / 'latest'} must name the checkpoint to load, but is empty. "
                    f"{self._advice(load_dir)}"
                )
        problem = self._problem(load_dir, tag)
        if problem:
            raise CheckpointError(
                f"the checkpoint to load, {load_dir / tag}, must be whole, but {problem}. {self._advice(load_dir)}"
            )
        return tag

    def _problem(self, load_dir: Path, tag: str) -> str:
        folder = load_dir / tag
        if (folder / GLOBAL_NAME).is_file():
            problems = self._problems(load_dir, tag)
            more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
            return f"{problems[0]}{more}" if problems else ""
        if not folder.is_dir():
            return "there is no such folder"
        if (folder / RANKS_FOLDER).exists():
            return f"it has no file {GLOBAL_NAME}: it was never committed, or was damaged later"
        return ""  # DeepSpeed's own checkpoint, which has no sign that it is complete

    def _problems(self, directory: Path, tag: str) -> list[FileProblem]:
        share = (self._peers.rank, self._peers.world_size)
        problems = verify(directory, tag, share=share, needed=self._needed)
        missing = self._stored_problem(directory / tag)
        if missing:
            problems.append(FileProblem(stored_name(self._peers.rank), missing))
        return self._peers.concat(problems)

    def _advice(self, load_dir: Path) -> str:
        good = newest_whole([load_dir], self._problems)
        if good is None:
            good = newest_whole(siblings(load_dir), self._problems, when=committed_at)
        if good is None:
            return "There is no other whole checkpoint here"
        return (
            f"The newest whole checkpoint: {good.folder} of step {good.manifest.step} "
            f"(load_dir={str(good.folder.parent)!r}, tag={good.folder.name!r})"
        )


_RANK_OF_FILE = re.compile(r"zero_pp_rank_(\d+)_.*optim_states\.pt$")


class Loading:
    """A loader of checkpoints that wraps ``engine.load_checkpoint``. Only the training thread uses it.

    Attributes:
        into: Tensors that a load uses instead of new ones, so that host memory holds no second copy. Weights, and
            optimizer state in host memory, are read from the files into the tensors of the running training. Optimizer
            state that the checkpoint left on a drive is not read: its tensors are memory-mapped from the drive. The key
            of a tensor is its path in the nested dicts of the checkpoint's file. Empty except during a load.
    """

    def __init__(self, engine: Any, live: LiveState, peers: Peers, *, restore_random: bool) -> None:
        self._engine = engine
        self._live = live
        self._rank = peers.rank
        self._resumption = Resumption(peers, self._stored_problem)
        self._restores_random = restore_random
        self.into: dict[tuple[Any, ...], torch.Tensor] = {}

    def load(self, original: Callable[..., Any], load_dir: str, tag: str | None, options: Mapping[str, Any]) -> Any:
        """Verify and load a checkpoint without executing any code from its files.

        The checkpoint is the one that DeepSpeed would load: the given tag, or the tag that the file ``latest`` names. A
        checkpoint written without ebbtide is loaded as DeepSpeed would load it, except that ``weights_only`` is set.

        Raises:
            CheckpointError: The checkpoint is incomplete, damaged, or was never committed. The message names the
                newest checkpoint that can be loaded.
        """
        if self._engine.load_universal_checkpoint():
            with only_weights():
                return original(load_dir, tag=tag, **options)
        directory = Path(load_dir)
        tag = self._resumption.choose(directory, tag, lambda path: not self._passes_over(path, options))
        with only_weights():
            if tag is None or not (directory / tag / GLOBAL_NAME).exists():
                return original(str(directory), tag=tag, **options)
            folder = directory / tag
            with being_read(folder), self._stored(folder, options) as stored, self._masters_for_weights(options):
                self.into = self._targets()
                if options.get("custom_load_fn") is None:
                    self.into |= weights_in_place(self._engine)
                self.into |= stored
                try:
                    result = original(str(directory), tag=tag, **options)
                finally:
                    self.into = {}
                if self._restores_random and (states := folder / random_file(self._rank)).exists():
                    restore_random_states(load_file(states))
                return result

    @contextmanager
    def _stored(self, folder: Path, options: Mapping[str, Any]) -> Iterator[Mapping[tuple[Any, ...], torch.Tensor]]:
        page, stored = self._stored_page(folder), self._live.stored
        if page is None or stored is None:
            yield {}
            return
        whole = options.get("load_optimizer_states", True) and not options.get("load_module_only")
        adopted = stored.adopt(page) if whole else ()
        with stored.read(page, adopted) as tensors:
            yield tensors

    @contextmanager
    def _masters_for_weights(self, options: Mapping[str, Any]) -> Iterator[None]:
        stored = self._live.stored
        if stored is None or options.get("load_optimizer_states", True):
            yield
            return
        from deepspeed.utils import zero_to_fp32

        with ExitStack() as opened:

            def load(path: str, **how: Any) -> Any:
                rank = _RANK_OF_FILE.search(Path(path).name)
                page = Path(path).parent / stored_name(int(rank[1])) if rank else None
                if page is None or not page.exists():
                    return torch.load(path, **how)
                return load_file(path, {**opened.enter_context(stored.read(page.read_bytes(), ()))})

            zero_to_fp32.torch = SimpleNamespace(**{**vars(torch), "load": load})
            try:
                yield
            finally:
                zero_to_fp32.torch = torch

    def _stored_page(self, folder: Path) -> bytes | None:
        path = folder / stored_name(self._rank)
        return path.read_bytes() if path.exists() else None

    def _stored_problem(self, folder: Path) -> str:
        page = self._stored_page(folder)
        if page is None:
            return ""
        if self._live.stored is None:
            return (
                "the optimizer state is on a drive, where only an engine with a plan finds it. Build the "
                "engine with ebbtide.initialize, or export the checkpoint (`tune checkpoint export`)"
            )
        return self._live.stored.problem(page)

    @staticmethod
    def _passes_over(path: str, options: Mapping[str, Any]) -> bool:
        weights = options.get("load_module_only") and options.get("load_optimizer_states", True)
        return bool(weights) and path.endswith("optim_states.pt")

    def _targets(self) -> dict[tuple[Any, ...], torch.Tensor]:
        optimizer = self._engine.optimizer
        if optimizer is None or not self._engine.zero_optimization():
            return {}
        tree = {"optimizer_state_dict": optimizer.state_dict()}
        return {
            path: tensor
            for path, tensor in tensors_of(tree)
            if tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and self._live.runs(tensor.data_ptr(), tensor.numel() * tensor.element_size()) is not None
        }


def weights_in_place(engine: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    """Return the model's weights, so that a checkpoint load can read each stored tensor directly into its weight.

    This saves 2 bytes of host memory per parameter. A key of the returned dict is the place of the tensor in the nested
    dicts of the checkpoint's model file: ``("module", name of the weight)``.

    The dict is empty if loading does more than copy each tensor to one weight. This is so if ZeRO-3 or model
    parallelism divides the weights among ranks, or if a module has state-dict hooks or a loading method of its own.
    """
    if engine.zero_optimization_partition_weights() or getattr(engine, "mp_world_size", 1) != 1:
        return {}
    if not all(_loads_plainly(module) for module in engine.module.modules()):
        return {}
    return {
        ("module", name): tensor
        for name, tensor in engine.module.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }


def _loads_plainly(module: torch.nn.Module) -> bool:
    hooks = (
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
        module._state_dict_hooks,
        module._state_dict_pre_hooks,
    )
    kind = type(module)
    if any(hooks) or kind.load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    stock = kind._load_from_state_dict is torch.nn.Module._load_from_state_dict
    return stock or kind.__module__.startswith("torch.nn.")


def random_file(rank: int) -> str:
    """Return the name of the checkpoint file with a rank's random generator states."""
    # Such a file is needed because below ZeRO-3 DeepSpeed gives every rank the client_state of rank 0.
    return f"random_states_rank{rank:05d}.pt"

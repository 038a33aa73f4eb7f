"""A wrapper of ``deepspeed.initialize``, installed now or when DeepSpeed is imported.

If a DeepSpeed config has the key ``"ebbtide"``, the wrapper lets ebbtide build the engine as this key says. All other
calls go to DeepSpeed unchanged.

Also for engines without the key, three things are made easy: a script that was started without a launcher is the only
rank, DeepSpeed compiles its ops with this environment's ninja and says so, and the first engine that trains without the
key is reported.

This module imports only Python's standard library: under `tune run` every interpreter loads it at startup, and most
interpreters never import DeepSpeed. The package ebbtide is not imported before a config with the key ``"ebbtide"``
appears.
"""

import base64
import functools
import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

KEY = "ebbtide"
# Attribute of a wrapper that holds the wrapped function. Another copy of this file, loaded under another name,
# recognizes its own wrapper by it.
ORIGINAL = "_ebbtide_original"
LEFTOVERS = ".ebbtide"  # the value of `ebbtide.runtime.checkpoint.protocol.rotation.NOTES`
_door, _tells = "", True  # see `enable`


def enable(door: str, *, tells: bool = True) -> None:
    """Make every engine with the key ``"ebbtide"`` in its DeepSpeed config run under the plan given there.

    Call it before or after ``import deepspeed``. Functions that were imported from DeepSpeed earlier stay unmodified.

    Args:
        door: Name of the ebbtide module with the ``initialize`` to call instead. It is imported on first use.
        tells: True to print when an engine trains without the key.
    """
    global _door, _tells
    _door, _tells = door, tells
    if not any(_is_ours(finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name, wrap in _WRAPPED.items():
        if name in sys.modules:
            wrap(sys.modules[name])
    _watch_listings()


@functools.cache  # once, because an audit hook stays until the process ends
def _watch_listings() -> None:
    sys.addaudithook(_before_listing)


def _before_listing(event: str, args: tuple[Any, ...]) -> None:
    if event not in ("os.listdir", "os.scandir") or _listing.busy:
        return
    if getattr(sys.modules.get("ebbtide.runtime.checkpoint.trainers.bystanders"), "watching", False):
        return  # an engine exists, whose hook checks listings itself and ignores its own
    folder = "." if args[0] is None else args[0]
    if not isinstance(folder, (str, os.PathLike)):
        return
    _listing.busy = True
    try:
        if _has_leftovers(folder):
            own("ebbtide.runtime.checkpoint.protocol.rotation").settle_below(Path(folder))
    finally:
        _listing.busy = False


class _Busy(threading.local):
    busy = False


_listing = _Busy()


def _has_leftovers(folder: str | os.PathLike[str]) -> bool:
    if os.path.lexists(os.path.join(folder, LEFTOVERS)):
        return True
    above, name = os.path.split(os.path.abspath(folder))
    if os.path.lexists(os.path.join(above, f".{name}.ebbtide")):
        return True
    try:
        with os.scandir(folder) as entries:
            return any(
                entry.is_dir(follow_symlinks=False) and os.path.lexists(os.path.join(entry.path, LEFTOVERS))
                for entry in entries
            )
    except OSError:
        return False  # the caller's own listing raises this error


def disable() -> None:
    """Restore DeepSpeed's own ``deepspeed.initialize``, which `enable` has wrapped."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_ours(finder)]
    modules = sys.modules.get
    _unwrap(modules("deepspeed"), "initialize")
    _unwrap(modules("deepspeed.comm.comm"), "mpi_discovery")
    _unwrap(_plugin_of(modules("accelerate.utils.dataclasses")), "fill_match")


def _is_ours(finder: Any) -> bool:
    return getattr(finder, "is_ebbtides", False)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None or hasattr(original, ORIGINAL):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, ORIGINAL, original)
    setattr(owner, name, wrapped)


def _unwrap(owner: Any, name: str) -> None:
    wrapped = getattr(owner, name, None)
    if hasattr(wrapped, ORIGINAL):
        setattr(owner, name, getattr(wrapped, ORIGINAL))


def _initialize(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    configs = list(_configs(args, kwargs))
    if any(KEY in config for config in configs):
        return own(_door).initialize(original, args, kwargs)
    result = original(*args, **kwargs)
    tell_no_key(result, {key for config in configs for key in (config if isinstance(config, dict) else _keys(config))})
    return result


def tell_no_key(made: Sequence[Any], keys: Iterable[str], where: str = "") -> None:
    """Print once, on rank 0, that DeepSpeed trains without a plan, since its config lacks the key ``"ebbtide"``.

    Args:
        made: Result of ``deepspeed.initialize``. Nothing is printed if its engine has no optimizer.
        keys: Keys of the config. The most similar one is named.
        where: The key in which the key ``"ebbtide"`` is, instead of at the top level of the config.
    """
    if not _tells or getattr(made[0], "basic_optimizer", None) is None:
        return
    tell_started()
    distributed = sys.modules["torch.distributed"]
    if distributed.is_initialized() and distributed.get_rank():
        return
    from difflib import get_close_matches

    near = get_close_matches(KEY, keys, 1, 0.7)
    if where:
        why = f'only inside "{where}". Move it to the top level'
    elif near:
        why = f'but "{near[0]}". Did you mean "{KEY}"?'
    else:
        why = f'Add "{KEY}": {{"plan": "automatic"}} to train under a plan'
    no_key = f'has the key "{KEY}" {why}' if where else f'has no key "{KEY}"{", " if near else ". "}{why}'
    _tell_once(f"ebbtide: DeepSpeed trains without a plan, because its config {no_key}")


def tell_started() -> None:
    """Let `tune run` know that an engine has started. Otherwise it says at the end that none has."""
    if took := os.environ.get("EBBTIDE_TOOK"):
        Path(took).touch()


@functools.cache
def _tell_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _keys(config: str) -> list[str]:
    return re.findall(r"""["']?([\w-]+)["']?\s*:""", config)


def _configs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any] | str]:
    first = kwargs.get("args", args[0] if args else None)
    places = [*args, kwargs.get("config"), kwargs.get("config_params")]
    places += [getattr(first, name, None) for name in ("deepspeed_config", "deepscale_config")]
    for place in places:
        if isinstance(place, str | dict):
            yield _text(place) if isinstance(place, str) else place


def _text(config: str) -> str:
    try:
        if os.path.exists(config):
            return Path(config).read_text(encoding="utf-8")
        return base64.urlsafe_b64decode(config).decode()
    except (OSError, ValueError):
        return ""  # DeepSpeed reports what is wrong with the config


def also(name: str, wrap: Callable[[Any], None]) -> None:
    """Register a function that is called with a Python module right after the module is imported.

    Functions that were registered earlier for the module are called first. Call this before `enable`.
    """
    before = _WRAPPED.get(name)

    def both(module: Any) -> None:
        if before is not None:
            before(module)
        wrap(module)

    _WRAPPED[name] = both


def own(name: str) -> Any:
    """Import an ebbtide module by name, and return it. ebbtide need not be installed for the script that is running.

    If Python does not find ebbtide, the folder that contains this copy of ebbtide is added to ``sys.path``.
    """
    if "ebbtide" not in sys.modules and importlib.util.find_spec("ebbtide") is None:
        packages = Path(__file__).resolve().parents[2]  # "ebbtide" itself in a wheel, its parent folder in a checkout
        is_checkout = (packages / "ebbtide" / "__init__.py").exists()
        sys.path.append(str(packages if is_checkout else packages.parent))
    return importlib.import_module(name)


def _hardware(name: str) -> Any:
    loaded = f"_ebbtide_{name}"
    if loaded not in sys.modules:
        place = Path(__file__).resolve().parents[1] / "hardware" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(loaded, place)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[loaded] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[loaded])
    return sys.modules[loaded]


def _discover(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # DeepSpeed would ask MPI, which few have installed.
    alone = _hardware("launcher").only_rank(os.environ)
    os.environ.update(alone)
    if not alone:
        original(*args, **kwargs)


def _in_deepspeed(deepspeed: Any) -> None:
    _hardware("builds").own_ninja_first()
    _wrap(deepspeed, "initialize", _initialize)


def _plugin_of(accelerate: Any) -> Any:
    return getattr(accelerate, "DeepSpeedPlugin", None)


def _fill_match(original: Callable[..., Any], plugin: Any, key: str, /, *args: Any, **kwargs: Any) -> None:
    if key.split(".")[0] != KEY:
        original(plugin, key, *args, **kwargs)


def _numbers_ranks(_: Any) -> None:
    for name in filter(None, os.environ.pop("EBBTIDE_ALONE", "").split(",")):
        os.environ.pop(name, None)


_WRAPPED: dict[str, Callable[[Any], None]] = {
    "deepspeed": _in_deepspeed,
    "deepspeed.comm.comm": lambda module: _wrap(module, "mpi_discovery", _discover),
    "torch.utils.cpp_extension": lambda module: _hardware("builds").tell_builds(module, _hardware("launcher").rank),
    "accelerate.utils.dataclasses": lambda module: _wrap(_plugin_of(module), "fill_match", _fill_match),
    "lightning.fabric": _numbers_ranks,
    "lightning_fabric": _numbers_ranks,
}


class _AfterImport:
    """An import finder that changes certain modules, such as ``deepspeed``, right after they are imported.

    `_WRAPPED` has the names of these modules, each with the function that changes the module, such as by wrapping
    ``deepspeed.initialize``. The other import finders find the module. This finder then replaces the module's loader
    by one that also calls the function.
    """

    is_ebbtides = True

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name not in _WRAPPED:
            return None
        for finder in sys.meta_path:
            result = None if _is_ours(finder) else finder.find_spec(name, path, target)
            if result is not None:
                if result.loader is not None:
                    result.loader = _ThenWrap(result.loader, _WRAPPED[name])  # type: ignore[assignment]
                return result
        return None


class _ThenWrap:
    """A module loader that first loads the module with its original loader and then calls a function that
    changes the module.
    """

    def __init__(self, loader: Any, wrap: Callable[[Any], None]) -> None:
        self._loader, self._wrap = loader, wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._wrap(module)

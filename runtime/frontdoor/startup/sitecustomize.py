"""A ``sitecustomize`` module that every Python interpreter under `tune run`, `tune verify` or `tune search --measure`
loads at startup.

The module makes ebbtide wrap ``deepspeed.initialize`` if the interpreter imports DeepSpeed. Under `tune verify`, it
also sets random seeds and has the training steps recorded. Under `tune search --measure`, the steps are timed.

ebbtide puts this module's folder on PYTHONPATH. If the path has another ``sitecustomize`` module, that module is run
afterwards.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def _load(name: str, spec: ModuleSpec | None) -> ModuleType | None:
    if spec is None or spec.loader is None:
        return None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_here = Path(__file__).resolve().parent
# Loaded by path, because most Python processes that run this file never import ebbtide.
_hook = _load("_ebbtide_hook", spec_from_file_location("_ebbtide_hook", _here.parent / "hook.py"))
if _hook is not None:
    # `tune verify` and `tune search --measure` run this script.
    _rooms = {"EBBTIDE_VERIFY": "verified", "EBBTIDE_MEASURE": "measured"}
    for _variable in _rooms.keys() & os.environ.keys():
        _place = spec_from_file_location(f"_ebbtide_{_rooms[_variable]}", _here.parent / f"{_rooms[_variable]}.py")
        _room = _load(f"_ebbtide_{_rooms[_variable]}", _place)
        assert _room is not None
        _room.enable(_hook)
    _hook.enable("ebbtide.runtime.frontdoor.initialize", tells=_rooms.keys().isdisjoint(os.environ))

_others = [folder for folder in sys.path if Path(folder or ".").resolve() != _here]
_load("sitecustomize", PathFinder.find_spec("sitecustomize", _others))

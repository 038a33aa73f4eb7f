"""A ``sitecustomize`` module that every Python interpreter under `tune run` or `tune verify` loads at startup.

The module makes ebbtide wrap ``deepspeed.initialize`` if the interpreter imports DeepSpeed. Under `tune verify`, it
also sets random seeds and has the training steps recorded.

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
    if "EBBTIDE_VERIFY" in os.environ:  # `tune verify` runs this script
        _place = spec_from_file_location("_ebbtide_verified", _here.parent / "verified.py")
        _verified = _load("_ebbtide_verified", _place)
        assert _verified is not None
        _verified.enable(_hook)
    _hook.enable("ebbtide.runtime.frontdoor.initialize", tells="EBBTIDE_VERIFY" not in os.environ)

_others = [folder for folder in sys.path if Path(folder or ".").resolve() != _here]
_load("sitecustomize", PathFinder.find_spec("sitecustomize", _others))

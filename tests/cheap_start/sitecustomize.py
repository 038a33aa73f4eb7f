"""A ``sitecustomize`` module for the processes that tests start: they begin and end with less work, and plan searches
are short if a test asks for that (`short_search.SHORT`).

Every optimizer and every DeepSpeed engine marks functions for torch's compiler, which imports torch._dynamo. The
import takes more than a second of a core in each process, even if TORCHDYNAMO_DISABLE=1 switches the compiler off.
Here a marked function is called as it is while the compiler is off and not imported.

Python looks for garbage after each 700 new objects, which takes a twentieth of the time of most tests and finds little.
Here Python looks less often.

At the end of each process, Python looks for garbage in all modules, which takes half a second if torch is one of them.
`end_early` excludes the objects that are left after the last `atexit` function from this search.
"""

import atexit
import gc
import os
import sys
from functools import partial, wraps
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import FunctionType

from short_search import SHORT, shorten

OFF = "TORCHDYNAMO_DISABLE"


def idle():
    """Return True if torch's compiler is switched off and nothing has imported it."""
    return os.environ.get(OFF) == "1" and "torch._dynamo" not in sys.modules


def marked_when_used(mark):
    """Return a replacement for ``mark``, a decorator of torch that excludes functions from compilation.

    A function decorated with the replacement is called directly while torch's compiler is idle (switched off
    and not imported). Otherwise the function is called through ``mark``, which imports the compiler.
    """

    def decorator(fn=None, recursive=True, **options):
        if fn is None:
            return partial(decorator, recursive=recursive, **options)
        if not idle() or not isinstance(fn, FunctionType):
            return mark(fn, recursive, **options)
        marked = []

        @wraps(fn)
        def inner(*args, **kwargs):
            if idle():
                return fn(*args, **kwargs)
            if not marked:
                marked.append(mark(fn, recursive, **options))
            return marked[0](*args, **kwargs)

        return inner

    return decorator


def left_as_it_is(compile_):
    """Return a replacement for torch.compile. While torch's compiler is idle (switched off and not imported), the
    replacement returns the given function uncompiled. Otherwise it calls torch.compile.
    """

    @wraps(compile_)
    def decorator(model=None, **options):
        if not idle():
            return compile_(model, **options)
        return model if model is not None else lambda function: function

    return decorator


def with_gradients_if_differentiable(mark):
    """Return a replacement for ``mark``, torch's decorator of the ``step`` methods of optimizers.

    torch's decorator imports torch._dynamo, which takes more than a second. The replacement does not, while
    torch's compiler is idle (switched off and not imported). Like torch's decorator, the replacement enables
    gradients during the step only if the optimizer is differentiable.
    """

    def decorator(step):
        marked = mark(step)

        @wraps(step)
        def inner(self, *args, **kwargs):
            if not idle():
                return marked(self, *args, **kwargs)
            import torch

            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return inner

    return decorator


def replaced(attribute, changed):
    """Return a function that replaces an attribute of a module, if the module has it. Another version of torch may
    lack it.
    """

    def change(module):
        if hasattr(module, attribute):
            setattr(module, attribute, changed(getattr(module, attribute)))

    return change


def starved(pool):
    """Give the workers of the planning service 30 times as long for each request: beside other tests, they may wait for
    a core.
    """
    made = pool.RequestQueue.__init__

    def init(self, name, size, niceness, limit_s, *rest, **options):
        made(self, name, size, niceness, 30 * limit_s, *rest, **options)

    pool.RequestQueue.__init__ = init


CHANGES = {}
if os.environ.get(OFF) == "1":
    CHANGES |= {
        "torch._compile": replaced("_disable_dynamo", marked_when_used),
        "torch.compiler": replaced("disable", marked_when_used),
        "torch": replaced("compile", left_as_it_is),
        "torch.optim.optimizer": replaced("_use_grad_for_differentiable", with_gradients_if_differentiable),
    }
if os.environ.get(SHORT) == "1":
    CHANGES["ebbtide.tuner.placements.decision"] = shorten
    CHANGES["ebbtide.tuner.service.pool"] = starved
    os.nice = lambda _: 0  # while other tests run, a worker of low priority would get no core for minutes


class Finder:
    """An import hook for the modules in `CHANGES`. Right after such a module is loaded, the hook changes it, so that
    torch does not import its compiler or plan searches are short.
    """

    looking = False  # other hooks read this attribute of finders

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in CHANGES or cls.looking:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        cls.looking = True
        spec = next(filter(None, others), None)
        cls.looking = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


def end_early():
    """Exclude all objects from the last garbage collection of this process, so that the process ends sooner."""
    if "triton" not in sys.modules:
        gc.freeze()


gc.set_threshold(50_000, 20, 20)
atexit.register(end_early)  # the function that is registered first is called last
if CHANGES:
    sys.meta_path.insert(0, Finder)

# Another sitecustomize module later on the path is run as well. Earlier ones have already run, and may have run this
# one.
_folders = [Path(folder or ".").resolve() for folder in sys.path]
_later = sys.path[_folders.index(Path(__file__).resolve().parent) + 1 :]
_next = PathFinder.find_spec("sitecustomize", _later)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(module_from_spec(_next))

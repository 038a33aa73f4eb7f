"""The objects in a checkpoint: nested dicts, lists and tuples with tensors in them, and other plain data. Reading them
runs no code.
"""

import argparse
import codecs
import collections
import datetime as dt
import decimal
import enum
import fractions
import pathlib
import pickle
import random
import types
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch


def tensors_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the tensors in nested dicts, lists and tuples, each with its path, in pickling order.

    Tensors inside objects of other classes are left out.
    """
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif type(tree) in (dict, OrderedDict):
        for key, value in tree.items():
            yield from tensors_of(value, (*path, key))
    elif type(tree) in (list, tuple):
        for number, value in enumerate(tree):
            yield from tensors_of(value, (*path, number))


def of_the_kind(like: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, wrapped in a `torch.nn.Parameter` if the tensor ``like`` is a parameter."""
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
    return tensor


def replace_tensors(tree: Any, replace: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with each dense tensor replaced by the result of ``replace``.

    Tensors that consist of several others, or of more than their bytes, are left as they are: sparse, nested and
    quantized ones, for example.
    """
    if isinstance(tree, torch.Tensor):
        return replace(tree) if _is_dense(tree) else tree
    if type(tree) in (dict, OrderedDict):
        return type(tree)((k, replace_tensors(v, replace)) for k, v in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(replace_tensors(v, replace) for v in tree)
    return tree


def _is_dense(tensor: torch.Tensor) -> bool:
    made_of_others = tensor.is_nested or hasattr(tensor, "__tensor_flatten__")
    return tensor.layout == torch.strided and not tensor.is_quantized and not made_of_others


Allowed = Any  # an argument of torch.serialization.add_safe_globals: an object, or (object, "its.name")


@cache
def plain_classes() -> tuple[Allowed, ...]:
    """Return the classes of objects that a checkpoint may hold when it is loaded. All of them only hold data."""
    return (*_deepspeed_classes(), *_library_classes(), *_numpy_classes())


def _deepspeed_classes() -> list[Allowed]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


ON_STORAGE = "ebbtide"  # key of a checkpoint's dict that holds an `OnStorage`


class OnStorage:
    """A marker in a checkpoint's file. It says that the data of some tensors is not in this file but in ebbtide's store
    of optimizer state on a drive.

    DeepSpeed's scripts and `torch.load` cannot read such tensors. The marker makes them refuse the file with an
    explanation, also on machines without ebbtide.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._assert, (
            False,
            "the optimizer state of this checkpoint is on a drive and not in its files. "
            "`tune checkpoint export` writes an ordinary DeepSpeed checkpoint with all state",
        )


def _on_storage(*_: Any) -> OnStorage:
    return OnStorage()


def _library_classes() -> Iterator[Allowed]:
    yield from (argparse.Namespace, types.SimpleNamespace, uuid.UUID, random.Random)
    yield from (dt.datetime, dt.date, dt.time, dt.timedelta)
    yield from (dt.timezone, decimal.Decimal, fractions.Fraction, collections.deque)
    yield from (collections.defaultdict, codecs.encode, OnStorage)
    yield (_on_storage, "torch._assert")
    # Python 3.13 pickles paths under another module's name.
    for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
        yield from _under((f"{m}.{kind.__name__}" for m in ("pathlib", "pathlib._local")), kind)
    # torch.save uses pickle protocol 2, which calls `builtins` by its Python 2 name.
    for builtin in (int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice):
        names = (f"{m}.{builtin.__name__}" for m in ("builtins", "__builtin__"))
        yield from _under(names, builtin)
    yield (range, "__builtin__.xrange")
    # Python 3.11.0 to 3.11.3 (as in Debian 12) pickles a member of an enum as a call of `getattr`.
    yield from _under((f"{m}.getattr" for m in ("builtins", "__builtin__")), enum_member)


def enum_member(kind: Any, name: Any) -> enum.Enum:
    """Return a member of an enum. When a checkpoint is read, this function replaces `getattr`, which could run code.

    Raises:
        TypeError: An attribute that is not an enum member was requested.
    """
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    raise TypeError(
        f"the checkpoint file's pickle may call getattr only for members of enums, but asks for {kind}.{name}"
    )


def _numpy_classes() -> Iterator[Allowed]:
    yield from (np.ndarray, np.dtype)
    yield from {type(np.dtype(code)) for code in np.typecodes["All"]}
    yield from {np.dtype(code).type for code in np.typecodes["All"] if code != "O"}
    # numpy 2 renamed the module. Both versions read files of the other one.
    from numpy._core import multiarray

    for name in ("_reconstruct", "scalar"):
        old_and_new = (f"numpy.{m}.multiarray.{name}" for m in ("core", "_core"))
        yield from _under(old_and_new, getattr(multiarray, name))
    from numpy.random import _pickle as generators
    from numpy.random import bit_generator as bits

    yield from (getattr(generators, f"__{kind}_ctor") for kind in ("generator", "bit_generator", "randomstate"))
    yield from (np.random.Generator, np.random.RandomState, np.random.SeedSequence)
    yield from (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox)
    yield from (np.random.SFC64, bits.SeedlessSeedSequence, getattr(bits, "__pyx_unpickle_SeedSequence"))


def _under(names: Iterable[str], value: Any) -> Iterator[Allowed]:
    for name in names:
        yield (value, name)


@cache
def _known_types() -> frozenset[Any]:
    values = (item[0] if isinstance(item, tuple) else item for item in plain_classes())
    ours = {torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device}
    ours |= {collections.OrderedDict, collections.Counter}
    return frozenset({v for v in values if isinstance(v, type)} | ours | {type(None), type(...)})


class WatchingPickler(pickle.Pickler):
    """A pickler for checkpoint files that notes whether any object is of a class that a load might refuse.

    Attributes:
        suspicious: True if there was such an object.
    """

    suspicious = False

    def reducer_override(self, item: Any) -> Any:
        kind = type(item)
        # pickle fills objects of these classes item by item, which weights_only loading allows for lists and dicts
        # only.
        if kind is collections.deque:
            return kind, (list(item), item.maxlen)
        if kind is collections.defaultdict:
            return kind, (item.default_factory, dict(item))
        if not isinstance(item, (type, types.FunctionType, types.BuiltinFunctionType)):
            self.suspicious |= kind not in _known_types()
        return NotImplemented

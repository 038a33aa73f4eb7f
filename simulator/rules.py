"""Errors for values that break a rule, such as in a plan file or an option, and functions that find the name that a
user meant.

An error's message names the field as the user gave it, and says what must hold. The functions accept other spellings of
a name, such as "RTX 4090" for "rtx4090", and suggest similar names for a misspelled one.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, get_args, get_type_hints

if TYPE_CHECKING:
    from pydantic import TypeAdapter

P = ParamSpec("P")
T = TypeVar("T")
_ANY = (str, int, float, bool, Any)
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SHOWN_ERRORS = 4
SHOWN = 120  # largest number of characters shown of a value


# True while a `tune` command runs: texts then name its flags beside the arguments of the same meaning.
FLAGS: ContextVar[bool] = ContextVar("FLAGS", default=False)
_FLAG = re.compile(r" \((?=[^()`]*--[a-z])[^()`]*\)")


def worded(text: str) -> str:
    """Return a text for the user without the flags that stand in it in parentheses, except in a `tune` command."""
    return text if FLAGS.get() else _FLAG.sub("", text)


class RuleError(ValueError):
    """An error: a value, such as a field of a plan file or an option, breaks a rule.

    Attributes:
        key: Name of the wrong field, with dots for nested fields. Empty if no single field is wrong.
    """

    def __init__(self, rule: str, key: str = "") -> None:
        super().__init__(cut(worded(rule)))
        self.key = key


class Failed(Protocol):
    """The interface of a validation error that lists several errors in it, such as `pydantic.ValidationError`."""

    def errors(self) -> Any: ...


class BrokenRule(NamedTuple):
    """A rule that a value breaks: the name of the field, the rule in words, and the value as text.

    The text is None if the value is too large to show.
    """

    key: str
    rule: str
    value: str | None = None

    @property
    def sentence(self) -> str:
        """Return a sentence for the user that names a field, the rule that the field breaks, and the field's value."""
        if not self.rule.startswith("must ") or not self.key:
            return self.rule
        return f"{self.key} {self.rule}" + ("" if self.value is None else f", but got {self.value}")


def cut(text: str, most: int = 1000) -> str:
    """Return a text for an error message, with its middle left out if it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]} ... {text[-most // 4 :]}"


def shortened(value: object) -> str:
    """Return a value as short ASCII text that is safe to show in a terminal or on a web page."""
    text = ascii(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return a phrase that suggests a known name for a misspelled one. Empty if none is similar.

    >>> suggestion("sequnce", ["sequence", "machine"])
    " (did you mean 'sequence'?)"
    """
    names = {name.lower(): name for name in known}
    near = [repr(names[low]) for low in get_close_matches(given.lower(), names, 2, 0.7)]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def broken(error: Failed, given: Any = None, model: Any = None) -> list[BrokenRule]:
    """Return a list of the rules that pydantic's validation error reports as broken, in this project's words.

    If a field allows several types, only the rule of the type nearest to the given value is returned.

    Args:
        error: Error of pydantic, or of a web framework that wraps pydantic's errors.
        given: Value that was checked. With it, the names of alternative types, which pydantic puts into the names of
            fields, are left out.
        model: Pydantic model that checked the value. With it, names similar to an unknown field are suggested.
    """
    items = error.errors()
    rows: dict[str, BrokenRule] = {}
    for item in items:
        row = _broken(item, given)
        if item["type"] == "extra_forbidden" and model is not None:
            row = row._replace(rule=row.rule + suggestion(str(item["loc"][-1]), _fields_at(item["loc"][:-1], model)))
        kind = item["type"].endswith("_type")
        if row.key not in rows or not kind:
            rows[row.key] = row
    return [row for key, row in rows.items() if not any(k.startswith(f"{key}.") for k in rows)]


def _fields_at(location: Sequence[Any], model: Any) -> set[str]:
    models = _models_in(model)
    for part in location[1:] if location[:1] == ("body",) else location:
        inside = [one.model_fields[part].annotation for one in models if part in one.model_fields]
        # Any other part of a location is an index, or the name of an alternative, such as a class.
        models = [found for kind in inside for found in _models_in(kind)] or models
        models = [one for one in models if one.__name__ == part] or models
    return {name for one in models for name in one.model_fields}


def _models_in(kind: Any) -> list[Any]:
    if hasattr(kind, "model_fields"):
        return [kind]
    return [found for argument in get_args(kind) for found in _models_in(argument)]


def explain(error: Failed, given: Any = None, model: Any = None) -> str:
    """Return one line of text for a validation error: each wrong field, what must hold for it, and its value."""
    rows = broken(error, given, model)
    lines = [f"{key or 'the file'}: {rule}" + ("" if value is None else f" (got {value})") for key, rule, value in rows]
    more = len(lines) - SHOWN_ERRORS
    return "; ".join(lines[:SHOWN_ERRORS]) + (f"; and {more} more" if more > 0 else "")


def _broken(item: Mapping[str, Any], given: Any) -> BrokenRule:
    cause = item.get("ctx", {}).get("error")
    where = _where(item, given)
    if isinstance(cause, RuleError) and cause.key and cause.key not in where[-1:]:
        where = [*where, cause.key]
    value = item.get("input")
    unshown = item["type"] in ("missing", "json_invalid") or isinstance(value, dict | list | tuple)
    return BrokenRule(".".join(where)[:SHOWN], _rule(item), None if unshown else shortened(value))


def _where(item: Mapping[str, Any], given: Any) -> list[str]:
    location = list(item["loc"])
    if location and location[0] in _PLACES:
        given = given if location.pop(0) == "body" else None
    if given is None:
        return [str(part) for part in location if re.fullmatch(r"[\w-]+", str(part))]
    names = []
    for part in location:
        inside = isinstance(given, list) and isinstance(part, int) and part < len(given)
        if inside or (isinstance(given, dict) and part in given):
            given = given[part]
            names.append(str(part))
    return [*names, str(location[-1])] if item["type"] == "missing" and location else names


_PLACES = ("body", "query", "path", "header")  # where a request has its fields


_RULES: Mapping[str, str] = {
    "missing": "must be given",
    "extra_forbidden": "must be a known field",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be greater than or equal to {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be less than or equal to {le}",
    "finite_number": "must be finite",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
}
_KINDS: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
    "dataclass": "an object",
    "none": "null",
}


def _rule(item: Mapping[str, Any]) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])[:1000]
    if kind == "json_invalid":
        place = re.search(r"line (\d+) column (\d+)", str(context.get("error")))
        return "must be JSON" + (", but is not at line {} column {}".format(*place.groups()) if place else "")
    if kind in _RULES:
        return _RULES[kind].format(**context)
    word = _KINDS.get(kind.partition("_")[0])
    return f"must be {word}" if word else "must be of another kind"


def spelled(given: str, known: Iterable[str], what: str, key: str = "", also: Mapping[str, str] | None = None) -> str:
    """Return the known name that a user means: "RTX 4090", "4090" and "rtx-4090" all mean "rtx4090".

    A name that is merely similar may be that of another card or model ("L40" is not "l40s"), so the error asks.

    Args:
        also: Other names of the known ones, such as a card's name in its data sheet.

    Raises:
        RuleError: The given name matches no known name. The error suggests the nearest ones.
    """
    names = {_plain(other): name for other, name in (also or {}).items()} | {_plain(name): name for name in known}
    wanted = _plain(given)
    if wanted in names:
        return names[wanted]
    holding = [name for plain, name in names.items() if len(wanted) > 2 and wanted in plain]
    near = holding or [names[plain] for plain in get_close_matches(wanted, names, 3)]
    near = near or [name for plain, name in names.items() if plain in wanted]
    meant = f" Did you mean {' or '.join(map(repr, dict.fromkeys(near)))}?" if near else ""
    raise RuleError(f"There is no {what} {given!r}.{meant} Known: {', '.join(known)}.", key=key)


def _plain(name: str) -> str:
    # An organization before a slash, and "nvidia", "geforce", "tesla" and "rtx", are left out.
    last = name.rsplit("/", 1)[-1]
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", last.lower())


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function so that an argument of a wrong type is refused before the function runs.

    The RuleError names the argument, its type and the value. Numbers of other types, such as numpy's, are converted.
    """
    signature = inspect.signature(function)

    @cache
    def kinds() -> Mapping[str, tuple[str, "TypeAdapter[Any]"]]:
        hints, exact = get_type_hints(function), get_type_hints(function, include_extras=True)
        one = (name for name, each in signature.parameters.items() if each.kind not in _MANY and name in hints)
        return {name: (_type_text(hints[name]), _adapter(exact[name])) for name in one}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:  # the error of the call itself is clearer
            return function(*args, **kwargs)
        for name, (described, adapter) in kinds().items():
            if name in given.arguments:
                value = given.arguments[name]
                try:
                    given.arguments[name] = adapter.validate_python(value)
                except ValueError:  # pydantic's ValidationError
                    raise RuleError(
                        f"{name} must be of type {described}, but got {shortened(value)}", key=name
                    ) from None
        return function(*given.args, **given.kwargs)

    return call


def _adapter(hint: Any) -> "TypeAdapter[Any]":
    # An instance of a class of ebbtide must be one, so that no dict is taken for it.
    from pydantic import ConfigDict, InstanceOf, TypeAdapter

    if isinstance(hint, type) and hint not in _ANY:
        return TypeAdapter(InstanceOf[hint])
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def _type_text(hint: Any) -> str:
    if isinstance(hint, type):
        return hint.__name__
    return re.sub(r"^Optional\[(.*)\]$", r"\1 | None", re.sub(r"\b\w+\.", "", str(hint)))

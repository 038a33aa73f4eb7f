"""A replacement of ``deepspeed.initialize`` for DeepSpeed configs that may have the key ``"ebbtide"``.

With the key, ebbtide builds the engine under the plan and with the checkpoint settings that the key gives.
Without the key, DeepSpeed's own function builds the engine.
"""

import base64
import copy
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hjson
from ebbtide.runtime import log
from ebbtide.runtime.frontdoor.hook import KEY, tell_no_key, tell_started
from ebbtide.runtime.frontdoor.request import EngineRequest, read_request
from ebbtide.runtime.hardware.launcher import rank
from ebbtide.runtime.zero.attach import initialize as initialize_under_plan
from ebbtide.runtime.zero.checks.guard import leave_to_stock
from ebbtide.simulator.estimates.deepspeed_keys import ZERO, as_deepspeed_reads, at, without_duplicates

logger = logging.getLogger("ebbtide")
_CONFIGS = ("config", "config_params")


def initialize(
    original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any, Any]:
    """Call DeepSpeed's ``initialize`` with the given arguments, under the plan that the config names, if any.

    An engine without an optimizer, such as a reference model, is left unchanged, because a library may build it
    from a copy of the training engine's config.

    Raises:
        RequestError, ConfigError, PlanError: The config or plan is invalid. Raised before the model is touched.
            The message says what to change.
    """
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    given, source = config_of(call)
    config, base = read(given)
    if config is not None and KEY not in config:
        result = original(*args, **kwargs)
        inside = (name for name, value in config.items() if isinstance(value, dict) and KEY in value)
        tell_no_key(result, config, next(inside, ""))
        return result
    if config is None or config.get(KEY) is None or not _trains(call, config):
        return original(*args, **kwargs)
    log.show(rank())
    tell_started()
    request = read_request(config[KEY], base)
    if request.plan is not None and leave_to_stock(config):
        if request.checkpoint is None:
            return original(*args, **kwargs)
        request = replace(request, plan=None)
    # Without the key, which DeepSpeed's checks of the config would refuse. A deep copy, because the plan's
    # sub_group_size is written into it.
    stock = {name: copy.deepcopy(value) for name, value in config.items() if name != KEY}
    return _under(original, request, stock, without_config(call, source))


def _under(
    original: Callable[..., Any], request: EngineRequest, config: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, Any, Any, Any]:
    if request.plan is None:
        from ebbtide.runtime.checkpoint import install

        result = original(config=config, **options)
        assert request.checkpoint is not None
        install(result[0], request.checkpoint)
        return result
    return initialize_under_plan(
        plan=request.plan, checkpoint=request.checkpoint, config=config, device=request.device, **options
    )


def config_of(call: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Return the DeepSpeed config that the caller gave, and the attribute of ``args`` that held it, if any."""
    given = call.get("config")
    if given is None:
        given = call.get("config_params")
    if given is not None:
        return given, None
    for name in ("deepspeed_config", "deepscale_config"):
        given = getattr(call.get("args"), name, None)
        if given is not None:
            return given, name
    return None, None


def read(given: Any) -> tuple[dict[str, Any] | None, Path | None]:
    """Read a DeepSpeed config that the caller gave as a dict or as the path of a file.

    Return two values:

    - The config as a dict. None if DeepSpeed will refuse it.
    - The folder of the file. None if there is no file.
    """
    if isinstance(given, dict):
        return given, None
    if not isinstance(given, str):
        return None, None
    folder = None
    try:
        if os.path.exists(given):
            folder = Path(given).resolve().parent
            config = hjson.loads(Path(given).read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
        else:
            config = hjson.loads(base64.urlsafe_b64decode(given).decode())
    except (OSError, ValueError, OverflowError):
        return None, None
    return (config, folder) if isinstance(config, dict) else (None, None)


def _trains(call: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    if call.get("optimizer") is None and not config.get("optimizer"):
        return False
    # TRL builds a reference model with the training engine's config, but with stage 0 instead of ZeRO-2.
    if not at(as_deepspeed_reads(config), f"{ZERO}.stage"):
        leave_to_stock(config)
        if at(config, f"{KEY}.checkpoint"):
            logger.warning('"%s.checkpoint" has no effect on this engine: DeepSpeed alone saves its checkpoints', KEY)
        return False
    return True


def without_config(call: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """Return the arguments of a ``deepspeed.initialize`` call without the config, so that another can be passed.

    The attribute ``source`` of the script's arguments, if it held the config, is None in a copy of them, because
    DeepSpeed accepts only one config.
    """
    options = {name: value for name, value in call.items() if name not in _CONFIGS}
    if source is not None:
        options["args"] = copy.copy(call["args"])
        setattr(options["args"], source, None)
    return options

"""Parts that several ``tune`` commands share: types of option values, ``--json``, and error handling."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from ebbtide.tuner.files import BadInputError
from ebbtide.tuner.inputs import Text
from ebbtide.tuner.quantities import directory_bytes, duration_s, endurance_bytes, rate_bytes_per_s, share, size_bytes

T = TypeVar("T")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")


SIZE, DURATION = Text("size", size_bytes), Text("duration", duration_s)
RATE, SHARE = Text("rate", rate_bytes_per_s), Text("share", share)
ENDURANCE = Text("terabytes", endurance_bytes)


def _each_once(_: click.Context, __: click.Parameter, given: tuple[tuple[str, int], ...]) -> Any:
    folders = [folder for folder, _ in given]
    if len(set(folders)) < len(folders):
        raise BadInputError(f"--storage must name each folder once, but got {', '.join(folders)}")
    return given


STORAGE = click.option(
    "--storage",
    callback=_each_once,
    type=Text("DIR:SIZE", directory_bytes),
    multiple=True,
    help="Folder and size of a drive for optimizer state that memory cannot hold, e.g. /mnt/nvme:500GB"
    " for all ranks of the node (ZeRO-3). May be repeated: several drives share the state by "
    "their measured speed.",
)
GPU_MEMORY = click.option("--gpu-memory", type=SIZE, help="GPU memory of each card, e.g. 24GiB.")
HOST_MEMORY = click.option(
    "--host-memory", type=SIZE, help="Host memory of the machine, which its ranks share, e.g. 100GiB."
)


def margin_option(default: str = "") -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return the option ``--memory-margin`` of a ``tune`` command."""
    text = "Share of GPU and host memory to leave free, e.g. 5%."
    return click.option("--memory-margin", type=SHARE, help=f"{text} {default}".strip())


def needs(needed: str, present: bool, *names: str) -> None:
    """Refuse options of the running ``tune`` command that have no effect because a condition does not hold.

    Args:
        needed: Condition in words, such as ``with --mtbf``.
        present: True if the condition holds.
        names: Parameters of the command that need the condition. Parameters that the user has not given are ignored.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if present or parameter.name not in names or source != ParameterSource.COMMANDLINE:
            continue
        raise BadInputError(f"{parameter.opts[-1]} has an effect only {needed}. Leave {parameter.opts[-1]} out")


def guarded(command: Callable[..., T]) -> Callable[..., T]:
    """Wrap a ``tune`` command so that bad input ends with a one-line error instead of a traceback."""

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> T:
        from ebbtide.simulator.rules import FLAGS

        before = FLAGS.set(True)
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # `tune ... | head`: click ends quietly
            raise
        except (ValueError, OSError, RuntimeError) as error:
            raise BadInputError(str(error), getattr(error, "key", "")) from None
        finally:
            FLAGS.reset(before)

    return wrapper

"""The ``tune verify`` command: a bitwise comparison of a script's training with and without its plan."""

import json
import sys
from typing import TYPE_CHECKING

import click
from ebbtide.tuner.commands.options import JSON, guarded
from ebbtide.tuner.files import BadInputError
from ebbtide.tuner.inputs import program_of
from ebbtide.tuner.lazy_group import Command

if TYPE_CHECKING:
    from ebbtide.tuner.verify.comparison import Verification

CODES = {True: 0, False: 1, None: 3}
SIDES = ("stock", "no-offload")


@click.command(
    cls=Command,
    epilog="Example: tune verify -- torchrun --nproc-per-node 2 train.py --deepspeed ds.json; "
    "tune verify --against no-offload -- deepspeed train.py --deepspeed_config ds.json",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=8, show_default=True, help="Number of optimizer steps of each run."
)
@click.option(
    "--against",
    default=",".join(SIDES),
    show_default=True,
    help='Runs to compare with: stock (DeepSpeed without the key "ebbtide"), no-offload, or both.',
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the random generators that the script does not seed itself.",
)
@click.option(
    "--deterministic/--no-deterministic",
    default=None,
    help="Use torch's deterministic kernels in all compared runs. Default: --deterministic if torch finds a GPU, "
    "otherwise --no-deterministic.",
)
@JSON
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@guarded
def verify(
    steps: int, against: str, seed: int, deterministic: bool | None, as_json: bool, command: tuple[str, ...]
) -> None:
    """Check that a script trains under its plan as without it: compare a few training steps.

    The same command is run under the plan that the key "ebbtide" in DeepSpeed's config names (if there is one),
    with DeepSpeed alone ("stock"), and without offload. Losses, gradient norms, parameters and fp32 masters are
    compared bit by bit. Exit code 0: The plan computes the bits of DeepSpeed alone. Exit code 1: It does not, and the
    first difference is named. Exit code 2: The command could not be run to its end. Exit code 3: No verdict, since
    two runs of the same command already differ (for example by an unseeded generator), or since the only
    comparison is with a run without offload, which adds in another order.
    """
    from ebbtide.tuner.verify.comparison import verify as compare
    from ebbtide.tuner.verify.launch import NotDeterministicError, has_gpu, launch
    from ebbtide.tuner.verify.report import as_json as figures
    from ebbtide.tuner.verify.report import screen

    sides = _sides(against)
    program_of(command, "verify")
    strict = has_gpu() if deterministic is None else deterministic

    def compared(strict: bool) -> "Verification":
        return compare(
            sides,
            lambda side: launch(command, side, steps, seed, deterministic=strict),
            lambda title: click.echo(f"running: {title}", err=True),
        )

    try:
        result = compared(strict)
    except NotDeterministicError as error:
        if deterministic:
            raise
        names = ", ".join(error.operations)
        click.echo(
            f"torch has no deterministic kernel for {names}: running again with torch's normal kernels", err=True
        )
        result = compared(False)
    click.echo(json.dumps(figures(result), indent=2) if as_json else "\n".join(screen(result)))
    sys.exit(CODES[result.right])


def _sides(against: str) -> tuple[str, ...]:
    sides = tuple(word.strip() for word in against.split(",") if word.strip())
    if not sides or set(sides) - set(SIDES):
        raise BadInputError(f"--against must name one or more of {', '.join(SIDES)}, but got {against!r}")
    return sides

"""The ``tune calibrate`` command, which corrects the bandwidths and compute speeds in a machine's description with the
times of training runs that were measured on the machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click
from ebbtide.tuner.commands.options import JSON, guarded, needs
from ebbtide.tuner.files import BadInputError, check_distinct, check_kind, read, read_config, written
from ebbtide.tuner.inputs import check_model, complete_machines, model_shape, read_machine, workload_options
from ebbtide.tuner.lazy_group import Command

if TYPE_CHECKING:
    from ebbtide.simulator.machine import Machine
    from ebbtide.tuner.calibrate.calibration import Calibrated, Change
    from ebbtide.tuner.calibrate.run_logs import FactsFromFlags

# Factor between measured and predicted time above which the description of the run is doubted, not the machine's rates.
LARGE_MISS = 1.5


@click.command(cls=Command, epilog="Example: tune calibrate h200 --runs train.log --model config.json -o machine.json")
@click.argument("machine", shell_complete=complete_machines)
@click.option(
    "--runs",
    multiple=True,
    required=True,
    help="Measured runs: a log with DeepSpeed's wall_clock_breakdown, a workload.json of `tune profile`, the file of "
    "`tune search --measure`, or a CSV with the columns forward_ms, backward_ms, step_ms, iteration_ms. A log with "
    "steps_per_print 1 and log level info also gives the time between phases. May be repeated.",
)
@click.option(
    "--strategy",
    help="Offload strategy of the measured runs (--runs). Default: DeepSpeed alone, with the offload settings of "
    "--ds-config. Without --ds-config, DeepSpeed alone with optimizer state in host memory.",
)
@click.option(
    "--ratio",
    type=click.FloatRange(0, 1),
    help="Twin-Flow's ratio in the measured runs (--runs), if they used Twin-Flow.",
)
@click.option("-o", "--out", "--output", "out", required=True, help="Path of the corrected machine file to write.")
@workload_options
@JSON
@guarded
def calibrate(
    machine: str,
    runs: tuple[str, ...],
    strategy: str | None,
    ratio: float | None,
    out: str,
    as_json: bool,
    **source: Any,
) -> None:
    """Correct the bandwidths and compute speeds of MACHINE (a file or a preset) with measured training runs.

    Each corrected speed gets a spread that shows how well the runs agree.
    """
    from ebbtide.tuner.calibrate.calibration import calibrate as correct
    from ebbtide.tuner.calibrate.run_logs import check_scale, read_observations

    before = read_machine(machine)
    described = _described(source, before, strategy, ratio)
    check_distinct("--output", out)
    for path in runs:
        if path.endswith(".json"):
            check_kind("--runs", path, "a workload file")
    seen = [one for path in runs for one in read_observations(path, described)]
    check_scale(before, seen)
    calibrated = correct(before, seen)
    changes = [*_loop_change(before, calibrated.machine), *calibrated.changes]
    calibrated = replace(calibrated, changes=tuple(changes))
    notes = [*(note for one in seen for note in one.notes), *calibrated.unexplained]
    with written("--output", out):
        calibrated.machine.save(out)
    if as_json:
        record = asdict(calibrated) | {"machine": out, "warnings": notes}
        click.echo(json.dumps(record, indent=2))
        return
    _show(calibrated, len(seen), out)
    for warning in (*notes, *calibrated.contradictions):
        click.echo(f"warning: {warning}", err=True)


def _described(source: dict[str, Any], machine: Machine, strategy: str | None, ratio: float | None) -> FactsFromFlags:
    from ebbtide.simulator.workload import Workload
    from ebbtide.tuner.calibrate.run_logs import FactsFromFlags

    if source["workload"] is not None and source["model"] is not None:
        raise BadInputError("only one of --workload and --model may be given, but got both")
    about = (k for k in source if k not in ("workload", "model", "launcher", "omp_threads"))
    needs("without --workload, which has its own", source["workload"] is None, *about)
    shape = model_shape(source, machine)
    profiled = source["workload"]
    read_config(source["ds_config"])
    if source["model"] is not None:
        check_model(source["model"])
    return FactsFromFlags(
        source["model"],
        source["ds_config"],
        None if profiled is None else read(Workload, profiled, "--workload"),
        shape,
        strategy,
        {} if ratio is None else {"ratio": ratio},
    )


def _show(calibrated: Calibrated, runs: int, out: str) -> None:
    for knob, changes in groupby(calibrated.changes, key=lambda change: change.knob):
        click.echo(f"{knob}:")
        for change in changes:
            spread = f"({change.low:.4g} to {change.high:.4g})"
            click.echo(f"  {change.field:32} {change.before:10.4g} -> {change.after:10.4g}  {spread}")
    if calibrated.changes:
        click.echo("The true value lies in the range in parentheses with probability 50%.")
    else:
        click.echo(
            "no speed was corrected: the predictions are close to the runs, or no likely correction brings them closer"
        )
    before, left = _miss(calibrated.before_pct), _miss(calibrated.left_pct)
    counted = f"{runs} run{'s' * (runs > 1)}"
    click.echo(f"{counted}: the mean error of the predicted phase times was {before} and is now {left}. Wrote {out}")


def _miss(percent: float) -> str:
    factor = 1 + percent / 100
    return f"{percent:.1f}%" if factor < LARGE_MISS else f"a factor of {factor:.1f}"


def _loop_change(before: Machine, after: Machine) -> list[Change]:
    from ebbtide.tuner.calibrate.calibration import Change

    loop, old = after.loop_s, before.loop_s
    if loop is None or loop == old:
        return []
    was = 0.0 if old is None else old.median
    return [Change("between the phases", "loop_s", was, loop.median, loop.q1, loop.q3)]

"""The text and JSON output of ``tune search``."""

from dataclasses import asdict
from typing import Any

from ebbtide.simulator.limits import size
from ebbtide.tuner.configurations.evaluation import ConfigurationOutcome
from ebbtide.tuner.configurations.measuring import Measurement
from ebbtide.tuner.configurations.search_answer import SearchAnswer
from ebbtide.tuner.configurations.space import OF_SCRIPT, Configuration
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_QUICK = "~"


def show(answer: SearchAnswer, console: Console) -> None:
    """Print the result of a configuration search: sentences, the Pareto front of speed and GPU memory, and the
    best speed with each value of each varied setting.
    """
    for remark in answer.remarks():
        console.print(remark)
    if not answer.fitting:
        return
    if answer.measured:
        console.print(_measured(answer))
    console.print(_front(answer))
    if any(o.quick for o in answer.front):
        console.print(f"{_QUICK}: by a quick plan. `tune plan` may find a faster one")
    console.print(_costs(answer))
    console.print(
        "A plan never changes training results. If you train with another configuration than before, such as another "
        "micro-batch size, the last bits of gradient sums may change."
    )


def _front(answer: SearchAnswer) -> Table:
    certain = "" if answer.complete else " (of those simulated)"
    table = Table(title=f"fastest configuration for each amount of GPU memory{certain}")
    for column in ("configuration", "tokens/s", "iteration", "GPU", "host"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for o in answer.front:
        table.add_row(
            o.configuration.text(),
            f"{o.tokens_per_s:,.0f}",
            f"{_QUICK * o.quick}{o.iteration_s * 1e3:.0f} ms",
            size(o.device_peak_bytes),
            size(o.host_peak_bytes),
        )
    return table


def _measured(answer: SearchAnswer) -> Table:
    table = Table(title=f"measured on this machine ({answer.measured[0].device or 'no engine was built'})")
    for column in ("configuration", "predicted", "measured", "ratio", "tokens/s", "GPU"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for one in (*answer.fastest_measured, *(m for m in answer.measured if not m.seconds)):
        figures = [f"{one.measured_s * 1e3:.0f} ms", f"{one.ratio:.2f}", f"{one.tokens_per_s:,.0f}"]
        peak = size(one.device_peak_bytes) if one.device_peak_bytes else ""
        why = f"\n{one.why_not}" if one.why_not else ""
        cells = ["", "", "", ""] if why else [*figures, peak]
        table.add_row(escape(one.outcome.configuration.text() + why), f"{one.outcome.iteration_s * 1e3:.0f} ms", *cells)
    return table


def _costs(answer: SearchAnswer) -> Table:
    certain = "" if answer.complete else " (of those simulated)"
    table = Table(title=f"best speed with each value of a setting{certain}")
    table.add_column("setting")
    table.add_column("value: share of the fastest configuration's speed")
    untried = answer.untried()
    for knob, shares in answer.costs().items():
        cells = sorted(shares.items(), key=lambda pair: -pair[1])
        words = [f"{_value(v)}: {share:.0%}" for v, share in cells]
        words += [f"{_value(v)}: not tried, at most {share:.0%}" for v, share in untried[knob].items()]
        known = {*shares, *untried[knob]}
        without = [_value(v) for v in answer.space.choices.get(knob, ()) if v not in known]
        if without:
            words.append(f"{'/'.join(without)}: does not fit")
        table.add_row(knob, ", ".join(words))
    return table


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.0e}" if isinstance(value, int) and value >= 10**6 else str(value)


def as_json(answer: SearchAnswer) -> dict[str, Any]:
    """Return the result of a search for the fastest training configuration as JSON data, with every
    simulated configuration.
    """
    return {
        "remarks": answer.remarks(),
        "complete": answer.complete,
        "combinations": answer.combinations,
        "free": list(answer.space.free),
        "global_batch": answer.space.global_batch,
        "best": None if answer.best is None else _row(answer.best),
        **({"measured": [_measurement(one) for one in answer.measured]} if answer.measured else {}),
        "front": [_row(o) for o in answer.front],
        "costs": {knob: {str(v): share for v, share in shares.items()} for knob, shares in answer.costs().items()},
        "untried": {knob: {str(v): share for v, share in shares.items()} for knob, shares in answer.untried().items()},
        "outcomes": [_row(o) for o in answer.outcomes],
    }


def _measurement(one: Measurement) -> dict[str, Any]:
    return {
        **_row(one.outcome),
        "name": one.outcome.configuration.text(),
        "shape": _shape(one.outcome.configuration),
        "plan": one.outcome.plan and one.outcome.plan.model_dump(mode="json"),
        "measured_s": one.measured_s or None,
        "ratio": one.ratio or None,
        "tokens_per_s": one.tokens_per_s or None,
        "steps_s": list(one.seconds),
        "measured_device_peak_bytes": one.device_peak_bytes or None,
        "tokens_per_sample": one.tokens_per_sample,
        "device": one.device,
        "why_not": one.why_not or None,
        "out_of_memory": one.out_of_memory,
    }


def _shape(c: Configuration) -> dict[str, Any]:
    return {"data_parallel": c.gpus, **{knob: getattr(c, knob) for knob in OF_SCRIPT if knob != "gpus"}}


def _row(outcome: ConfigurationOutcome) -> dict[str, Any]:
    return {
        "configuration": asdict(outcome.configuration),
        "deepspeed": outcome.deepspeed,
        "fits": outcome.fits,
        "why_not": outcome.why_not or None,
        "iteration_s": outcome.iteration_s,
        "tokens_per_s": outcome.tokens_per_s,
        "device_peak_bytes": outcome.device_peak_bytes,
        "host_peak_bytes": outcome.host_peak_bytes,
        "quick": outcome.quick,
    }

"""Tables of the README and of docs/results.md, written from the studies' result files.

The result files are in studies/results/, so that no number is typed by hand.

python -m studies.readme_table          # or: make results
python -m studies.readme_table --check  # exit code 1 if a table is not up to date
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "studies" / "results"
MARKERS = "<!-- {}: begin -->", "<!-- {}: end -->"

UNFITTED = "nothing_fitted.predicted"  # predictions with the presets as they are
AS_LOGGED = "nothing_fitted.as_logged"  # rows whose logs do not give the build count as blocking
OF_ONE = "random_triples.same campaign"
CALIBRATED = "published_runs, calibrated"
# Families with runs that are held out.
TRAINING_FAMILIES = {
    "a100": "A100",
    "h100": "H100",
    "consumer_one": "one consumer card",
    "consumer_several": "several consumer cards",
    "superchip": "GH200",
    "offloaded": "offloaded state",
}

# Study -> its figures ("a.b" is b of a) and their formats, in the order of the table.
FIGURES: dict[str, dict[str, str]] = {
    "demo": {"speedup": "{:.2f}x per iteration", "bit_identical": "bit-identical: {}"},
    "update_phase": {
        "speedup": "step {:.2f}x",
        "backward_speedup": "backward {:.2f}x",
        "ebbtide_host_bytes_per_param": "{:.0f} bytes of host memory per parameter",
        "stock_host_bytes_per_param": "where stock takes {:.0f}",
        "kernel_dram_fraction": "host kernel at {:.0%} of triad bandwidth",
        "bit_identical": "bit-identical: {}",
    },
    "overlap": {
        "iteration_over_floor": "iteration / floor {:.2f}",
        "stride_over_floor": "best stride {:.2f}",
        "twin_flow_over_floor": "best Twin-Flow {:.2f}",
        "guessed_iteration_over_floor": "with updates before the norm {:.2f} of their floor",
        "gain_over_barrier": "{:.2f}x of waiting for it",
        "worst_slowdown_pct": "up to {:z.0f}% slower where steps clip",
        "bit_identical": "bit-identical: {}",
    },
    "one_answer": {
        "full_spread_pct": "full answers of all entry points differ by {:.1f}%",
        "quick_spread_pct": "quick ones are up to {:.1f}% slower",
        "default_over_possible_pct": "the default is up to {:.1f}% slower than another full search",
        "auto_expected_over_truth_pct": "what auto expects is off by up to {:+.0f}%",
        "hint_over_search_pct": "the same samples, faster: at most {:.1f}% slower than tune search",
    },
    "simulator_speed": {
        "iterations_per_s": "{:,.0f} iterations per second",
        "scaling_exponent": "cost grows with exponent {:.2f}",
    },
    "service_load": {
        "clients": "{} clients",
        "requests_per_s": "{:.0f} different simulations of an 8 B model per second",
        "p95_ms": "p95 {:.0f} ms",
        "errors": "{} errors",
        "kills": "{} kills",
        "lost_jobs": "{} jobs lost",
    },
    "optimality": {
        "median_gap_pct": "median gap {:.2f}%",
        "max_gap_pct": "largest {:.2f}%",
        "real_models.pairs": "{} real models, links and settings",
        "real_models.median_gap_pct": "{:.2f}%",
        "real_models.max_gap_pct": "largest {:.2f}%",
        "further_models.pairs": "{} further ones",
        "further_models.median_gap_pct": "{:.2f}%",
        "further_models.max_gap_pct": "largest {:.2f}%",
    },
    "parameter_offload": {
        "speedup_over_stock": "parameters in host memory {:.2f}x stock with them there",
        "predicted_over_measured": "predicted / measured {:.2f}",
        "speedup_of_share": "half of them on the device {:.2f}x that",
        "bit_identical": "bit-identical: {}",
    },
    "verify": {
        "found": "{} defects found",
        "seeded": "of {}",
        "named_rightly": "{:.0%} named rightly",
        "false_alarms": "{} false alarms",
        "right": "over {} right runs",
        "overhead_pct": "{:.1f}% a step",
    },
    "deepspeed_tests": {
        "total.mix.stock_passes": "{} of DeepSpeed's own tests of checkpoints, ZeRO pass in stock",
        "total.mix.attached": "{} of them with a plan live on what they build",
        "total.mix.failed": "{} fail",
        "total.mix.not_run": "{} not run",
        "total.auto.attached": 'under plan "auto" {} of them',
        "total.auto.failed": "{} fail",
        "total.auto.not_run": "{} not run",
    },
    "gpu.contract": {
        "compared": "a tiny model: {} configurations and placements compared with stock",
        "differing": "{} with other bits",
    },
    "gpu.one_step": {
        "lanes_overlap_s": "a tiny model: computation, copies and updates overlap for {:.3f} s of a step",
        "correct": "bit-identical: {}",
    },
    "gpu.baseline": {
        "speedup": "1.3 B model in 12 GiB: {:.2f}x per iteration",
        "noise": "second stock run / first {:.2f}",
        "predicted_over_measured": "predicted / measured {:.2f}",
        "stock_predicted_over_measured": "and of stock {:.2f}",
        "correct": "bit-identical: {}",
    },
    "fidelity": {"median_abs_pct_error": "median prediction error {:.1f}%"},
    "interleaving": {
        "h100x4_stride_2_over_stock": "H100 node: stride 2 {:.1f}x stock of 2024",
        "h100x4_ebbtide_over_stride_2": "ebbtide with equal kernels {:.2f}x stride 2",
        "h100x4_ebbtide_over_stock_today": "{:.2f}x stock as it runs today",
        "h100x4_ebbtide_fused_over_stock_today": "with its fused kernel {:.2f}x",
        "a100_stride_2_over_stock": "A100 node: {:.1f}x",
        "a100_ebbtide_over_stride_2": "{:.2f}x",
        "a100_ebbtide_over_stock_today": "{:.2f}x",
        "a100_ebbtide_fused_over_stock_today": "and {:.2f}x",
    },
    "checkpoint_crash": {
        "kills": "{} kills",
        "lost_committed": "{} committed checkpoints lost",
        "torn_visible": "{} torn ones visible",
        "not_bit_identical": "{} resumes not bit-identical",
    },
    "front_door_kills": {
        "kills": "{} kills of unchanged scripts while they save and rotate",
        "lost": "{} runs lost",
        "older_than_stock": "{} resumed from an older checkpoint than stock's",
        "not_bit_identical": "{} not bit-identical",
    },
    "checkpoint_stall": {
        "stall_below_synchronous": "stall {:.0f}x below the synchronous writer",
        "stall_below_best_asynchronous": "{:.0f}x below the best asynchronous one",
        "ebbtide_slowdown_every_10": "training {:.1%} slower with a checkpoint every 10 steps",
        "checkpoint_rate": "written at {:.2f} of a plain O_DIRECT writer's rate",
    },
    "storage_tier": {
        "speedup_over_stock_default": "{:.1f}x stock's NVMe",
        "speedup_over_stock_pipelined": "{:.1f}x its pipelines, within their host memory",
        "all_stored_speedup_over_stock_pipelined": "{:.1f}x with all state stored",
        "update_over_floor": "update / floor {:.2f}",
        "checkpoint_every_step_slowdown_pct": "a checkpoint at every step {:.1f}% slower",
        "bit_identical": "bit-identical: {}",
    },
    "checkpoint_interval": {
        "kills": "{} kills",
        "median_abs_error_points": "goodput predicted to {:.0f} points (median)",
    },
    "published_runs": {
        f"{UNFITTED}.a100.iteration.median_abs_pct_error": "nothing fitted: A100 iteration {:.1f}%",
        f"{UNFITTED}.a100.iteration.p90_abs_pct_error": "p90 {:.0f}%",
        f"{AS_LOGGED}.a100.iteration.p90_abs_pct_error": "({:.0f}% with builds as logged)",
        f"{UNFITTED}.a100.memory.median_abs_pct_error": "memory {:.1f}%",
        f"{UNFITTED}.h100x4.iteration.median_abs_pct_error": "H100 iteration {:.1f}%",
        f"{UNFITTED}.h100x4.iteration.p90_abs_pct_error": "p90 {:.0f}%",
        f"{UNFITTED}.h100x4.memory.median_abs_pct_error": "memory {:.1f}%",
        **{
            f"training.families.{family}.held_out.{figure}": text
            for family, name in TRAINING_FAMILIES.items()
            for figure, text in (
                ("median_abs_pct_error", f"training on {name}, held out: {{:.1f}}%"),
                ("p90_abs_pct_error", "p90 {:.0f}%"),
                ("one_share.median_abs_pct_error", "(one share of the peak for every GPU: {:.0f}%)"),
            )
        },
        "training.memory.held_out.median_abs_pct_error": "memory, held out: {:.1f}%",
        "training.memory.held_out.as_published.median_abs_pct_error": "(from published cells alone: {:.1f}%)",
        "training.memory.held_out.without_slack.median_abs_pct_error": "(and without slack: {:.1f}%)",
    },
    # Three random runs calibrate a machine preset, which then predicts other runs.
    CALIBRATED: {
        f"{OF_ONE}.{testbed}.{kind}.{figure}": text
        for testbed, name in (("a100", "A100"), ("h100x4", "H100"))
        for kind, what in (
            ("no_loop", f"{name} with nothing fitted"),
            ("nothing_fitted", "with the script's time between iterations"),
            ("runs_left_out", "calibrated on 3 runs of the same campaign"),
        )
        for figure, text in (("median_abs_pct_error", f"{what}: {{:.1f}}%"), ("p90_abs_pct_error", "p90 {:.0f}%"))
    },
}


def records(folder: Path) -> list[dict[str, Any]]:
    """Return a list of the contents of all studies' result files below ``folder``, in the order of their paths.

    Other JSON files are ignored.
    """
    result = []
    for path in sorted(folder.rglob("*.json")):
        document = json.loads(path.read_text())
        if isinstance(document, dict) and {"study", "command"} <= document.keys():
            result.append(document)
    return result


def table(documents: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a row per study: its name, main results, machine and command."""
    lines = ["| study | result | measured on | command |", "|---|---|---|---|"]
    for document in documents:
        figures = _figures(document)
        if figures:
            cells = [document["study"], figures, _where(document), f"`{document['command']}`"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _figures(document: dict[str, Any]) -> str:
    wanted = FIGURES.get(CALIBRATED if document.get("random_triples") else document["study"], {})
    return ", ".join(
        form.format(str(value).lower() if isinstance(value, bool) else value)
        for name, form in wanted.items()
        if isinstance(value := _value(document, name), int | float)
    )


def _value(document: dict[str, Any], name: str) -> Any:
    result: Any = document
    for key in name.split("."):
        result = result.get(key) if isinstance(result, dict) else None
    return result


def _where(document: dict[str, Any]) -> str:
    machine = document.get("machine", {})
    if document.get("device_kind") == "cuda" and machine.get("gpu"):
        return str(machine["gpu"])
    cpu = f"{machine.get('cpu', 'CPU')}, {machine.get('cores', '?')} cores, no GPU"
    kinds = {"emulated": " (emulated device)", "simulated": " (simulated)"}
    return cpu + kinds.get(str(document.get("device_kind")), "")


def gains(documents: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of predicted gains, with a row per model, machine and number of micro-batches."""
    head = ["model", "on", "samples a step and GPU", "DeepSpeed alone, as most configs have it", "at its best"]
    head += ["plan for the same config", "gain over both", "the same samples at best", "what is changed"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for case in (c for d in documents if d["study"] == "gains" for c in d["cases"]):
        several = f"{case['gpus']} x " if case["gpus"] > 1 else ""
        lacks = " (does not fit)"
        cells = [
            case["model"],
            several + case["device"],
            f"{case['accumulation']} x {case['sequence']} tokens",
            f"{case['stock_s']:.2f} s{lacks * bool(case['stock_lacks'])}",
            f"{case['best_stock_s']:.2f} s ({case['best_stock']}){lacks * bool(case['best_stock_lacks'])}",
        ]
        if case["plan_s"]:
            over = f"{case['speedup']:.1f}x, {case['speedup_over_best_stock']:.1f}x"
            changed = case["same_samples"]
            cells += [_plan_times(case), over, f"{case['same_samples_s']:.2f} s" if changed else "", changed]
        else:
            cells += ["none", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _plan_times(case: dict[str, Any]) -> str:
    mean_s, clipped_s = case["plan_s"], case.get("every_step_clips_s")
    told = f"{mean_s:.2f} s"
    return told if clipped_s is None or clipped_s <= 1.005 * mean_s else f"{told} (clipping {clipped_s:.2f})"


def replaced(page: str, rows: str, name: str = "results") -> str:
    """Return a documentation page with the text between two markers replaced by a table.

    Raises:
        ValueError: If a marker is missing from the page.
    """
    opening, closing = (marker.format(name) for marker in MARKERS)
    before, begin, rest = page.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end:
        missing = closing if begin else opening
        raise ValueError(
            f"the page with the table must have the marker {opening} and after it the marker {closing}, but "
            f"{missing} is missing"
        )
    return f"{before}{begin}\n{rows}{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the tables of the README and of docs/results.md.

    With ``--check``, no file is changed, and 1 is returned if a table is not up to date.
    """
    parser = argparse.ArgumentParser(
        prog="python -m studies.readme_table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change no file, and exit with 1 if a table is not up to date"
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results.md")
    args = parser.parse_args(argv)
    documents = records(args.records)
    stale = 0
    for path, name, made in ((args.readme, "gains", gains), (args.results, "results", table)):
        page = path.read_text()
        fresh = replaced(page, made(documents), name)
        stale |= fresh != page
        if not args.check:
            path.write_text(fresh)
    return int(stale and args.check)


if __name__ == "__main__":
    sys.exit(main())

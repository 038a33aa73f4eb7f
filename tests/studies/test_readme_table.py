import json

import pytest

from studies.readme_table import MARKERS, gains, main, records, replaced, table

BEGIN, END = (marker.format("results") for marker in MARKERS)
_RECORD = {
    "study": "update_phase",
    "command": "python -m studies.update_phase --json x",
    "speedup": 2.345,
    "bit_identical": True,
    "device_kind": "cpu",
    "machine": {"cpu": "Some CPU", "cores": 2, "gpu": None},
}


def test_a_row_has_figures_machine_and_command():
    row = table([_RECORD]).splitlines()[2]
    assert row == (
        "| update_phase | step 2.35x, bit-identical: true | Some CPU, 2 cores, no GPU "
        "| `python -m studies.update_phase --json x` |"
    )


def test_a_figure_may_lie_deeper_and_a_missing_one_is_left_out():
    bed = {"h100x4": {"iteration": {"median_abs_pct_error": 4.04}}}
    deep = {**_RECORD, "study": "published_runs", "nothing_fitted": {"predicted": bed}}
    assert "| H100 iteration 4.0% |" in table([deep])
    assert len(table([{**deep, "nothing_fitted": None}]).splitlines()) == 2


def test_what_was_emulated_says_so_and_a_gpu_has_its_name():
    assert "(emulated device)" in table([{**_RECORD, "device_kind": "emulated"}])
    cuda = {**_RECORD, "device_kind": "cuda", "machine": {"gpu": "H200", "cpu": "c", "cores": 9}}
    assert "| H200 |" in table([cuda])


def test_only_records_of_studies_are_rows(tmp_path):
    (tmp_path / "desk").mkdir()
    (tmp_path / "desk" / "a.json").write_text(json.dumps(_RECORD))
    (tmp_path / "desk" / "b.json").write_text(json.dumps([1, 2]))
    (tmp_path / "desk" / "c.json").write_text(json.dumps({**_RECORD, "study": "unknown"}))
    found = records(tmp_path)
    assert [r["study"] for r in found] == ["update_phase", "unknown"]
    assert len(table(found).splitlines()) == 3


def test_a_gain_says_what_does_not_fit():
    case = {
        "model": "M",
        "device": "D",
        "gpus": 4,
        "sequence": 8,
        "stock_s": 3.0,
        "speedup": 2.0,
        "best_stock": "ZeRO-2",
        "best_stock_s": 2.55,
        "best_stock_lacks": "",
        "speedup_over_best_stock": 1.7,
        "plan_s": 1.5,
        "stock_lacks": "",
        "accumulation": 2,
        "same_samples": "micro-batch 2, accumulation 1",
        "same_samples_s": 1.2,
    }
    none = case | {"stock_lacks": "needs more", "plan_s": None, "speedup": None}
    first, second = gains([{"study": "gains", "cases": [case, none]}]).splitlines()[2:]
    assert first == (
        "| M | 4 x D | 2 x 8 tokens | 3.00 s | 2.55 s (ZeRO-2) | 1.50 s | 2.0x, 1.7x | 1.20 s | "
        "micro-batch 2, accumulation 1 |"
    )
    assert second == "| M | 4 x D | 2 x 8 tokens | 3.00 s (does not fit) | 2.55 s (ZeRO-2) | none |  |  |  |"


def test_the_page_is_rewritten_between_its_markers_only(tmp_path):
    readme, page, folder = tmp_path / "R.md", tmp_path / "results.md", tmp_path / "records"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(_RECORD))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    readme.write_text("\n".join(marker.format("gains") for marker in MARKERS))
    arguments = ["--readme", str(readme), "--results", str(page), "--records", str(folder)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| study")
    assert text.endswith(f"|\n{END}\nafter\n")
    assert "old" not in text
    with pytest.raises(ValueError, match="is missing"):
        replaced("no markers", "x")


def test_the_readme_is_up_to_date():
    assert main(["--check"]) == 0, "studies/results/ has changed: run `make results`"

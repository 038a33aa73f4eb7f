import json

import pytest

from studies.readme_table import BEGIN, END, main, records, replaced, table

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


def test_the_page_is_rewritten_between_its_markers_only(tmp_path):
    readme, folder = tmp_path / "R.md", tmp_path / "records"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(_RECORD))
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ["--readme", str(readme), "--records", str(folder)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| study")
    assert text.endswith(f"|\n{END}\nafter\n")
    assert "old" not in text
    with pytest.raises(ValueError, match="one is missing"):
        replaced("no markers", "x")


def test_the_readme_is_up_to_date():
    assert main(["--check"]) == 0, "studies/results/ has changed: run `make results`"

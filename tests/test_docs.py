import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from ebbtide.simulator.plan import json_schema

ROOT = Path(__file__).parents[1]


def test_schema_in_the_docs_is_that_of_the_code():
    written = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
    assert written == json_schema(), "the plan file has changed: run `make schema`"


def test_no_registry_host_is_written_down():
    hosts = ("pypi" + ".org", "download.pytorch" + ".org", "pythonhosted" + ".org")
    patterns = ("*.toml", "*.txt", "*.md", "*.sh", "Makefile", ".ci/*")
    files = [f for p in patterns for f in ROOT.rglob(p) if ".venv" not in f.parts]
    assert len(files) > 5
    for file in files:
        for host in hosts:
            assert host not in file.read_text(), f"{file} names {host}"


def test_reference_pages_are_those_of_the_code():
    spec = spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    reference = module_from_spec(spec)
    spec.loader.exec_module(reference)
    for name, text in reference.pages().items():
        written = (ROOT / "docs" / name).read_text()
        assert written == text, f"docs/{name} is old: run `python scripts/reference.py`"

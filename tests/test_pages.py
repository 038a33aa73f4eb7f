"""Tests of the pages under docs/: the commands on them parse and run, the links lead somewhere, and the
quoted messages exist in the code.
"""

import ast
import re
import runpy
import shlex
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from ebbtide.simulator import simulate
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.tuner.cli import main
from PIL import Image

from tests.runtime.checkpoint.conftest import Bench, some_state
from tests.tuner.test_search import machine, workload

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LOG = "".join(  # the seconds that a model of 8 B parameters may take
    f"[Rank 0] time (ms) | fwd: {ms} | bwd: {3 * ms} | bwd_inner: 1.00 | step: {20 * ms}\n"
    for ms in (900, 800, 200, 201, 202, 203, 204)
)
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = [p for p in PAGES if p.name not in ("cli.md", "plan-file.md", "architecture.md")]
SOURCES = ("simulator", "profiler", "tuner", "runtime")


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def in_blocks(name=""):
    """Return all whole `tune` commands in the code blocks of one page of the documentation, or of all pages,
    as a reader would copy them.
    """
    pages = [page for page in [*PAGES, ROOT / "examples" / "README.md"] if page.name == (name or page.name)]
    texts = [page.read_text() for page in pages]
    return sorted({c for t in texts for c in re.findall(r"^(?: {4})?(tune .*)$", t, re.MULTILINE)})


def in_prose():
    """Return the `tune` commands that documentation pages name between backquotes."""
    texts = [page.read_text() for page in PAGES]
    return sorted({c.strip() for t in texts for c in re.findall(r"`(tune [^`\n]+)`", t)})


def command_of(line):
    """Return the click command that a `tune` command line runs, and the words that follow the command's name."""
    words, command, context = shlex.split(line)[1:], main, click.Context(main)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]}: {line}"
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize("line", in_blocks())
def test_a_command_can_be_copied(line):
    command, words = command_of(line)
    command.make_context(command.name, words)


# Commands that start programs, take long or do not end -> the tests that run them.
RUN_ELSEWHERE = {
    "run": "runtime/frontdoor/test_launchers.py and test_examples.py",
    "profile": "test_readme.py and profiler/test_script.py",
    "serve": "tuner/service/test_page.py",
    "search": "tuner/test_configurations.py",
    "verify": "tuner/test_verify.py",
}


@pytest.mark.slow
def test_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    what_pages_take_for_given(tmp_path)
    lines = [line for line in in_blocks("cli.md") if line.split()[1] not in RUN_ELSEWHERE]
    # Other commands show and report the plan that is written last.
    for line in sorted(lines, key=lambda line: ("tune plan" not in line, "h200" not in line)):
        words = shlex.split(line.replace(" /checkpoints", " checkpoints"))[1:]
        result = CliRunner().invoke(main, words)
        # The exit code of `tune doctor` depends on this machine.
        assert result.exit_code in ((0, 1) if words[0] == "doctor" else (0,)), (line, result.output)


def what_pages_take_for_given(folder):
    """Create the files that the commands in the documentation name, so that the commands can run."""
    examples = ROOT / "examples"
    (folder / "examples").symlink_to(examples)
    (folder / "config.json").write_bytes((examples / "llama-3-8b.json").read_bytes())
    (folder / "ds.json").write_bytes((examples / "ds_config.json").read_bytes())
    (folder / "train.log").write_text(LOG)
    demo = folder / "runs" / "demo"
    demo.mkdir(parents=True)
    for name in ("machine.json", "m.json"):
        machine().save(folder / name)
    for place in (folder / "workload.json", folder / "w.json", demo / "workload.json"):
        workload(6).save(place)
    Bench(folder / "checkpoints").save(some_state(), "global_step100")
    timeline = simulate(build_strategy("zero3_offload", workload(6), iterations=1), machine())
    timeline.to_perfetto(demo / "trace.json")


@pytest.mark.parametrize("line", in_prose())
def test_a_command_that_is_named_exists(line):
    command, words = command_of(line)
    flags = {flag for parameter in command.params for flag in parameter.opts} | {"--"}
    own = words[: words.index("--")] if "--" in words else words  # the rest is the script's
    assert {word for word in own if word.startswith("-")} <= flags


def test_every_page_is_in_the_menu_or_linked():
    menu = (ROOT / "mkdocs.yml").read_text()
    linked = "".join(page.read_text() for page in PAGES)
    for page in PAGES:
        name = page.relative_to(DOCS).as_posix()
        assert name in menu or f"({name})" in linked, f"no menu or page links to docs/{name}"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_pages_can_be_built(tmp_path):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    build(config)  # stops at the first warning, such as a broken link, or a page that is in no menu
    assert (tmp_path / "deepspeed-keys" / "index.html").read_text().count("<table") > 0
    assert "optimizer state" in (tmp_path / "api" / "index.html").read_text()  # made from docstrings


@cache
def said():
    """Return all string constants in the packages' sources, including the fixed parts of f-strings."""
    paths = [path for package in SOURCES for path in (ROOT / package).rglob("*.py")]
    return "\n".join(
        node.value
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def quoted():
    """Yield the messages in the first column of the documentation's tables of messages."""
    for name in ("troubleshooting.md", "errors/configuration.md"):
        for cell in re.findall(r"^\| (`[^|]*) \|", (DOCS / name).read_text(), re.MULTILINE):
            for text in re.findall(r"`([^`]+)`", cell):
                yield pytest.param(text, id=text[:40])


@pytest.mark.parametrize("message", quoted())
def test_a_message_that_a_page_explains_is_one_of_ours(message):
    assert message.strip().removeprefix('"ebbtide"').strip() in said()


FOREIGN = ("Unable to find", "`ebbtide.plan` not found")  # messages of DeepSpeed and Accelerate
# The parts of an example's message that are values and not words.
VALUES = re.compile(r"\.\.\.|\S*\d\S*|'[^']*'|\S*/\S+|\w+ =|[:.,()]|within")


def shown():
    """Yield the messages that the pages of errors show as indented lines."""
    for page in sorted((DOCS / "errors").iterdir()):
        for message in re.findall(r"^    (\S.*)$", page.read_text(), re.MULTILINE):
            if not message.startswith(FOREIGN):
                yield pytest.param(message, id=f"{page.stem}-{message[:30]}")


@pytest.mark.parametrize("message", shown())
def test_a_message_that_a_page_shows_is_one_of_ours(message):
    longest = max(VALUES.split(message), key=len).strip()
    assert len(longest.split()) > 2
    assert longest in said()


def test_a_page_for_each_error_class_people_meet():
    assert {page.name for page in (DOCS / "errors").iterdir()} == {
        Path(target).name
        for target in re.findall(r"\((errors/[\w-]+\.md)\)", (DOCS / "troubleshooting.md").read_text())
    }


MOST_WORDS = 1100  # most words of a page that is not generated
GENERATED = re.compile(r"<!-- \w+: begin -->.*?<!-- \w+: end -->", re.DOTALL)


@pytest.mark.parametrize("page", [*WRITTEN, DOCS / "architecture.md", ROOT / "README.md"], ids=lambda page: page.stem)
def test_no_page_is_too_long_to_read(page):
    assert len(GENERATED.sub("", page.read_text()).split()) <= MOST_WORDS


def test_the_quickstart_is_short():
    assert len((DOCS / "quickstart.md").read_text().splitlines()) <= 70


def test_a_page_that_shows_training_names_recomputation():
    for page in [*WRITTEN, ROOT / "README.md"]:
        text = page.read_text()
        if "TrainingArguments" in text or "plan assumes" in text:
            assert "gradient_checkpointing=True" in text, page


def test_no_text_names_a_package_of_the_index_that_is_not_there():
    texts = [*PAGES, ROOT / "README.md", ROOT / "examples" / "README.md"]
    texts += [path for package in SOURCES for path in (ROOT / package).rglob("*.py")]
    wrong = [str(path) for path in texts if re.search(r"pip install '?ebbtide", path.read_text())]
    assert wrong == []


def test_every_picture_is_on_a_page():
    texts = "".join(page.read_text() for page in [*PAGES, ROOT / "README.md"])
    assert [picture.name for picture in DOCS.glob("*.png") if f"{picture.name})" not in texts] == []


def test_the_drawn_iteration_is_todays_simulation():
    script = runpy.run_path(str(ROOT / "scripts" / "draw_iteration.py"))
    with Image.open(DOCS / "iteration.png") as picture:
        drawn = picture.text["Description"]
    assert drawn == script["description"](script["sides"]()), "run `python scripts/draw_iteration.py`"

"""Tests of ``import ebbtide``: its public names, and how a notebook shows the objects that its functions return."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import ebbtide
import numpy as np
import pytest
import torch
from ebbtide.simulator import build_strategy

from tests.tuner.test_search import machine, workload

ROOT = Path(__file__).parents[1]
PARTS = ("simulator", "profiler", "tuner", "runtime")
LLAMA = "Llama 3.2 1B"
TYPE_NAMES = {"Any", "TYPE_CHECKING", "Path", "importlib"}


HELP_AND_PROFILES = """
from click.testing import CliRunner
from ebbtide.tuner.cli import main
for command in ([], ["plan"], ["simulate"], ["search"]):
    assert CliRunner().invoke(main, [*command, "--help"]).exit_code == 0
import ebbtide.profiler.launch, ebbtide.tuner.commands.profiling
"""


PLANS = """
import tempfile
from click.testing import CliRunner
from ebbtide.tuner.cli import main
with tempfile.TemporaryDirectory() as folder:
    words = f"plan --machine rtx4090 --model llama-3.2-1b --sequence 64 --accumulation 2 --quick -o {folder}/plan.json"
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, done.output
    assert "the same samples, faster" in open(f"{folder}/plan.json").read()
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import ebbtide", {"torch", "numpy", "pydantic", "deepspeed"}),
        ("import ebbtide.runtime.checkpoint.protocol.inspect", {"torch"}),
        ("import ebbtide.tuner.placements.planning", {"pandas", "matplotlib", "optuna", "torch"}),
        (PLANS, {"optuna", "sqlalchemy", "pandas", "torch"}),
        ("import tests.runtime.plain_engine", {"deepspeed"}),
        (HELP_AND_PROFILES, {"numba", "scipy", "optuna", "pandas", "torch"}),
    ],
    ids=["ebbtide", "inspect", "quick", "plan", "plain engine", "help and profiles"],
)
def test_what_is_imported_loads_nothing_heavy(code, heavy):
    code = f"import sys\n{code}\nprint(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", ebbtide.__all__)
def test_every_name_can_be_had_and_says_what_it_is(name):
    assert len(getattr(ebbtide, name).__doc__.split()) >= 4


def test_the_reference_names_what_users_import_and_no_module_marks_itself_private():
    entries = re.findall(r"^::: ([\w.]+)\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    public = [getattr(import_module(module), name) for module, name in entries]
    offered = [("ebbtide", name) for name in ebbtide.__all__]
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text()
        imports = re.findall(r"^from (ebbtide[\w.]*) import (.+)$", text, re.MULTILINE)
        offered += [(module, name.strip()) for module, names in imports for name in names.split(",")]
        offered += re.findall(r"`(ebbtide(?:\.\w+)*)\.(\w+)\(", text)
    assert ("ebbtide.profiler", "profile_engine") in offered
    missing = [name for name in offered if getattr(import_module(name[0]), name[1]) not in public]
    assert missing == []
    files = [path for part in PARTS for path in (ROOT / part).rglob("_*.py")]
    assert {path.name for path in files} == {"__init__.py"}


def test_the_packages_list_their_names_and_no_others():
    for package in (ebbtide, ebbtide.runtime, ebbtide.tuner, ebbtide.profiler):
        listed = set(dir(package))
        assert set(package.__all__) <= listed
        assert not listed & TYPE_NAMES
    assert ebbtide.__version__


@pytest.fixture(scope="module")
def nouns():
    here, work = machine(), workload(40)
    made = ebbtide.plan(work, here)
    timeline = ebbtide.simulate(build_strategy("ebbtide", work, plan=made), here)
    return {"machine": here, "workload": work, "plan": made, "timeline": timeline}


@pytest.mark.parametrize("noun", ["machine", "workload", "plan", "timeline"])
def test_a_noun_that_ends_a_cell_is_short_and_a_table(noun, nouns):
    shown = nouns[noun]
    assert len(repr(shown)) < 300
    assert repr(shown) == str(shown)
    html = shown._repr_html_()
    assert "<table>" in html
    assert len(html) < 6000
    assert len(shown.to_frame()) == len(shown.records()) > 0
    ax = shown.plot()
    assert ax.patches or ax.collections


def test_html_is_escaped():
    named = workload(2).model_copy(update={"name": "<b>mine</b>"})
    assert "<b>mine" not in named._repr_html_()


@pytest.mark.parametrize("spelling", ["RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "rtx-4090"])
def test_a_preset_in_any_spelling(spelling):
    assert ebbtide.Machine.preset(spelling) == ebbtide.preset("rtx4090")


def test_a_preset_that_is_not_there_suggests_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'rtx4090'"):
        ebbtide.preset("rtx4009")
    with pytest.raises(ValueError, match=r"a100-node.* or .*a100-80gb|a100-80gb.* or .*a100-node"):
        ebbtide.preset("A100")


def test_a_model_by_name_config_or_module():
    transformers = pytest.importorskip("transformers")
    here = ebbtide.preset("a100-node")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=100)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    elements = sum(p.numel() for p in model.parameters())
    for given in (config, model):
        assert ebbtide.workload_from_model(given, here).params == elements
    assert ebbtide.workload_from_model("llama-3.2-1b", here).name == LLAMA
    with pytest.raises(ValueError, match="Did you mean 'Llama 3 8B'"):
        ebbtide.workload_from_model("Llama 3 9B", here)


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(100, 64)
        self.blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(64, 4, 256) for _ in range(3))
        self.head = torch.nn.Linear(64, 100)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_of_ones_own_is_read_without_its_values(device):
    with torch.device(device):
        own = Own()
    work = ebbtide.workload_from_model(own, ebbtide.preset("rtx4090"))
    assert work.params == sum(p.numel() for p in own.parameters())
    assert len(work.layers) == 5
    assert work.layers[1].params == sum(p.numel() for p in own.blocks[0].parameters())


def test_an_estimate_says_what_is_missing_and_what_fits():
    alone = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    answer = ebbtide.estimate("Llama 3 8B", batch=1, sequence=1024, gpu="RTX 4090", ds_config=alone)
    assert not answer.fits
    assert answer.strategy == "no offload"
    assert {"parameters", "gradients", "optimizer state", "activations"} <= set(answer.gpu)
    assert "GPU memory" in answer.lacks
    assert '"ebbtide"' in answer.nearest[0]
    assert "gradient_checkpointing=True" in answer.notes[0]
    offloaded = ebbtide.estimate("Llama 3 8B", batch=1, sequence=1024, gpu="RTX 4090")
    assert offloaded.fits
    assert offloaded.strategy == "ebbtide"
    assert offloaded.nearest == ()
    assert offloaded.gpu_bytes < answer.gpu_bytes
    assert offloaded.gpu_bytes <= offloaded.gpu_limit_bytes
    assert "<table>" in offloaded._repr_html_()


def test_an_estimate_is_for_what_runs_under_the_config():
    def told(zero, **more):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}, **more}
        return ebbtide.estimate(LLAMA, batch=1, sequence=512, gpu="h200", ds_config=config)

    key = {"ebbtide": {"plan": "auto"}}
    assert told({"offload_optimizer": {"device": "cpu"}}, **key).strategy == "ebbtide"
    # The runtime leaves this to DeepSpeed, which keeps all state on the GPU.
    assert told({}, **key) == told({})
    assert told({}).strategy == "no offload"
    assert told({"cpu_offload": True}) == told({"offload_optimizer": {"device": "cpu"}})
    drive = {"device": "nvme", "nvme_path": "/drive"}
    with pytest.raises(ValueError, match="device must be none or cpu to be simulated"):
        told({"offload_optimizer": {"device": "cpu"}, "offload_param": drive})


def test_an_estimate_of_what_fits_and_of_what_never_does():
    assert ebbtide.estimate(LLAMA, torch.optim.AdamW, batch=1, sequence=512, gpu="h200").fits
    small = ebbtide.preset("rtx4090").with_rates(host_memory_bytes=16 * 2**30)
    stuck = ebbtide.estimate("Llama 3 8B", "lion", batch=4, sequence=1024, gpu=small)
    assert not stuck.fits
    assert stuck.nearest
    with pytest.raises(ValueError, match="optimizer must be one of"):
        ebbtide.estimate(LLAMA, "muon", batch=1, sequence=512)


def test_frozen_parameters_and_kept_activations_are_noted():
    own = Own()
    own.tokens.weight.requires_grad_(False)
    answer = ebbtide.estimate(own, torch.optim.AdamW(own.parameters()), batch=1, sequence=16)
    assert "kept for backward" in answer.notes[0]
    assert "6400 frozen" in answer.notes[1]


def test_what_does_not_fit_names_the_ways_out_in_python():
    here = ebbtide.preset("rtx4090").with_rates(host_memory_bytes=64 * 2**30)
    work = ebbtide.workload_from_model("Llama 3 8B", here, sequence=1024)
    with pytest.raises(ebbtide.ImpossibleError, match="These fit: ") as caught:
        ebbtide.plan(work, here)
    assert caught.value.ways
    assert caught.value.ways[0].plan.prediction.iteration_s > 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda work, here: ebbtide.plan(here, work), "workload must be of type Workload, but got <Machine: "),
        (lambda work, here: ebbtide.plan("w.json", here), "workload must be of type Workload, but got 'w.json'"),
        (lambda work, here: ebbtide.plan(work, here, seed="x"), "seed must be of type int, but got 'x'"),
        (lambda work, here: ebbtide.plan(work, here, robust="sure"), "robust must be of type bool, but got 'sure'"),
        (lambda work, here: ebbtide.plan(work, here, endurance_bytes="600TB"), "endurance_bytes must be of type float"),
        (
            lambda work, here: ebbtide.plan(work, here, storage=["/nvme"]),
            r"storage must be of type Mapping\[str, int\]",
        ),
        (lambda *_: ebbtide.estimate(LLAMA, batch=1, sequence=8, gpu=3), r"gpu must be of type str \| Path \| Machine"),
        (lambda *_: ebbtide.estimate(LLAMA, batch=1, sequence=8, ds_config=[1]), "ds_config must be of type Mapping"),
        (lambda *_: ebbtide.estimate(torch.nn.Module(), batch=1, sequence=8), "must have parameters, but Module has"),
        (lambda *_: ebbtide.estimate(torch.nn.Linear, batch=1, sequence=8), "A model must be .* but got type"),
        (lambda *_: ebbtide.estimate(LLAMA, batch=0, sequence=8), "batch must be a whole number >= 1, but got 0"),
        (lambda *_: ebbtide.attach(None, "plan.json"), "engine must be an engine that deepspeed.initialize has made"),
        (lambda *_: ebbtide.estimate("", batch=1, sequence=8), "There is no known model ''"),
        (
            lambda work, here: ebbtide.build_schedule(here, work),
            "workload must be of type Workload, but got <Machine: ",
        ),
        (lambda *_: ebbtide.workload_from_model(LLAMA, "h200"), "machine must be of type Machine, but got 'h200'"),
        (lambda *_: ebbtide.preset(4090), "name must be of type str, but got 4090"),
        (
            lambda *_: ebbtide.Machine.load("w.json"),
            "w.json is not a machine this ebbtide can use: it is a workload file",
        ),
        (lambda *_: ebbtide.Plan.load("w.json"), "w.json is not a plan this ebbtide can use: it is a workload file"),
        (lambda *_: ebbtide.load_plan("none.json"), "plan must be a readable JSON file, but got none.json"),
        (lambda *_: ebbtide.Workload.load("log"), "log is not a workload this ebbtide can use: the file: must be JSON"),
        (lambda work, _: work.save("none/w.json"), "No such file or directory: '.*none/w.json'$"),
    ],
)
def test_what_a_python_call_cannot_use_is_named_in_one_line(call, says, nouns, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nouns["workload"].save("w.json")
    Path("log").write_text("fwd: 3.1")
    with pytest.raises((ValueError, OSError), match=says) as caught:
        call(nouns["workload"], nouns["machine"])
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_arguments_too():
    job = (workload(4), machine())
    made = [ebbtide.plan(*job, seed=seed, effort=0.02) for seed in (3, np.int64(3))]
    assert made[0] == made[1]
    size = 0.8 * job[1].device_memory_bytes + 0.5
    plans = [ebbtide.plan(*job, device_memory_bytes=size, effort=0.02) for size in (size, int(size))]
    assert plans[0] == plans[1]
    with pytest.raises(ValueError, match="device_memory_bytes must be of type int"):
        ebbtide.plan(*job, device_memory_bytes=float("inf"))


def test_a_file_keeps_no_job(tmp_path):
    work = ebbtide.workload_from_model(LLAMA, ebbtide.preset("h200"))
    work.save(tmp_path / "w.json")
    again = ebbtide.Workload.load(tmp_path / "w.json")
    assert again == work
    assert (again.job, work.job is None) == (None, False)
    assert SimpleNamespace(job=work.job).job.sequence == work.sequence


def test_other_subgroups_keep_the_job_and_the_offload_of_a_workload():
    work = ebbtide.workload_from_model(LLAMA, ebbtide.preset("h200"))
    size, config = work.subgroup_size // 2, object()
    assert (work.recut(size).job.sub_group_size, work.job.sub_group_size) == (size, work.subgroup_size)
    assert work.recut(size).in_pieces(size // 2).job == work.recut(size).job
    profiled = work.configured(config)
    for made in (profiled, profiled.recut(size), profiled.in_pieces(size)):
        assert (made.offload, made.job) == (config, None)


def test_a_text_for_python_names_a_flag_only_beside_the_argument():
    """Check that texts of ``simulator``, which Python callers get too, name flags of `tune` in parentheses only.

    The argument, which the field of a request has the name of, stands before the parentheses. Commands, the table
    of flags and the names of CSS variables are left out.
    """
    found = []
    for path in (ROOT / "simulator").rglob("*.py"):
        if path.name in ("knobs.py", "drawing.py"):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            values = node.values if isinstance(node, ast.JoinedStr) else [] if id(node) in parts else [node]
            text = "".join(str(value.value) for value in values if isinstance(value, ast.Constant))
            if re.search(r"(?<![\w-])--(?!local-dir)[a-z]", re.sub(r"\([^()]*\)|tune .*", "", text, flags=re.DOTALL)):
                found.append(text)
    assert found == []


def test_no_file_imports_a_folder_as_a_package_of_its_own():
    """Check that code and pages import the parts of ebbtide only as ``ebbtide.NAME``.

    The packages that the public index has under the folders' own names belong to others.
    """
    found = re.compile(rf"(from|import) ({'|'.join(PARTS)})\b")
    folders = (*PARTS, "ebbtide", "studies", "tests", "docs", "examples", "scripts")
    files = [path for folder in folders for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)]
    assert len(files) > 500
    wrong = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in [*files, *ROOT.glob("*.md")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if found.search(line)
    ]
    assert wrong == []

"""Tests that, of all of ebbtide, only ``runtime/zero`` uses DeepSpeed's modules and private members."""

import ast
from pathlib import Path

from ebbtide.runtime.zero.checks import private_names

RUNTIME = Path(private_names.__file__).parents[2]
# A checkpoint engine must have DeepSpeed's base class. Loading without the optimizer's states uses DeepSpeed's own
# script. A pipeline engine has another step. A checkpoint contains objects of DeepSpeed's classes, which a safe loader
# must name.
MAY_IMPORT = {f"checkpoint/deepspeed/{name}.py" for name in ("engine", "installation", "loading")} | {
    "checkpoint/format/plain_data.py"
}
HIDDEN = {member.name for member in (*private_names.STAGE3, *private_names.STAGE12) if member.name.startswith("_")}


def files():
    for path in sorted(RUNTIME.rglob("*.py")):
        name = path.relative_to(RUNTIME).as_posix()
        if not name.startswith("zero/"):
            yield name, ast.parse(path.read_text())


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_one_folder_imports_deepspeed():
    others = {name for name, tree in files() if any(i.split(".")[0] == "deepspeed" for i in imported(tree))}
    assert others <= MAY_IMPORT


def test_one_folder_touches_its_private_members():
    touched = [
        (name, node.attr)
        for name, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (node.attr in HIDDEN or node.attr.startswith("_DeepSpeed"))
    ]
    assert touched == []


def test_every_private_member_in_use_is_in_the_table():
    trees = {p.name: ast.parse(p.read_text()) for p in (RUNTIME / "zero").rglob("*.py")}
    defined = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    ours = defined | {
        "_ebbtide",
        "_rule",
        "_flat",
        "_gathers",
        "_overflows",
        "_hooks",
        "_swapped",
        "_unread",
        "_infinite",
        "_layers",
        "_order",
        "_alone",
        "_touch",
        "_pieces",
        "_held",
        "_module_of",
    }
    extended = {"_let_go"}  # ebbtide's own in planned.py, which the ZeRO stages extend
    unlisted = {
        (name, node.attr)
        for name in ("stage3.py", "stage12.py", "planned.py", "stage3_buffers.py", "private.py")
        for node in ast.walk(trees[name])
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("self", "optimizer", "super()")
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in HIDDEN | (extended if ast.unparse(node.value) == "super()" else ours)
    }
    assert unlisted == set()


def test_what_executes_a_plan_does_not_know_whose_gradients_it_takes():
    told = {
        path.name: [line for line in _code(path).splitlines() if "deepspeed" in line.lower()]
        for path in (RUNTIME / "execution").glob("*.py")
    }
    assert {name: lines for name, lines in told.items() if lines} == {}


def _code(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)

"""Tests of the layers of ebbtide's packages: imports point downward, no modules import each other in a
cycle, and light packages load nothing heavy.
"""

import ast
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import FIRST

ROOT = Path(__file__).parents[1]
PACKAGES = ("simulator", "profiler", "tuner", "runtime", "studies", "ebbtide")

# The parts of the runtime that the profiler may import: kernels, and facts about this host.
LEAVES = ("runtime.kernels", "runtime.hardware")
CACHE = "simulator.engines.cache"  # imports only the standard library. It says where compiled code is kept
# For each package, the packages that its modules may import when they are loaded.
MAY_IMPORT = {
    "simulator": {"simulator"},
    "profiler": {"simulator", "profiler", *LEAVES},
    "tuner": {"simulator", "profiler", "tuner"},
    "runtime": {"simulator", "runtime"},
    **{leaf: {leaf, CACHE} for leaf in LEAVES},
    "studies": set(PACKAGES),
    "ebbtide": {"simulator", "ebbtide"},
}
# Also inside functions. plan="auto" measures and plans, so functions of the runtime may import upper packages. So may
# commands of the tuner that work on checkpoints.
MAY_IMPORT_LAZILY = {
    "simulator": {"simulator"},
    # The private names of DeepSpeed are read in one place, and scripts start through one door.
    "profiler": {"simulator", "profiler", *LEAVES, "runtime.zero.checks", "runtime.zero.one_rank", "runtime.frontdoor"},
    "tuner": {"simulator", "profiler", "tuner", "runtime"},
    "runtime": {"simulator", "profiler", "tuner", "runtime"},
    **{leaf: {leaf, CACHE} for leaf in LEAVES},
    "studies": set(PACKAGES),
    "ebbtide": {"simulator", "profiler", "tuner", "runtime", "ebbtide"},
}
NOT_AT_LOAD = {
    "simulator": {"torch", "deepspeed", "optuna", "pandas", "matplotlib"},
    "runtime": {"optuna", "pandas", "matplotlib", "scipy"},
    "ebbtide": {"torch", "deepspeed", "optuna", "pandas", "matplotlib"},
}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def statements(tree: ast.AST, lazily: bool) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements in a module's syntax tree that run when the module is loaded. With
    ``lazily``, also return those inside functions.
    """
    found, queue = [], list(ast.iter_child_nodes(tree))
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif _is_type_checking(node):
            queue += node.orelse
        elif lazily or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            queue += list(ast.iter_child_nodes(node))
    return found


def names(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.removeprefix("ebbtide.") for alias in node.names]
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        base = ".".join([*kept, base]).rstrip(".")
    # `from a import b` may mean the module a.b, or a name in a.
    return [f"{base}.{alias.name}".removeprefix("ebbtide.") for alias in node.names]


@cache
def imports(module: str, lazily: bool) -> frozenset[str]:
    path = modules()[module]
    found = set()
    for node in statements(parsed(path), lazily):
        found.update(names(node, module, path.name == "__init__.py"))
    return frozenset(found)


def _all_imports(module: str) -> set[str]:
    path = modules()[module]
    nodes = list(ast.walk(parsed(path)))
    found = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    is_package = path.name == "__init__.py"
    return {name for node in found for name in names(node, module, is_package)} | {
        f"{node.args[0].value}.*".removeprefix("ebbtide.") for node in nodes if _loads_by_name(node)
    }


def _loads_by_name(node: ast.AST) -> bool:
    """Return True if a syntax node is a call that imports a module by its name: ``import_module("a.b")``, or
    ``own("a.b")`` with the function `own` of `ebbtide.runtime.frontdoor.hook`.
    """
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in ("own", "import_module")
        and any(isinstance(name, ast.Constant) for name in node.args[:1])
    )


def layer(module: str) -> str:
    leaf = next((leaf for leaf in LEAVES if module.startswith(leaf)), None)
    return leaf or module.split(".")[0]


def _within(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("lazily", [False, True])
def test_imports_point_down(lazily):
    wrong = []
    for module in modules():
        allowed = (MAY_IMPORT_LAZILY if lazily else MAY_IMPORT)[layer(module)]
        ours = [n for n in imports(module, lazily) if n.split(".")[0] in PACKAGES]
        upward = [n for n in ours if not _within(n, allowed)]
        wrong += [f"{module} may import {sorted(allowed)} only, not {n}" for n in upward]
    assert not wrong, "\n".join(wrong)


def test_every_import_of_ours_names_a_module_that_exists():
    """Check imports inside functions too, which mypy takes for untyped packages if their module has gone."""
    known = {*modules(), *PACKAGES, "ebbtide"}
    wrong = []
    for module in modules():
        ours = [n for n in imports(module, lazily=True) if n.split(".")[0] in PACKAGES]
        wrong += [f"{module} imports {n}" for n in ours if not {n, n.rpartition(".")[0]} & known]
    assert not wrong, "\n".join(wrong)


def test_light_packages_load_nothing_heavy():
    wrong = []
    for module in modules():
        forbidden = NOT_AT_LOAD.get(module.split(".")[0], set())
        heavy = [n for n in imports(module, lazily=False) if _within(n, forbidden)]
        wrong += [f"{module} must import {n} inside the functions that need it" for n in heavy]
    assert not wrong, "\n".join(wrong)


@cache
def graph_of_imports() -> dict[str, set[str]]:
    """Return a dict from each module of the project to the set of the project's modules that it imports: when
    it is loaded, inside functions, or only for type checking.
    """
    known = modules()
    graph = {}
    for module in known:
        targets = set()
        for name in _all_imports(module):
            exact = name if name in known else name.rpartition(".")[0]
            if exact in known and exact != module:
                targets.add(exact)
        graph[module] = targets
    return graph


def test_no_module_imports_itself_through_others():
    try:
        list(TopologicalSorter(graph_of_imports()).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


# The subfolders of a package, lowest first: a module may import from its own subfolder and from lower ones.
# Modules in the package's folder itself are at the bottom, unless they are named here.
# In the simulator, the modules in its folder and `update/` define the terms that all its subfolders use.
ROOMS = {
    "simulator": (("schedules",), ("engines",), ("analysis", "estimates")),
    "tuner": (
        ("calibrate",),
        ("answer",),
        ("placements",),
        ("advice",),
        ("configurations",),
        ("doctor",),
        ("verify",),
        ("service",),
        ("commands",),
        ("cli",),
    ),
    "runtime": (
        ("kernels", "hardware"),
        ("devices",),
        ("checkpoint",),
        ("storage",),
        ("execution",),
        ("replan",),
        ("verify",),
        ("zero",),
        ("frontdoor",),
    ),
    "runtime.checkpoint": (("format",), ("protocol",), ("stream",), ("trainers",), ("deepspeed",)),
}


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_rooms_know_only_what_is_below_them(package):
    floor = {room: number for number, rooms in enumerate(ROOMS[package]) for room in rooms}
    upward = []
    for module, targets in graph_of_imports().items():
        room = _room(module, package)
        for target in targets:
            other = _room(target, package)
            if not (room and other) or room == other or other not in floor:
                continue
            if room not in floor or floor[other] >= floor[room]:
                upward.append(f"{module} -> {target}")
    assert upward == []


@pytest.mark.parametrize("package", ["ebbtide", "profiler", "runtime", "simulator", "studies", "tuner"])
def test_rooms_import_each_other_in_one_direction(package):
    """Check that subpackages and single modules of a package do not import each other in a cycle."""

    graph: dict[str, set[str]] = {}
    for module, targets in graph_of_imports().items():
        if room := _room(module, package):
            graph.setdefault(room, set()).update({_room(target, package) for target in targets} - {"", room})
    floors: dict[str, int] = {}
    try:
        for room in TopologicalSorter(graph).static_order():
            floors[room] = 1 + max((floors[below] for below in graph.get(room, ())), default=0)
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")
    assert max(floors.values()) <= MOST_FLOORS


def _room(module: str, package: str) -> str:
    """Return the name that follows ``package`` in a module's dotted name, for example ``update`` for the module
    ``simulator.update.way`` and the package ``simulator``. Return an empty string if the module is not below the
    package.
    """
    inside = module.removeprefix(f"{package}.") if module.startswith(f"{package}.") else ""
    return inside.split(".")[0]


def test_every_package_has_modules_and_is_typed():
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists()
        assert any(name == package for name in modules())


BROAD = ("Exception", "BaseException")
MOST_FLOORS = 9  # longest chain of imports between the rooms of a package
MOST_FILES = 16  # most modules in a folder
MOST_LINES = 55  # most lines of a function's statements


def test_no_folder_is_a_heap():
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules().values())
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's statements. Its signature and its docstring do not count."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_can_be_read_at_once():
    long = {
        f"{module}.{node.name}": _body_lines(node)
        for module, path in modules().items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _body_lines(node) > MOST_LINES
    }
    assert long == {}


def test_a_class_name_means_one_class():
    named: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, []).append(f"{module}.{node.name}")
    assert {name: where for name, where in named.items() if len(where) > 1} == {}


def _says_why(handler: ast.ExceptHandler, lines: list[str]) -> bool:
    raises = any(isinstance(node, ast.Raise) for statement in handler.body for node in ast.walk(statement))
    return raises or "# " in lines[handler.lineno - 1]


def test_what_catches_every_exception_raises_it_or_says_why():
    silent = []
    for module, path in modules().items():
        lines = path.read_text().splitlines()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in BROAD):
                silent += [] if _says_why(node, lines) else [f"{module}:{node.lineno}"]
    assert silent == []


def test_files_of_tests_that_run_first_exist():
    assert [name for name in FIRST if not (ROOT / "tests" / name).exists()] == []

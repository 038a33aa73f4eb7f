"""Checks that ``tune doctor`` makes of the software: the compiler, the versions of packages, and the DeepSpeed
internals that ebbtide uses by name.
"""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from ebbtide.simulator.engines.cache import cache_dir, takes_files
from ebbtide.tuner.doctor.finding import Finding, bad, ok, slow
from ebbtide.tuner.doctor.known_wrong import KnownWrong, known_wrong

ROOT = Path(__file__).resolve().parents[2]


def versions() -> list[Finding]:
    """Report the installed version of each package that ebbtide needs, compared with the supported range."""
    from packaging.requirements import Requirement

    try:
        lines = requires("ebbtide") or []
    except PackageNotFoundError:
        return [slow("ebbtide", f"runs from {ROOT}, not installed", f"pip install {ROOT}")]
    wanted = [Requirement(line) for line in lines]
    checked = [_version(need.name, str(need.specifier)) for need in wanted if need.marker is None]
    wrong = [finding for finding in checked if finding.state != "ok"]
    shown = [finding for finding in checked if finding.name in ("deepspeed", "torch")]
    return [*shown, *(finding for finding in wrong if finding not in shown)]


def _version(name: str, specifier: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    fix = f"pip install '{name}{specifier}'"
    try:
        installed = version(name)
    except PackageNotFoundError:
        return bad(name, "not installed", fix)
    if not SpecifierSet(specifier).contains(installed.partition("+")[0], prereleases=True):
        return bad(name, f"{installed} is installed, but {specifier} is needed", fix)
    return ok(name, f"{installed} ({specifier})")


def known_results(config: Mapping[str, Any]) -> list[Finding]:
    """Report those known defects of the installed DeepSpeed version that make training with a given
    DeepSpeed config wrong.
    """
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        return []  # the check `versions` reports this
    rows = known_wrong(installed, config)
    if not rows:
        return [
            ok(
                "known results",
                f"no known defect of deepspeed {installed} applies here (`tune verify` compares results)",
            )
        ]
    return [_known(row) for row in rows]


def _known(row: KnownWrong) -> Finding:
    said = slow if row.only_if else bad
    return said(
        "known results",
        str(row),
        f"pip install 'deepspeed>={row.fixed}'"
        if row.fixed
        else "another optimizer, or no offload; `tune verify` shows what it does",
    )


def compiler() -> list[Finding]:
    """Report whether the software that compiles ebbtide's CPU kernel and DeepSpeed's operators is installed.

    This software is a C++ compiler, ninja and Python's header files. The check does not run the compiler.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    result = [
        ok("compiler", path)
        if path
        else bad("compiler", f"{name} is not on PATH", "install g++, or set CXX to a compiler"),
        ok("ninja", str(shutil.which("ninja")))
        if shutil.which("ninja")
        else bad(
            "ninja",
            "not on PATH: DeepSpeed cannot compile its ops",
            "activate the environment that ebbtide is installed in, or pip install ninja",
        ),
    ]
    if not header.exists():
        result.append(bad("Python.h", f"{header} does not exist", "install python3-dev"))
    return result


def build_locks() -> list[Finding]:
    """Report lock files that a killed build of a torch extension left on this machine. The next build would
    wait for them forever.
    """
    from ebbtide.runtime.hardware import builds

    root = builds.extensions_folder()
    if not takes_files(root):
        fix = "set TORCH_EXTENSIONS_DIR to a folder that can be written to"
        return [bad("build locks", f"DeepSpeed builds its ops in {root}, which cannot be written to", fix)]
    stale = [lock for lock in builds.locks(root) if builds.is_stale(lock)]
    if not stale:
        return [ok("build locks", f"none is left over in {root}")]
    return [bad("build locks", builds.lock_text(lock), f"rm {lock}") for lock in stale]


def kernel() -> list[Finding]:
    """Build and load ebbtide's CPU update kernel, as the first training step would, and report an error."""
    from ebbtide.runtime.kernels import host

    try:
        host.load()
    except (RuntimeError, OSError) as error:
        text = str(error).splitlines()
        return [bad("update kernel", text[0], "; ".join(text[1:4]) or "install a working g++")]
    return [ok("update kernel", f"built, in {cache_dir()}")]


def private_names() -> list[Finding]:
    """Report whether the installed DeepSpeed has all internal names that ebbtide uses when it trains under a plan."""
    from ebbtide.runtime.zero.checks import private
    from ebbtide.runtime.zero.checks.private_names import TESTED, missing_names

    try:
        private.check_version()
    except private.UnsupportedDeepSpeedError as error:
        first, limit = TESTED
        return [bad("private names", str(error), f"pip install 'deepspeed>={first},<{limit}'")]
    missing = missing_names()
    if missing:
        return [
            bad(
                "private names",
                f"DeepSpeed lacks {', '.join(missing)}",
                "install a DeepSpeed release: the installed copy was modified",
            )
        ]
    return [ok("private names", "DeepSpeed has all private names that ebbtide uses")]

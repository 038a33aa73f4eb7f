"""The build script that packages this checkout's top-level folders, such as ``runtime``, as parts of ``ebbtide``."""

from setuptools import find_packages, setup

FOLDERS = ("profiler", "runtime", "simulator", "tuner")

# A folder for PYTHONPATH and no package: it holds the sitecustomize.py of `tune run`.
STARTUP = "ebbtide.runtime.frontdoor.startup"

setup(
    packages=[
        "ebbtide",
        STARTUP,
        *(f"ebbtide.{name}" for top in FOLDERS for name in find_packages(include=[top, f"{top}.*"])),
    ],
    package_dir={"ebbtide": "ebbtide", **{f"ebbtide.{top}": top for top in FOLDERS}},
)

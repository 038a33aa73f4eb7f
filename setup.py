"""Maps the top-level folders of the checkout to subpackages of ``ebbtide``."""

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

#!/bin/sh
# Runs the tests of bit-identity, checkpoints and the key "ebbtide" with other versions of DeepSpeed:
#   scripts/compat.sh VERSION...
# Each version gets its own venv (under $COMPAT_DIR, by default build/compat) that contains only this
# version. All other packages, including torch, come from the environment of the `python` on PATH. Each
# version compiles its ops in its own folder, because their sources differ but their names are the same.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
folder=${COMPAT_DIR:-$here/build/compat}
packages=$(python -c 'import site; print(site.getsitepackages()[0])')
tests=${COMPAT_TESTS:-tests/runtime/contract/test_bits.py tests/runtime/contract/test_windows.py tests/runtime/contract/test_readers.py tests/runtime/contract/test_races.py tests/runtime/contract/test_pieces.py tests/runtime/checkpoint/test_engine.py tests/runtime/frontdoor/test_front_door.py}
failed=
for version in "$@"; do
    venv=$folder/$version
    if [ ! -e "$venv/ready" ]; then
        python -m venv --clear "$venv"
        "$venv/bin/python" -m pip install --quiet setuptools wheel
        echo "$packages" > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
        "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation "deepspeed==$version"
        touch "$venv/ready"
    fi
    echo "deepspeed $version:"
    # From the repository's root, so that `studies` and `tests` are this tree's.
    # DeepSpeed's ops are compiled first: within a test, a slow compilation would count against pytest's limit.
    (cd "$here" && export PATH="$venv/bin:$PATH" PYTHONPATH="$here" TORCH_EXTENSIONS_DIR="$venv/ops" &&
        "$venv/bin/python" -m studies.bench.deepspeed_ops &&
        "$venv/bin/python" -m pytest -q -p no:cacheprovider $tests) || failed="$failed $version"
done
if [ -n "$failed" ]; then
    echo "not bit-identical, or not at work, on:$failed"
    exit 1
fi

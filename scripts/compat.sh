#!/bin/sh
# The bit-identity tests, checkpoints and the front door on other DeepSpeeds: scripts/compat.sh VERSION...
# Each version gets a venv of its own (under $COMPAT_DIR, build/compat by default) that holds only
# it and sees everything else, torch included, in the environment of the `python` on PATH. Its ops
# are compiled apart from other versions', whose sources differ under the same names.
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

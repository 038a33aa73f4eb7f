#!/usr/bin/env sh
# Makes or repairs .venv. Safe to run again after it was interrupted.
#   sh scripts/setup_venv.sh        what the demo and a training run need (`make demo`)
#   sh scripts/setup_venv.sh dev    the tools of the tests on top of that (`make setup`, `make test`)
#   sh scripts/setup_venv.sh serve  what the page needs besides (`make serve`)
#   PYTHON  the Python interpreter (default: the first of python3, python3.12 and python3.11 that is
#           3.11 or 3.12)
set -eu
cd "$(dirname "$0")/.."
venv=.venv
extra=${1:-}

fail() {
    echo "setup: $*" >&2
    exit 2
}

usable() { # the versions of requires-python in pyproject.toml, with venv and pip's bootstrap
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null
}

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "Python 3.11 or 3.12 with the venv module is needed, but PYTHON=$PYTHON" \
            "is $("$PYTHON" --version 2>&1 || true): name another one, make PYTHON=/path/to/python3.12"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or 3.12 with the venv module is needed, but python3 is" \
        "$(python3 --version 2>&1 || echo missing): install one (on Debian also python3-venv)," \
        "or name it, make PYTHON=/path/to/python3.12"
}

check_compiler() { # DeepSpeed and ebbtide compile their host kernels on first use
    "${CXX:-c++}" --version >/dev/null 2>&1 || fail "a C++ compiler is needed, but ${CXX:-c++}" \
        "does not run: install g++ or clang++, or name one with CXX=..."
    header=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
    [ -f "$header" ] || fail "Python's C headers are needed, but $header does not exist:" \
        "install python3-dev"
}

has_gpu() {
    nvidia-smi -L 2>/dev/null | grep -q GPU
}

has_torch() { # the versions of torch in pyproject.toml, in the environment of a Python interpreter
    "$1" -c 'import sys, torch; sys.exit(not (2, 10) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 16))' \
        2>/dev/null
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    options=
    if has_gpu && has_torch "$1"; then # keep the torch that was made for this GPU's driver
        options=--system-site-packages
    fi
    "$1" -m venv --clear $options "$venv"
}

install() { # with -qq, pip still prints its errors
    pip="$venv/bin/python -m pip install --disable-pip-version-check -qq"
    constraints=
    has_gpu || constraints="-c constraints-cpu.txt"
    if ! { has_gpu && has_torch "$venv/bin/python"; }; then
        echo "setup: torch ..."
        $pip $constraints 'torch>=2.10,<2.16'
    fi
    if [ -n "$extra" ]; then
        echo "setup: the extra [$extra] ..."
        [ "$extra" != dev ] || compile_simulator
        $pip $constraints -e ".[$extra]"
        wait
    else
        echo "setup: DeepSpeed ..."
        # All packages that the ops below import, so that pip replaces none of them while they compile.
        $pip $constraints 'deepspeed>=0.18.6,<0.20' ninja numba psutil pydantic
        compile_ops
        echo "setup: ebbtide ..."
        $pip $constraints -e '.[tune]'
    fi
}

# Takes a minute on two cores, one of which pip leaves idle: so each op is compiled in the background. The
# first process that needs an op waits for it. If the compilation failed, that process repeats it, and reports the error.
compile_ops() {
    for op in cpu_adam deepspeed_shm_comm; do
        PATH="$PWD/$venv/bin:$PATH" nice -n 5 "$venv/bin/python" -m studies.bench.deepspeed_ops "$op" \
            >/dev/null 2>&1 </dev/null &
    done
}

# Makes a plan, so that numba compiles the simulator and keeps the code on disk: 15 s, while pip installs.
# Otherwise all processes of the tests that begin together compile it. A failure is harmless, because the first process that
# plans then compiles it.
compile_simulator() {
    "$venv/bin/tune" plan --machine rtx4090 --model examples/llama-3-8b.json --sequence 256 --accumulation 2 \
        -o "$venv/first-plan.json" >/dev/null 2>&1 </dev/null &
}

python=$(choose_python)
check_compiler "$python"
echo "setup: $("$python" --version), $(has_gpu && echo 'an NVIDIA GPU' || echo 'no GPU'); installing into $venv"
make_venv "$python"
install
touch "$venv/.ready${extra:+-$extra}"
echo "setup: done"

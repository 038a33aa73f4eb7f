#!/usr/bin/env sh
# Runs the GPU suite on a machine without a network, with the machine's own Python and torch:
#   sh scripts/gpu_suite.sh OUT [arguments of python -m studies.gpu]
# Installs the packages in .whl/ (see scripts/gpu_wheels.sh) into a separate folder, and changes nothing else.
set -eu
[ $# -ge 1 ] || { echo "usage: sh scripts/gpu_suite.sh OUT [--minutes 9 --part smoke|contract|baseline|peers|speed]" >&2; exit 2; }
out=$1
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
packages=${EBBTIDE_PACKAGES:-$PWD/.whl/installed}

if [ ! -f "$packages/.ready" ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$packages" .whl/*.whl
    touch "$packages/.ready"
fi
export PYTHONPATH="$packages:$PWD${PYTHONPATH:+:$PYTHONPATH}" PATH="$packages/bin:$PATH"

"$python" - <<'EOF'
import importlib, sys
needed = ["torch", "triton", "deepspeed", "pydantic", "numpy", "scipy", "pandas", "matplotlib",
          "numba", "rich", "click", "joblib", "xxhash", "psutil", "pynvml", "ninja"]
missing, broken = [], []
for name in needed:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing.append(name if error.name == name else f"{error.name} (of {name})")
    except Exception as error:  # incompatible versions fail here, and not an hour later
        broken.append(f"{name}: {error}")
if missing:
    sys.exit(f"gpu_suite: these modules are needed, but are missing: {', '.join(missing)}; "
             "install them, or carry their wheels in .whl/ (scripts/gpu_wheels.sh)")
if broken:
    sys.exit("gpu_suite: these modules cannot be imported: " + "; ".join(broken))
EOF
exec "$python" -m studies.gpu --out "$out" "$@"

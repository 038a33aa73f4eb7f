#!/usr/bin/env sh
# Builds the wheel, installs it into an empty environment, and tries what a training node needs of it.
#   sh scripts/check_wheel.sh [FOLDER]   works in FOLDER, a new temporary one without
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
constraints=
nvidia-smi -L >/dev/null 2>&1 || constraints="-c $root/constraints-cpu.txt"
unset PYTHONPATH

# From a copy, so that no build folder is left beside the sources.
git -C "$root" archive HEAD | (mkdir -p "$folder/source" && tar -x -C "$folder/source")
python3 -m venv --clear "$folder/venv"
pip="$folder/venv/bin/python -m pip --disable-pip-version-check -q"
$pip wheel --no-deps -w "$folder" "$folder/source"
# shellcheck disable=SC2086 - no constraints are no word
$pip install $constraints "$folder"/ebbtide-*.whl

cd "$folder"
PATH=$folder/venv/bin:$PATH
# Its own: two environments that share compiled ops rebuild each other's in turns.
export TORCH_EXTENSIONS_DIR="$folder/ops"
tune --version
python - <<'PYTHON'
import resource, subprocess, sys, time
from importlib.metadata import distributions

names = {d.name.lower() for d in distributions()}
surplus = names & {"optuna", "matplotlib", "pandas", "transformers"}
assert not surplus, f"a training node must not need {surplus}"
begin = time.perf_counter()
import ebbtide.runtime
print(f"import ebbtide.runtime: {time.perf_counter() - begin:.3f} s, "
      f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB, "
      f"{len(sys.modules)} modules")
from ebbtide.runtime.kernels import host
host.load()  # its C++ source is in the wheel
PYTHON
# An engine under a plan, through the front door, without a checkout anywhere near.
cp "$root/examples/plain_loop.py" .
cat > ds.json <<'JSON'
{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
 "ebbtide": {"plan": {"subgroup_size": 1000000000, "placement": [{"placement": "host", "count": 1}]}}}
JSON
tune run -- torchrun --nproc-per-node 1 plain_loop.py ds.json 3 >run.txt 2>&1 || { cat run.txt; exit 1; }
grep -q 'step 2: loss' run.txt
status=0
tune doctor --checkpoint-dir . || status=$?
echo "check_wheel: done in $folder (tune doctor: exit code $status)"

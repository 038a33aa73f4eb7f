#!/usr/bin/env sh
# Builds the wheel, installs it into an empty environment, and runs there what users run.
#   sh scripts/check_wheel.sh [FOLDER]   works in FOLDER, a new temporary one without
#   PACKAGES  a site-packages folder with the dependencies and pip: nothing is downloaded then
#   STARTUP  a folder for PYTHONPATH without modules of ebbtide. Its sitecustomize.py may save seconds per process
#   NUMBA_DISABLE_JIT=1  spares ten seconds: numba compiles one kernel only, and the first plan runs as plain Python
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
constraints=
nvidia-smi -L >/dev/null 2>&1 || constraints="-c $root/constraints-cpu.txt"
unset PYTHONPATH
[ -z "${STARTUP:-}" ] || export PYTHONPATH="$STARTUP"

# PACKAGES contains pip too. Installing another pip would take two seconds.
python3 -m venv --clear ${PACKAGES:+--without-pip} "$folder/venv"
pip="$folder/venv/bin/python -m pip --disable-pip-version-check -q"
if [ -n "${PACKAGES:-}" ]; then
    echo "$PACKAGES" >"$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
fi
sh "$root/scripts/build_wheel.sh" "$folder" "$folder/venv/bin/python"
if [ -n "${PACKAGES:-}" ]; then
    # Only this environment gets the wheel. A copy of ebbtide in PACKAGES stays as it is.
    $pip install --no-deps --no-index --ignore-installed "$folder"/ebbtide-*.whl
else
    # shellcheck disable=SC2086 - unquoted, so that an empty variable is no argument
    $pip install $constraints "$folder"/ebbtide-*.whl
    # A folder of its own, because two environments with the same folder rebuild each other's compiled ops.
    export TORCH_EXTENSIONS_DIR="$folder/ops"
fi

cd "$folder"
if [ -n "${PACKAGES:-}" ]; then
    PATH=$(cd "$PACKAGES/../../../bin" && pwd):$PATH # with its ninja, because another version would build everything again
fi
PATH=$folder/venv/bin:$PATH
python - ebbtide-*.whl <<'PYTHON'
import sys, zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
assert tops == {"ebbtide"}, f"the wheel must hold the package ebbtide alone, but holds {tops}"
inside = {name.split("/")[1] for name in names if name.startswith("ebbtide/")}
assert not inside & {"studies", "tests", "scripts"}, f"the wheel must not hold {inside}"
assert {"py.typed", "simulator", "profiler", "tuner", "runtime"} <= inside, inside
assert "ebbtide/runtime/frontdoor/startup/sitecustomize.py" in names, "tune run would do nothing"
PYTHON
tune --version
NUMBA_DISABLE_JIT=0 python - "$folder" <<'PYTHON'
import resource, sys, time
from importlib.metadata import distributions
from pathlib import Path

if not any(Path(path).name == "packages.pth" for path in Path(sys.argv[1]).rglob("*.pth")):
    names = {d.name.lower() for d in distributions()}
    surplus = names & {"matplotlib", "pandas", "transformers"}
    assert not surplus, f"a training node must not need {surplus}"
begin = time.perf_counter()
import ebbtide.runtime
assert sys.argv[1] in ebbtide.runtime.__file__, f"this is another copy: {ebbtide.runtime.__file__}"
print(f"import ebbtide.runtime: {time.perf_counter() - begin:.3f} s, "
      f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB, "
      f"{len(sys.modules)} modules")
from ebbtide.runtime.kernels import host
host.load()  # its C++ source is in the wheel
from ebbtide.simulator.engines.kernel import _is_copy
assert _is_copy(0) in (True, False) and _is_copy.signatures, "numba must compile the wheel's kernels"
PYTHON

begin=$(date +%s)
echo '{"layers": 2, "hidden": 1024, "heads": 8, "vocabulary": 32000}' >model.json
tune plan --machine rtx4090 --model model.json --sequence 256 --emit-deepspeed planned.json
echo "check_wheel: first plan after $(($(date +%s) - begin)) s"

# Train under a plan with the key "ebbtide", without a checkout of the repository.
cp "$root/examples/plain_loop.py" .
cat > ds.json <<'JSON'
{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
 "ebbtide": {"plan": {"subgroup_size": 1000000000, "placement": [{"placement": "host", "count": 1}]}}}
JSON
tune run -- python plain_loop.py ds.json 3 >run.txt 2>&1 || { cat run.txt; exit 1; }
grep -q 'step 2: loss' run.txt
grep -q 'ebbtide: 1 subgroups on' run.txt || { cat run.txt; exit 1; }

if python -c 'from importlib.util import find_spec as find; exit(not (find("fastapi") and find("uvicorn")))'; then
    python - <<'PYTHON'
import json, subprocess, time, urllib.request

server = subprocess.Popen(["tune", "serve", "--db", "service.db", "--port", "0"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
try:
    line = next(line for line in server.stdout if "http://" in line)
    address = line[line.index("http://"):].split()[0].split("#")[0].rstrip("/.,")
    machines = json.load(urllib.request.urlopen(f"{address}/api/v1/machines", timeout=60))
    assert "rtx4090" in json.dumps(machines)
    page = urllib.request.urlopen(address, timeout=60).read().decode()
    assert "ebbtide" in page
finally:
    server.terminate()
    server.wait(60)
print(f"tune serve answered at {address}")
PYTHON
fi
status=0
tune doctor --checkpoint-dir . || status=$?
[ "$status" -le 1 ]
echo "check_wheel: done in $folder (tune doctor: exit code $status)"

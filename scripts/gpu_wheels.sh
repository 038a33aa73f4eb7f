#!/usr/bin/env sh
# Downloads into .whl/ the packages that a GPU machine without a network lacks: `sh scripts/gpu_wheels.sh`.
# Then copy the checkout with .whl/ to the GPU machine, and run there `sh scripts/gpu_suite.sh OUT`.
# The GPU machine must have Python $GPU_PYTHON, torch with triton, numpy, scipy, pandas, matplotlib,
# numba, rich, pytest, and a C++ compiler, with which DeepSpeed compiles its ops.
#   GPU_PYTHON  the Python version there (default 3.12)
set -eu
cd "$(dirname "$0")/.."
version=${GPU_PYTHON:-3.12}
pip="${PIP:-python3 -m pip}"

mkdir -p .whl
$pip wheel -q --no-deps --no-build-isolation -w .whl "deepspeed==${DEEPSPEED:-0.19.8}"
# Dependencies are listed one by one, because pip cannot resolve them for another Python without torch.
$pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d .whl \
    cloudpickle hjson msgpack einops ninja packaging psutil py-cpuinfo tqdm \
    pydantic pydantic-core typing-extensions typing-inspection annotated-types \
    optuna alembic colorlog sqlalchemy greenlet mako pyyaml \
    click joblib xxhash nvidia-ml-py hypothesis sortedcontainers simpy
echo "$(ls .whl | wc -l) wheels in .whl/"

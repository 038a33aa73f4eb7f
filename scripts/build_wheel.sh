#!/usr/bin/env sh
# Builds the wheel from a copy of the tracked files, so that no build folder is left beside the sources.
#   sh scripts/build_wheel.sh FOLDER PYTHON   the wheel goes to FOLDER; PYTHON has pip, and perhaps setuptools
set -eu
folder=$1
python=$2
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
(cd "$root" && git ls-files -z --cached --others --exclude-standard | xargs -0 ls -d 2>/dev/null | tar -c -T -) |
    tar -x -C "$source"
isolation=
"$python" -c 'import setuptools; assert int(setuptools.__version__.split(".")[0]) >= 77' 2>/dev/null &&
    isolation=--no-build-isolation
rm -f "$folder"/ebbtide-*.whl
# shellcheck disable=SC2086 - unquoted, so that an empty variable is no argument
"$python" -m pip --disable-pip-version-check -q wheel --no-deps $isolation -w "$folder" "$source"

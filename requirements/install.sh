#!/usr/bin/env bash
# Makes the virtual environment $1 for a CPU machine, or leaves it alone when the pins have not changed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
pins=$(cat requirements/*.txt requirements/install.sh pyproject.toml | sha256sum)
if [ "$(cat "$venv/.pins" 2>/dev/null)" = "$pins" ]; then exit 0; fi

echo "installing into $venv (about 2.5 GB, a few minutes)"
part=0
begin() { part=$((part + 1)); echo "[$part/6] $1, ${SECONDS} s so far"; }
begin "virtual environment"
"${PYTHON:-python3.11}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-warn-conflicts)
begin "torch"
"${pip[@]}" --constraint requirements/constraints.txt torch==2.13.0
begin "packages"
"${pip[@]}" --constraint requirements/constraints.txt -r requirements/cpu.txt -r requirements/dev.txt
begin "packages without their dependencies"
"${pip[@]}" --no-deps -r requirements/cpu-no-deps.txt
begin "build tools"
"${pip[@]}" --constraint requirements/constraints.txt setuptools
begin "streamrl"
"${pip[@]}" --no-deps --no-build-isolation --editable .
echo "$pins" > "$venv/.pins"
echo "installed in ${SECONDS} s"

#!/usr/bin/env bash
# Installs streamrl with all that a CPU machine needs, from any folder:
#
#   requirements/install.sh           into the active virtual environment, else into .venv of the present folder
#   requirements/install.sh VENV      into VENV, which is made where there is none
#   UV=1 requirements/install.sh ...  with uv in pip's place
#
# PYTHON names the interpreter of a new environment (python3.11). torch comes from where pip, or uv, is told to look:
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS; UV_TORCH_BACKEND=cpu or UV_FIND_LINKS. Pins that are there are left alone.
set -euo pipefail
if [[ ${1:-} == -* ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \?//;p}' "$0"
    exit 0
fi
venv=$(realpath --no-symlinks --canonicalize-missing "${1:-${VIRTUAL_ENV:-.venv}}")
cd "$(dirname "$0")/.."
pins=$(cat requirements/*.txt requirements/install.sh pyproject.toml | sha256sum)
if [ "$(cat "$venv/.pins" 2>/dev/null)" = "$pins" ]; then exit 0; fi

if [[ -x $venv/bin/python ]]; then
    PYTHON=$venv/bin/python requirements/python.sh > /dev/null
else
    python=$(requirements/python.sh)
    if [[ -n ${UV:-} ]]; then uv venv --quiet --python "$python" "$venv"; else "$python" -m venv "$venv"; fi
fi
echo "installing into $venv (about 2.5 GB, a few minutes)"
part=0
begin() { part=$((part + 1)); echo "[$part/5] $1, ${SECONDS} s so far"; }
if [[ -n ${UV:-} ]]; then
    pip=(uv pip install --quiet --python "$venv/bin/python")
else
    pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-warn-conflicts)
fi
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

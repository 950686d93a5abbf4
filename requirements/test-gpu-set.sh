#!/usr/bin/env bash
# Installs the whole GPU set into the virtual environment $1, unless the pins there are these, and runs tests/gpu_set in
# it. No GPU is needed or used: what must be compiled on a GPU machine is faked. Prints its time and the size of $1.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
began=$SECONDS
pins=$(cat requirements/gpu*.txt requirements/test-gpu-set.sh pyproject.toml | sha256sum)
said=$(mktemp)
trap 'rm -f "$said"' EXIT

install() {
    pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-cache-dir)
    "$python" -m venv --clear "$venv" &&
        "${pip[@]}" -r requirements/gpu.txt hypothesis pytest pytest-timeout pytest-xdist setuptools &&
        "${pip[@]}" --no-deps --no-build-isolation --editable .
}

if [ "$(cat "$venv/.pins" 2>/dev/null)" != "$pins" ]; then
    python=$(requirements/python.sh)
    echo "installing into $venv (about 11 GB)"
    if ! install 2> "$said"; then
        echo "requirements/gpu.txt cannot be installed here: $( (grep ERROR "$said" || cat "$said") | tail -1)" >&2
        exit 1
    fi
    echo "$pins" > "$venv/.pins"
fi
code=0
CUDA_VISIBLE_DEVICES='' "$venv/bin/python" -m pytest --numprocesses 2 tests/gpu_set || code=$?
echo "$((SECONDS - began)) s, $(du -sh "$venv" | cut -f1)"
exit $code

#!/usr/bin/env bash
# Prints the interpreter that an environment is made with: $PYTHON, or python3.11; or one line that says what is missing.
set -euo pipefail
python=${PYTHON:-python3.11}
if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null); then
    echo "streamrl: $python is not on the path; allowed: Python 3.11 or 3.12, named by PYTHON=/path/to/python3.11" >&2
    exit 2
fi
if [[ $version != 3.11 && $version != 3.12 ]]; then
    echo "streamrl: $python is Python $version; allowed: Python 3.11 or 3.12, named by PYTHON=/path/to/python3.11" >&2
    exit 2
fi
command -v "$python"

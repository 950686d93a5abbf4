"""Harbor tasks for tests: letters to be written into a file, and checked by a script."""

from __future__ import annotations

from pathlib import Path

TOML = """version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 20.0
[agent]
timeout_sec = 60.0
[environment]
memory_mb = 1024
"""
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\nENV WANTED={word}\nCOPY wanted.txt \\\n  ./\n"
TESTS = """#!/bin/bash
# a number, and a measure beside it
said=$(cat answer.txt 2>/dev/null)
right=0
for ((place = 0; place < ${#WANTED}; place++)); do
    [ "${said:$place:1}" = "${WANTED:$place:1}" ] && right=$((right + 1))
done
longer=$(( ${#said} > ${#WANTED} ? ${#said} : ${#WANTED} ))
thousandths=$((right * 1000 / longer))
printf '{"reward": %d.%03d, "right": %d}' $((thousandths / 1000)) $((thousandths % 1000)) $right \\
    > /logs/verifier/reward.json
"""


def write_task(folder: Path, word: str, *, toml: str = TOML, dockerfile: str = DOCKERFILE, tests: str = TESTS) -> Path:
    """A task in `folder`: write `word` into answer.txt."""
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text(f"{word}\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile.format(word=word))
    (folder / "environment" / "wanted.txt").write_text(f"{word}\n")
    (folder / "tests" / "test.sh").write_text(tests)
    return folder

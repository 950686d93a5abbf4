"""The page of the first hour, followed command by command in a fresh clone, with a home that has no caches."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.documented_commands import ROOT, blocks, commands
from tests.test_docs_commands import free_port

PAGE = ROOT / "docs" / "first-hour.md"
DEADLINE = 1200.0  # seconds of one command; the first one installs everything
SHORTER = {  # what is put behind a command, so that the hour is some minutes
    "make demo": ["ARGS=run.steps=30"],
    "streamrl eval --run-folder runs/quickstart": ["evaluate.prompts=8", "evaluate.samples=4"],
    "streamrl train first/config.yaml": ["run.steps=3"],
}


class Home:
    """A clone of the repository as it is here, and a user who has nothing."""

    def __init__(self, folder: Path) -> None:
        self.clone, home = folder / "clone", folder / "home"
        home.mkdir()
        listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.clone / name, follow_symlinks=False)
        kept = ("LANG", "SSL_CERT_FILE", *(name for name in os.environ if name.startswith(("PIP_", "OPENBLAS_"))))
        python = Path(sys.base_prefix) / "bin"
        path = f"{self.clone}/.venv/bin:{python}:{os.defpath}"  # as after `source .venv/bin/activate`
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}
        self.environment |= {"HOME": str(home), "PATH": path}

    def run(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self.clone, env=self.environment, capture_output=True, text=True, timeout=DEADLINE,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def serve(self, *words: str) -> str:
        """What the server answers to a prompt of the task."""
        port = str(free_port())
        words = tuple(port if word == "30000" else word for word in words)
        server = subprocess.Popen(
            words, cwd=self.clone, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return _answer(f"http://127.0.0.1:{port}/v1/completions", server)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(30)


def _answer(address: str, server: subprocess.Popen[bytes]) -> str:
    asked = json.dumps({"model": "default", "prompt": "fab=", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(address, asked, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return str(json.load(response)["choices"][0]["text"])
        except OSError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_user_with_nothing_follows_the_page_to_its_end(tmp_path):
    home = Home(tmp_path)
    (script,) = (text for language, text in blocks(PAGE) if language == "python")
    answers = []
    for command in commands(PAGE):
        words = [*shlex.split(command.text), *SHORTER.get(command.text, [])]
        if words[0] == "source":
            assert (home.clone / words[1]).exists()
        elif "streamrl.engine.launch" in words:
            answers.append(home.serve(*words))
        else:
            home.run(*words)
    (home.clone / "generate.py").write_text(script)
    generated = home.run("python", "generate.py").strip().splitlines()[-1]
    assert generated.startswith("fab=")
    assert answers == [generated.removeprefix("fab=").replace("<|endoftext|>", "")], "both have the same model"
    assert (home.clone / "runs" / "quickstart" / "report.html").exists()

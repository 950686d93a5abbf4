"""One run of either side of `benchmarks/peers.py`: what is asked of it, its command, and the steps that it tells of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.peers_trl import Job, is_over
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lifeline import end_tree, sigterm_afterwards, unwinding_at_sigterm
from streamrl.model_dtype import with_dtype
from streamrl.observe.metrics import read_metrics
from streamrl.tasks.registry import build_task

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "pretrained.yaml"
ENVIRONMENT = ROOT / ".venv-peers"

TARGET = 0.4  # mean reward; the untrained model has 0.15
OVER = 5  # steps that it is the mean of
LEAST = 10  # steps that a run has at least, so that tokens/s are of several
TIMEOUT = 1800.0  # seconds of one run
END_GRACE = 60.0  # seconds for a run to end, once it is told to
LOOK = 2.0  # seconds between two looks at a run of streamrl
INTERRUPTED = 130  # exit code of `streamrl train` behind a SIGTERM


@dataclass(frozen=True, slots=True)
class Shape:
    """What is trained: keys of the configuration beside those of the file, and how far."""

    steps: int  # that a run has at most
    target: float | None  # mean reward at which it ends; None: it does not
    keys: Mapping[str, object] = field(default_factory=dict)


EXPLAINED = " Explain each step in full sentences, then check the result another way, and say the number last."
SHAPES = {
    "short": Shape(32, TARGET),
    "long": Shape(
        LEAST,
        None,
        {
            "task.args.suffix": json.dumps(EXPLAINED),
            "generate.sampling.max_new_tokens": 192,
            "generate.group_size": 4,
            "replay.groups_per_step": 4,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Step:
    """What both sides say of a learner step."""

    time: float  # of its end, in seconds since the epoch
    tokens: int  # trained
    reward: float  # mean
    waited: float  # seconds without training


def configuration(folder: Path, model: Path, name: str, seed: int, shape: Shape, *, dtype: str = "auto") -> Config:
    """Of a streamrl run, and so of TRL's."""
    overrides = {
        **shape.keys,
        "run.folder": folder,
        "run.name": name,
        "run.seed": seed,
        "run.steps": shape.steps,
        "model.path": model,
        "algo.advantage.std": "sample",  # as TRL divides
        "generate.probes": 0,
        "journal.keep": "resume",
        "checkpoint.every": 0,
        "publish.keep_every": 0,
        "observe.console": "false",
        "model.dtype": dtype,
    }
    return with_dtype(config_file.load(CONFIG, [f"{key}={value}" for key, value in overrides.items()]))


def run_streamrl(config: Config, target: float | None) -> list[Step]:
    """A run by the command that a user types, ended by the signal that a user ends it with."""
    file = config.run.folder / f"{config.run.name}.yaml"
    config_file.save(config, file)

    def enough() -> bool:
        return is_over([row["reward/mean"] for row in read_metrics(config.run_folder)], target, OVER, LEAST)

    run_command([sys.executable, "-m", "streamrl.cli", "train", str(file)], file.with_suffix(".log"), enough)
    return [
        Step(row["time"], row["tokens/trained"], row["reward/mean"], row["time/wait"])
        for row in read_metrics(config.run_folder)
    ]


def job(config: Config, folder: Path, target: float | None, *, bf16: bool) -> Job:
    """The same run for TRL; `folder` is its own."""
    optimizer, sampling = config.learner.optimizer, config.generate.sampling
    return Job(
        model=str(config.model.path),
        prompts=str(folder / "prompts.jsonl"),
        output=str(folder / "steps.jsonl"),
        folder=str(folder / "trl"),
        steps=config.run.steps,
        seed=config.run.seed,
        group_size=config.generate.group_size,
        groups_per_step=config.replay.groups_per_step,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        lr=optimizer.lr,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        eps_low=config.algo.eps_low,
        eps_high=config.algo.eps_high,
        bf16=bf16,
        target=target,
        over=OVER,
        least=LEAST,
    )


def run_trl(config: Config, python: Path, target: float | None, *, bf16: bool) -> list[Step]:
    """A run in TRL's environment."""
    folder = config.run.folder / config.run.name
    folder.mkdir(parents=True)
    asked = job(config, folder, target, bf16=bf16)
    task = build_task(config.task, config.run.seed, split="train")
    prompts = (task.prompt(index) for index in range(asked.steps * asked.groups_per_step))
    lines = [json.dumps({"prompt": prompt.messages, "answer": prompt.answer}) for prompt in prompts]
    Path(asked.prompts).write_text("\n".join(lines) + "\n")
    file = folder / "job.json"
    file.write_text(json.dumps(asdict(asked)))
    run_command([str(python), str(ROOT / "benchmarks" / "peers_trl.py"), str(file)], folder / "trl.log")
    rows = [json.loads(line) for line in Path(asked.output).read_text().splitlines()]
    return [Step(row["time"], row["tokens"], row["reward"], row["generation"]) for row in rows]


def run_command(command: Sequence[str], log: Path, enough: Callable[[], bool] = lambda: False) -> None:
    """Run it to its end, or to where it is `enough`; at SIGTERM it ends with the caller.

    Raises SystemExit, with its last lines, where it fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    deadline = time.monotonic() + TIMEOUT
    with log.open("wb") as output, unwinding_at_sigterm():
        process, ended = None, False
        try:
            with sigterm_afterwards():
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                )  # fmt: skip
            while process.poll() is None and time.monotonic() < deadline:
                if not ended and enough():
                    process.terminate()
                    ended = True
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
        finally:
            if process is not None and process.poll() is None:
                end_tree(process.pid, timeout=END_GRACE)
        code = process.wait()
    if code != 0 and not (ended and code == INTERRUPTED):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{tail}\n`{' '.join(command)}` ended with {code}")


def own_environment(folder: Path) -> Path:
    """The interpreter of TRL's environment, which is made where it is missing."""
    python = folder / "bin" / "python"
    pins = ROOT / "requirements" / "peers.txt"
    made = folder / ".pins"
    if not made.exists() or made.read_text() != pins.read_text():
        print(f"making TRL's environment in {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        constraints = ROOT / "requirements" / "constraints.txt"
        subprocess.run([*install, "--constraint", str(constraints), "--requirement", str(pins)], check=True)
        made.write_text(pins.read_text())
    return python

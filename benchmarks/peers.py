"""The same training by streamrl and by TRL's GRPOTrainer, in turn: trained tokens a second, and seconds to a reward.

    python -m benchmarks.peers [--quick] [--repeats N] [--model FOLDER] [--python PATH] [--json FILE] [--keep FOLDER]

    streamrl   `streamrl train configs/pretrained.yaml`: SGLang generates while Megatron-Core trains, bound 2
    trl        `GRPOTrainer` in one process: Hugging Face's generate, then a training step (`peers_trl.py`)

Both start from the same weights and ask the same prompts in the same order: one-digit sums, 8 prompts a step with 8
answers of at most 12 tokens. Both have the same reward, loss, optimizer and learning rate, are asked for passes in
bfloat16 over float32 weights, and have the whole machine with whatever threads they take by default. TRL has an
environment of its own, made from requirements/peers.txt where `--python` names no other.

A side has reached the reward at the first step at which the mean reward of five steps is TARGET. A run is ended there,
and nothing behind it counts. Tokens/s are those trained between the end of the warm-up and there,
seconds to the reward are counted from the start of the command, everything included. Waiting is the share of the time
in which nothing is trained, for want of answers: the learner's idle time, and TRL's generation. A ratio is formed
between the two runs of a repeat, which share a seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.optimum import spread
from benchmarks.peers_trl import Job, is_over, steps_to_reward
from launch import smollm2
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.metrics import read_metrics
from streamrl.tasks.registry import build_task

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "pretrained.yaml"
ENVIRONMENT = ROOT / ".venv-peers"

TARGET = 0.4  # mean reward; the untrained model has 0.15
OVER = 5  # steps that it is the mean of
WARM_UP = 2  # first steps that no tokens/s counts
LEAST = 10  # steps that a run has at least, so that tokens/s are of several
STEPS, QUICK_STEPS = 32, 4  # that it has at most
TIMEOUT = 1800.0  # seconds of one run
LOOK = 2.0  # seconds between two looks at a run of streamrl
INTERRUPTED = 130  # exit code of `streamrl train` behind a SIGTERM

WIDTH = 130  # columns of the table where there is no terminal


@dataclass(frozen=True, slots=True)
class Step:
    """What both sides say of a learner step."""

    time: float  # of its end, in seconds since the epoch
    tokens: int  # trained
    reward: float  # mean
    waited: float  # seconds without training


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side."""

    tokens_per_s: float
    to_reward: float | None  # seconds from the start of the command; None: not reached
    steps_to_reward: int | None
    first_step: float  # seconds from the start of the command to the end of the first step
    waiting: float  # share of the time
    length: float  # tokens of an answer

    @classmethod
    def of(cls, began: float, steps: Sequence[Step], samples: int, counted: int) -> Run:
        """`began`: time of the start; `samples` of a step; `counted`: steps up to where generation still worked."""
        reached = steps_to_reward([step.reward for step in steps], TARGET, OVER)
        window = steps[WARM_UP : max(reached, LEAST) if reached else counted]
        seconds = window[-1].time - steps[WARM_UP - 1].time
        return cls(
            tokens_per_s=sum(step.tokens for step in window) / seconds,
            to_reward=steps[reached - 1].time - began if reached else None,
            steps_to_reward=reached,
            first_step=steps[0].time - began,
            waiting=sum(step.waited for step in window) / seconds,
            length=statistics.mean(step.tokens for step in window) / samples,
        )


def configuration(folder: Path, model: Path, name: str, seed: int, steps: int) -> Config:
    """Of a streamrl run, and so of TRL's."""
    overrides = {
        "run.folder": folder,
        "run.name": name,
        "run.seed": seed,
        "run.steps": steps,
        "model.path": model,
        "algo.advantage.std": "sample",  # as TRL divides
        "generate.probes": 0,
        "journal.keep": "resume",
        "checkpoint.every": 0,
        "publish.keep_every": 0,
        "observe.console": "false",
    }
    return config_file.load(CONFIG, [f"{key}={value}" for key, value in overrides.items()])


def run_streamrl(config: Config) -> list[Step]:
    """A run by the command that a user types, ended by the signal that a user ends it with."""
    file = config.run.folder / f"{config.run.name}.yaml"
    config_file.save(config, file)

    def enough() -> bool:
        return is_over([row["reward/mean"] for row in read_metrics(config.run_folder)], TARGET, OVER, LEAST)

    _run([sys.executable, "-m", "streamrl.cli", "train", str(file)], file.with_suffix(".log"), enough)
    return [
        Step(row["time"], row["tokens/trained"], row["reward/mean"], row["time/wait"])
        for row in read_metrics(config.run_folder)
    ]


def job(config: Config, folder: Path) -> Job:
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
        target=TARGET,
        over=OVER,
        least=LEAST,
    )


def run_trl(config: Config, python: Path) -> list[Step]:
    """A run in TRL's environment."""
    folder = config.run.folder / config.run.name
    folder.mkdir(parents=True)
    asked = job(config, folder)
    task = build_task(config.task, config.run.seed, split="train")
    prompts = (task.prompt(index) for index in range(asked.steps * asked.groups_per_step))
    lines = [json.dumps({"prompt": prompt.messages, "answer": prompt.answer}) for prompt in prompts]
    Path(asked.prompts).write_text("\n".join(lines) + "\n")
    file = folder / "job.json"
    file.write_text(json.dumps(asdict(asked)))
    _run([str(python), str(ROOT / "benchmarks" / "peers_trl.py"), str(file)], folder / "trl.log")
    rows = [json.loads(line) for line in Path(asked.output).read_text().splitlines()]
    return [Step(row["time"], row["tokens"], row["reward"], row["generation"]) for row in rows]


def _run(command: Sequence[str], log: Path, enough: Callable[[], bool] = lambda: False) -> None:
    """Run it to its end, or to where it is `enough`. Raises SystemExit, with its last lines, where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    deadline = time.monotonic() + TIMEOUT
    ended = False
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if not ended and enough():
                    process.terminate()
                    ended = True
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
        finally:
            if process.poll() is None:
                process.kill()
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


def measure(folder: Path, model: Path, python: Path, repeats: int, steps: int) -> list[dict[str, Run]]:
    """Both sides in turn; who is first changes from repeat to repeat."""
    without_generation = math.ceil(config_file.load(CONFIG).replay.bound)  # last steps of streamrl: not counted
    done = []
    for number in range(repeats):
        seed = number + 1

        def streamrl(seed: int = seed) -> Run:
            config = configuration(folder, model, f"streamrl-{seed}", seed, steps + without_generation)
            return _timed(lambda: run_streamrl(config), config, steps)

        def trl(seed: int = seed) -> Run:
            config = configuration(folder, model, f"trl-{seed}", seed, steps)
            return _timed(lambda: run_trl(config, python), config, steps)

        sides: dict[str, Callable[[], Run]] = {"streamrl": streamrl, "trl": trl}
        turn = list(sides) if number % 2 == 0 else list(reversed(sides))
        runs = {name: sides[name]() for name in turn}
        told = ", ".join(f"{name} {runs[name].tokens_per_s:.1f} tokens/s" for name in sides)
        print(f"repeat {number + 1}: {told}", flush=True)
        done.append({name: runs[name] for name in sides})
    return done


def _timed(run: Callable[[], list[Step]], config: Config, steps: int) -> Run:
    began = time.time()
    samples = config.generate.group_size * config.replay.groups_per_step
    return Run.of(began, run(), samples, steps)


def prompt_length(config: Config) -> float:
    """Mean tokens of a prompt of the run, as the model's chat template writes it."""
    tokenizer, task = Tokenizer(config.model.path), build_task(config.task, config.run.seed, split="train")
    prompts = config.run.steps * config.replay.groups_per_step
    return statistics.fmean(len(tokenizer.prompt_ids(task.prompt(index).content)) for index in range(prompts))


def reading(prompt: float, repeats: Sequence[Mapping[str, Run]], config: Config) -> str:
    """What the training of a step reads on either side: a prompt once a group, or once an answer."""
    groups, size = config.replay.groups_per_step, config.generate.group_size
    answer = statistics.fmean(run.length for each in repeats for run in each.values())
    answers = answer * groups * size
    once_a_group, once_an_answer = prompt * groups + answers, prompt * groups * size + answers
    return (
        f"a prompt has {prompt:.1f} tokens, an answer {answer:.1f}: to train a step's {groups} x {size} answers, "
        f"streamrl's learner reads {once_a_group:.0f} tokens, a prompt once a group, and TRL's {once_an_answer:.0f}, "
        f"once an answer: {once_an_answer / once_a_group:.2f} times as many"
    )


def ratios(repeats: Sequence[Mapping[str, Run]]) -> dict[str, list[float]]:
    """streamrl over TRL, a value a repeat: higher is better."""
    found = {"tokens/s of TRL": [each["streamrl"].tokens_per_s / each["trl"].tokens_per_s for each in repeats]}
    both = [(each["trl"].to_reward, each["streamrl"].to_reward) for each in repeats]
    sooner = [theirs / ours for theirs, ours in both if theirs is not None and ours is not None]
    return found | ({"times sooner at the reward": sooner} if sooner else {})


def show(console: Console, repeats: Sequence[Mapping[str, Run]]) -> None:
    drawn = Table(title=f"{len(repeats)} repeats: median (smallest .. largest)")
    drawn.add_column("")
    for column in ("tokens/s", "first step after s", f"s to reward {TARGET:g}", "steps", "waiting", "length"):
        drawn.add_column(column, justify="right")
    for name in repeats[0]:
        runs = [each[name] for each in repeats]
        reached = [run.to_reward for run in runs if run.to_reward is not None]
        missing = f", not in {len(runs) - len(reached)}" if len(reached) < len(runs) else ""
        drawn.add_row(
            name,
            spread([run.tokens_per_s for run in runs], ".1f"),
            spread([run.first_step for run in runs], ".0f"),
            spread(reached, ".0f") + missing,
            spread([run.steps_to_reward for run in runs if run.steps_to_reward is not None], ".0f"),
            spread([run.waiting for run in runs]),
            spread([run.length for run in runs], ".1f"),
        )
    console.print(drawn)
    print("; ".join(f"{name}: {spread(values)}" for name, values in ratios(repeats).items()))


def figures(repeats: Sequence[Mapping[str, Run]], steps: int) -> dict[str, object]:
    return {
        "benchmark": "peers",
        "steps": steps,
        "target": TARGET,
        "cpus": os.cpu_count(),
        "repeats": [{name: asdict(run) for name, run in each.items()} for each in repeats],
        "ratios": [
            {"name": name, "median": statistics.median(values), "low": min(values), "high": max(values)}
            for name, values in ratios(repeats).items()
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one repeat of {QUICK_STEPS} steps: no rewards")
    parser.add_argument("--repeats", type=int, help="interleaved repeats (default: 5, quick: 1)")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; SmolLM2-135M-Instruct without it")
    parser.add_argument("--python", type=Path, help=f"interpreter with TRL (default: one made in {ENVIRONMENT.name})")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--keep", type=Path, help="new folder for the runs, to look into them later")
    options = parser.parse_args()
    if options.model and not (options.model / "config.json").exists():
        print(f"--model: {options.model} has no config.json; allowed: a Hugging Face folder", file=sys.stderr)
        return 2
    python = options.python or own_environment(ENVIRONMENT)
    steps = QUICK_STEPS if options.quick else STEPS
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = options.model.resolve() if options.model else folder / "model"
        if options.model is None:
            smollm2.convert(smollm2.find_gguf(), model)
        wanted = options.repeats or (1 if options.quick else 5)
        repeats = measure(folder, model, python, wanted, steps)
        config = configuration(folder, model, "prompts", 1, steps)
        read = reading(prompt_length(config), repeats, config)
    console = Console()
    show(console if console.is_terminal else Console(width=WIDTH), repeats)
    print(read)
    if options.json:
        options.json.write_text(json.dumps(figures(repeats, steps), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The same training by streamrl and by TRL's GRPOTrainer, in turn: trained tokens a second, and seconds to a reward.

    python -m benchmarks.peers [--shape short|long] [--quick] [--repeats N] [--model FOLDER] [--python PATH]
                               [--json FILE] [--keep FOLDER]

    streamrl, DTYPE   `streamrl train configs/pretrained.yaml`: SGLang generates while Megatron-Core trains, bound 2
    TRL, DTYPE        `GRPOTrainer` in one process: Hugging Face's generate, then a training step (`peers_trl.py`)

Both start from the same weights and ask the same prompts in the same order: one-digit sums. `short`: 8 prompts a step
with 8 answers of at most 12 tokens, up to a reward. `long`: 4 prompts with 4 answers of at most 192 tokens that explain
themselves, so that what a prompt costs counts little; it has no reward to reach, and is of speed alone.

Both have the same reward, loss, optimizer and learning rate, weights in float32, and the whole machine with whatever
threads they take by default. Both run in what `model.dtype: auto` is here, and in float32 where that is another. In
bfloat16 TRL's passes round weights that come from a file in bfloat16: at a small learning rate none moves until its
changes add up to half a rounding step, so that the faster passes may need more steps. streamrl's master weights are
dithered (`learner.optimizer.dither`). TRL has an environment of its own, made from requirements/peers.txt where
`--python` names no other.

A side has reached the reward at the first step at which the mean reward of five steps is TARGET. A run is ended there,
and nothing behind it counts. Tokens/s are those trained between the end of the warm-up and there,
seconds to the reward are counted from the start of the command, everything included. A run that ends before the reward
counts as one that needs more than its seconds: no repeat is left out (`censored.py`). Waiting is the share of the time
in which nothing is trained, for want of answers: the learner's idle time, and TRL's generation. A ratio is formed
between two runs of a repeat, which share a seed: in the same dtype, and with either in the dtype in which it does best,
by the medians of all repeats.

With `--keep` the same command goes on behind the last whole repeat of this shape on this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.censored import Interval, at_least, exact, median, over, told
from benchmarks.kept import keep, read_kept
from benchmarks.optimum import spread
from benchmarks.peers_runs import (
    CONFIG,
    ENVIRONMENT,
    LEAST,
    OVER,
    SHAPES,
    Shape,
    Step,
    configuration,
    own_environment,
    run_streamrl,
    run_trl,
)
from benchmarks.peers_trl import steps_to_reward
from benchmarks.suite import this_machine
from launch import smollm2
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.engine.hardware import bfloat16_instructions
from streamrl.generate.tokenizer import Tokenizer
from streamrl.lab.output import output_file, output_folder
from streamrl.tasks.registry import build_task

OURS, THEIRS = "streamrl", "TRL"
QUICK_STEPS = 4  # that a run of the quick form has
WARM_UP = 2  # first steps that no tokens/s counts
WIDTH = 130  # columns of the table where there is no terminal


def side(engine: str, dtype: str) -> str:
    return f"{engine}, {dtype}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side."""

    tokens_per_s: float
    to_reward: float | None  # seconds from the start of the command; None: not reached
    steps_to_reward: int | None
    first_step: float  # seconds from the start of the command to the end of the first step
    waiting: float  # share of the time
    length: float  # tokens of an answer
    ended: float  # seconds from the start of the command to the end of the last step

    @classmethod
    def of(cls, began: float, steps: Sequence[Step], samples: int, counted: int, target: float | None) -> Run:
        """`began`: time of the start; `samples` of a step; `counted`: steps up to where generation still worked."""
        reached = steps_to_reward([step.reward for step in steps], target, OVER)
        window = steps[WARM_UP : max(reached, LEAST) if reached else counted]
        seconds = window[-1].time - steps[WARM_UP - 1].time
        return cls(
            tokens_per_s=sum(step.tokens for step in window) / seconds,
            to_reward=steps[reached - 1].time - began if reached else None,
            steps_to_reward=reached,
            first_step=steps[0].time - began,
            waiting=sum(step.waited for step in window) / seconds,
            length=statistics.mean(step.tokens for step in window) / samples,
            ended=steps[-1].time - began,
        )

    @property
    def reward_time(self) -> Interval:
        """Seconds to the reward: more than to its end where it has not come to it."""
        return at_least(self.ended) if self.to_reward is None else exact(self.to_reward)


@dataclass(frozen=True, slots=True)
class Bench:
    """One start of the benchmark."""

    folder: Path
    model: Path
    python: Path  # of TRL's environment
    shape: Shape

    def sides(self, dtypes: Sequence[str]) -> dict[str, Callable[[int], Run]]:
        """A run of each in each dtype, by its seed."""
        either = ((OURS, self._streamrl), (THEIRS, self._trl))
        return {side(engine, dtype): partial(run, dtype) for engine, run in either for dtype in dict.fromkeys(dtypes)}

    def measure(self, sides: Mapping[str, Callable[[int], Run]], repeats: int) -> list[dict[str, Run]]:
        """All sides in turn; who is first changes from repeat to repeat. What the folder has is not measured again."""
        names, path = list(sides), self.folder / "repeats.jsonl"
        asked = {"model": str(self.model), "steps": self.shape.steps, "target": self.shape.target}
        known = {**asked, "machine": machine(), "sides": names}
        kept = {row["seed"]: row["runs"] for row in read_kept(path) if known == {key: row[key] for key in known}}
        done = []
        for seed in range(1, repeats + 1):
            if seed in kept:
                runs = {name: Run(**kept[seed][name]) for name in names}
            else:
                first = (seed - 1) % len(names)
                runs = {name: sides[name](seed) for name in (*names[first:], *names[:first])}
                keep(path, {**known, "seed": seed, "runs": {name: asdict(run) for name, run in runs.items()}})
            speeds = ", ".join(f"{name} {runs[name].tokens_per_s:.1f} tokens/s" for name in names)
            print(f"repeat {seed}: {speeds}{' (kept)' if seed in kept else ''}", flush=True)
            done.append({name: runs[name] for name in names})
        return done

    def _streamrl(self, dtype: str, seed: int) -> Run:
        without_generation = math.ceil(config_file.load(CONFIG).replay.bound)  # last steps: not counted
        longer = replace(self.shape, steps=self.shape.steps + without_generation)
        config = configuration(self.folder, self.model, f"streamrl-{dtype}-{seed}", seed, longer, dtype=dtype)
        return _timed(lambda: run_streamrl(config, self.shape.target), config, self.shape)

    def _trl(self, dtype: str, seed: int) -> Run:
        config = configuration(self.folder, self.model, f"trl-{dtype}-{seed}", seed, self.shape)
        bf16 = dtype == "bfloat16"
        return _timed(lambda: run_trl(config, self.python, self.shape.target, bf16=bf16), config, self.shape)


def _timed(run: Callable[[], list[Step]], config: Config, shape: Shape) -> Run:
    shutil.rmtree(config.run_folder, ignore_errors=True)  # of a repeat that was interrupted
    began = time.time()
    samples = config.generate.group_size * config.replay.groups_per_step
    return Run.of(began, run(), samples, shape.steps, shape.target)


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


def ratios(repeats: Sequence[Mapping[str, Run]]) -> dict[str, list[Interval]]:
    """streamrl over TRL, a value a repeat: higher is better. Of the reward only where any run has come to it."""
    dtypes = [name.removeprefix(side(OURS, "")) for name in repeats[0] if name.startswith(OURS)]
    faster, sooner = (
        {engine: min(dtypes, key=lambda dtype: by(repeats, side(engine, dtype))) for engine in (OURS, THEIRS)}
        for by in (_by_speed, _by_reward)
    )
    rewarded = any(run.to_reward is not None for each in repeats for run in each.values())
    found = {}
    for dtype in dtypes:
        found[f"{dtype}: tokens/s of TRL"] = _speeds(repeats, dtype, dtype)
        if rewarded:
            found[f"{dtype}: times sooner at the reward"] = _sooner(repeats, dtype, dtype)
    if len(dtypes) > 1:
        found["each in its faster dtype: tokens/s of TRL"] = _speeds(repeats, faster[OURS], faster[THEIRS])
        if rewarded:
            found["each in its sooner dtype: times sooner at the reward"] = _sooner(
                repeats, sooner[OURS], sooner[THEIRS]
            )
    return found


def _by_speed(repeats: Sequence[Mapping[str, Run]], name: str) -> tuple[float, ...]:
    return (-statistics.median(each[name].tokens_per_s for each in repeats),)


def _by_reward(repeats: Sequence[Mapping[str, Run]], name: str) -> tuple[float, ...]:
    middle = median([each[name].reward_time for each in repeats])
    return middle.high, middle.low


def _speeds(repeats: Sequence[Mapping[str, Run]], ours: str, theirs: str) -> list[Interval]:
    pairs = [(each[side(OURS, ours)], each[side(THEIRS, theirs)]) for each in repeats]
    return [exact(our.tokens_per_s / their.tokens_per_s) for our, their in pairs]


def _sooner(repeats: Sequence[Mapping[str, Run]], ours: str, theirs: str) -> list[Interval]:
    pairs = [(each[side(OURS, ours)], each[side(THEIRS, theirs)]) for each in repeats]
    return [over(their.reward_time, our.reward_time) for our, their in pairs]


def show(console: Console, repeats: Sequence[Mapping[str, Run]], shape: Shape) -> None:
    drawn = Table(title=f"{len(repeats)} repeats: median (smallest .. largest)")
    drawn.add_column("")
    of_reward = () if shape.target is None else (f"s to reward {shape.target:g}", "steps")
    for column in ("tokens/s", "first step after s", *of_reward, "waiting", "length"):
        drawn.add_column(column, justify="right")
    lines = []
    for name in repeats[0]:
        runs = [each[name] for each in repeats]
        steps = [at_least(shape.steps) if run.steps_to_reward is None else exact(run.steps_to_reward) for run in runs]
        drawn.add_row(
            name,
            spread([run.tokens_per_s for run in runs], ".1f"),
            spread([run.first_step for run in runs], ".0f"),
            *((told([run.reward_time for run in runs], ".0f"), told(steps, ".0f")) if of_reward else ()),
            spread([run.waiting for run in runs]),
            spread([run.length for run in runs], ".1f"),
        )
        if of_reward and (ended := sum(run.to_reward is None for run in runs)):
            lines.append(f"{name}: {ended} of {len(runs)} ended before the reward, and count as more than they had")
    console.print(drawn)
    for line in (*lines, *(f"{name}: {told(values)}" for name, values in ratios(repeats).items())):
        print(line)


def machine() -> str:
    """The CPU, by its name in /proc/cpuinfo."""
    found, fast = this_machine(), bfloat16_instructions()
    return f"{found.processor}, {found.cores} cores, bfloat16 {f'by {fast}' if fast else 'without instructions'}"


def figures(repeats: Sequence[Mapping[str, Run]], shape: Shape) -> dict[str, object]:
    """A ratio's values are their lower ends: what is known of a repeat in which a run ended before the reward."""
    lower = {name: [value.low for value in values] for name, values in ratios(repeats).items()}
    return {
        "benchmark": "peers",
        "steps": shape.steps,
        "target": shape.target,
        "machine": machine(),
        "cpus": os.cpu_count(),
        "repeats": [{name: asdict(run) for name, run in each.items()} for each in repeats],
        "ratios": [
            {"name": name, "median": statistics.median(values), "low": min(values), "high": max(values)}
            for name, values in lower.items()
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="short", help="of the answers (%(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"one repeat of {QUICK_STEPS} steps: no rewards")
    parser.add_argument("--repeats", type=int, help="interleaved repeats (default: 5, quick: 1)")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; SmolLM2-135M-Instruct without it")
    parser.add_argument("--python", type=Path, help=f"interpreter with TRL (default: one made in {ENVIRONMENT.name})")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    parser.add_argument("--keep", type=output_folder, help="folder for the runs and what they have measured")
    options = parser.parse_args()
    if options.model and not (options.model / "config.json").exists():
        print(f"--model: {options.model} has no config.json; allowed: a Hugging Face folder", file=sys.stderr)
        return 2
    python = options.python or own_environment(ENVIRONMENT)
    shape = SHAPES[options.shape]
    if options.quick:
        shape = replace(shape, steps=QUICK_STEPS)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = options.model.resolve() if options.model else folder / "model"
        if options.model is None and not (model / "config.json").exists():
            smollm2.convert(smollm2.find_gguf(), model)
        bench = Bench(folder, model, python, shape)
        config = configuration(folder, model, "prompts", 1, shape)
        sides = bench.sides((config.model.dtype, "float32"))
        repeats = bench.measure(sides, options.repeats or (1 if options.quick else 5))
        read = reading(prompt_length(config), repeats, config)
    console = Console()
    show(console if console.is_terminal else Console(width=WIDTH), repeats, shape)
    print(read)
    if options.json:
        content = {"shape": options.shape, **figures(repeats, shape)}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The runs from which a configuration is calibrated: its own, one with fewer in flight, then the learner alone.

    FOLDER/calibration ─▶ FOLDER/few-in-flight ─▶ FOLDER/learner-RANKS-TOKENS, each on the recorded batches (`retrain`)

The second tells what a decoding step costs from what a sample of it costs. The learner alone tells what another micro
batch, or another number of ranks, takes of the time of its own ones. What is finished is not run again.

Without GPUs, generation and learner have cores of their own: a run measures what both take, not where the kernel puts
them. The weights hardly move, as in `simulate --validate`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl import preflight
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.positions import OVERRIDE
from streamrl.engine.hardware import has_cuda, visible_gpus
from streamrl.hub.model import with_local_models
from streamrl.lab.simulate.calibration import recorded_groups
from streamrl.lab.simulate.figures import WARM_UP
from streamrl.lab.simulate.on_cores import Cores, RunEndedError, run_command
from streamrl.lab.simulate.validation import SAME, fewer
from streamrl.lab.tune.space import used
from streamrl.lab.tune.speeds import Kind, seconds_of_a_token
from streamrl.model_dtype import with_dtype
from streamrl.observe.bars import Bar
from streamrl.observe.metrics import read_metrics
from streamrl.places import RECORD, absolute, load_run
from streamrl.trainable import answer_length

ALONE_STEPS = 8  # learner steps of each measurement of the learner alone, of which the first ones do not count

# Numbers of ranks that are measured at the most; of the others an assumption is told.
MOST_RANKS = 3

MICRO_BATCH = "learner.tokens_per_micro_batch"

# Micro batches that are tried, as shares of the configured one.
MICRO_BATCHES = (0.5, 2)

# What may differ between a finished calibration run and what would be run now.
SAME_RUN = ("run.folder", "generate.attach", "stream.keys", "observe.console")


@dataclass(slots=True)
class Measured:
    """What the runs gave."""

    folders: list[Path]  # run folders, as `calibrate` takes them
    learner: dict[Kind, float] = field(default_factory=dict)  # seconds of a token, over those of its own kind
    left_out: list[str] = field(default_factory=list)  # a line each


@dataclass(slots=True)
class Calibration:
    """The runs of one configuration in one folder. `prepare` before `run`."""

    path: Path  # of the configuration
    overrides: Sequence[str]
    folder: Path
    steps: int
    budget: float  # seconds of all runs
    ranks: Sequence[int]  # other numbers of ranks that are wanted
    _config: Config = field(init=False)
    _deadline: float = field(init=False, default=0.0)

    def prepare(self) -> None:
        """Refuse what could not be run. Raises ConfigError."""
        if self.steps <= WARM_UP + 1:
            raise ConfigError(f"--steps: {self.steps} are too few to calibrate; allowed: above {WARM_UP + 1}")
        self._config = self._load("calibration", ())
        for name, more in self._wanted():
            config = self._load(name, more)
            if (run := self.folder / name / RECORD).exists():
                changed = config_file.changed(load_run(run.parent), absolute(with_local_models(config)))
                if other := [key for key in changed if key not in SAME_RUN]:
                    raise ConfigError(
                        f"--folder: {run.parent} was run with another {other[0]}; allowed: that one, or another folder"
                    )
        cores = cores_of(self._config)
        fits = len(visible_gpus()) if has_cuda() else (len(cores[1]) if cores else 1) // self._config.learner.threads
        self.ranks = _spread([ranks for ranks in self.ranks if ranks <= fits and ranks != self._config.learner.ranks])

    def lines(self) -> Iterator[str]:
        """What will be run, for a reader who may stop it."""
        config, done = self._config, [name for name, more in self._wanted() if self._is_done(name, more)]
        answers = self.steps * config.replay.groups_per_step * config.generate.group_size
        alone = len(MICRO_BATCHES) + 1 + len(self.ranks)
        yield (
            f"calibration in {self.folder}: 2 runs of {self.steps} steps ({answers:,} answers each), then the learner "
            f"alone, up to {alone} times {min(ALONE_STEPS, self.steps)} steps; ended after {self.budget:,.0f} s "
            "(--budget)"
        )
        if done:
            yield f"  done before: {', '.join(done)}"

    def run(self) -> Measured:
        """Raises RunEndedError where a run of the whole loop fails, or the budget is used up.

        Raises ConfigError where nothing can be written, before anything is started.
        """
        self._deadline = time.monotonic() + self.budget
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._log.open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"--folder: {self.folder}: {error.strerror}; allowed: a folder that can be written"
            ) from None
        with Bar("calibrate", "runs", 2 + len(MICRO_BATCHES) + 1 + len(self.ranks)) as bar:
            for name, more in self._wanted():
                if not self._is_done(name, more):
                    self._train(name, more)
                bar.advance()
            measured = Measured([self.folder / name for name, _ in self._wanted()])
            self._measure_learner(measured, bar)
        return measured

    # -- the whole loop

    def _wanted(self) -> list[tuple[str, list[str]]]:
        return [("calibration", []), ("few-in-flight", fewer(self._config))]

    def _words(self, name: str, more: Sequence[str]) -> list[str]:
        own = [f"run.folder={self.folder}", f"run.name={name}", f"run.steps={self.steps}", "run.epochs=null"]
        return [*self.overrides, *SAME, *own, *more]

    def _load(self, name: str, more: Sequence[str]) -> Config:
        return with_dtype(config_file.load(self.path, self._words(name, more)), fresh=True)

    def _is_done(self, name: str, more: Sequence[str]) -> bool:
        rows = list(read_metrics(self.folder / name)) if (self.folder / name / RECORD).exists() else []
        return len(rows) >= self._load(name, more).run.steps

    def _train(self, name: str, more: Sequence[str]) -> None:
        command = [sys.executable, "-m", "streamrl.cli", "train", str(self.path), "--fresh", *self._words(name, more)]
        self._run(command)

    @property
    def _log(self) -> Path:
        """What the runs print."""
        return self.folder / "runs.log"

    def _run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise RunEndedError(f"--budget: {self.budget:,.0f} s are used up; the same command goes on with the rest")
        run_command(command, self._log, left, cores_of(self._config), environment)

    # -- the learner alone

    def _measure_learner(self, measured: Measured, bar: Bar) -> None:
        own: Kind = (self._config.learner.ranks, self._config.learner.tokens_per_micro_batch)
        rows = list(read_metrics(self.folder / "calibration"))
        step_tokens = sum(row["tokens/trained"] for row in rows) / len(rows)
        needed = tokens_needed(self.folder / "calibration", self._config)
        wanted = [(ranks, own[1]) for ranks in self.ranks]
        for share in MICRO_BATCHES:
            micro_batch = int(own[1] * share)
            if step_tokens / own[0] <= (enough := min(micro_batch, own[1])):
                reason = f"a step has {step_tokens:,.0f} trained tokens, for which {enough} are enough"
                measured.left_out.append(f"{MICRO_BATCH}={micro_batch}: {reason}")
            elif micro_batch < own[1] and (line := too_small(micro_batch, needed) or self._refusal(micro_batch)):
                measured.left_out.append(line)
            else:
                wanted.append((own[0], micro_batch))
        if not wanted:
            return
        base = self._alone(own)
        bar.advance()
        for kind in wanted:
            try:
                measured.learner[kind] = self._alone(kind) / base
            except RunEndedError as error:
                if time.monotonic() >= self._deadline:
                    raise
                said = str(error).splitlines()[-1].removeprefix("streamrl: ")
                measured.left_out.append(f"learner.ranks={kind[0]} with {MICRO_BATCH}={kind[1]}: {said}")
            bar.advance()

    def _refusal(self, micro_batch: int) -> str | None:
        """What `train` would say of it, which knows prompts that no calibration run has asked; None: nothing."""
        try:
            config = self._load("calibration", [f"{MICRO_BATCH}={micro_batch}"])
            preflight.check(with_local_models(config), fresh=True)
        except ConfigError as error:
            line = error.lines[0].removeprefix(OVERRIDE)
            return line if line.startswith(MICRO_BATCH) else f"{MICRO_BATCH}={micro_batch}: {line}"
        return None

    def _alone(self, kind: Kind) -> float:
        """Seconds of a token. Raises RunEndedError."""
        ranks, micro_batch = kind
        folder = self.folder / f"learner-{ranks}-{micro_batch}"
        steps = min(ALONE_STEPS, self.steps)
        if len(_rows(folder)) < steps:
            shutil.rmtree(folder, ignore_errors=True)
            sets = [
                f"learner.ranks={ranks}",
                f"{MICRO_BATCH}={micro_batch}",
                "checkpoint.export=false",
            ]
            command = [sys.executable, "-m", "streamrl.cli", "retrain", str(self.folder / "calibration")]
            command += ["--output", str(folder), "--steps", str(steps), "--set", *sets]
            self._run(command, {"OMP_NUM_THREADS": str(self._config.learner.threads)})
        return seconds_of_a_token(_rows(folder)[min(WARM_UP, steps - 1) :])


def cores_of(config: Config) -> Cores | None:
    """The cores of generation and those of the learner, by what each has threads for.

    None with GPUs, with one core, and where both take turns on the same ones.
    """
    cores = sorted(os.sched_getaffinity(0))
    if has_cuda() or config.run.shares_devices or len(cores) < 2:
        return None
    rank, worker = used(config, "cores")
    share = worker / (worker + rank * config.learner.ranks)
    generating = min(len(cores) - 1, max(1, round(share * len(cores))))
    return set(cores[:generating]), set(cores[generating:])


def tokens_needed(run_folder: Path, config: Config) -> int:
    """Tokens of a micro batch that holds every recorded sequence, and a cut answer to the longest recorded prompt."""
    prompt = sequence = 0
    for group in recorded_groups(run_folder):
        for sample in group.samples:
            before = len(sample.prompt_ids)
            prompt = max(prompt, before)
            sequence = max(sequence, before + (answer_length(sample) or 0))
    return max(sequence, prompt + config.generate.sampling.max_new_tokens - 1)


def too_small(micro_batch: int, needed: int) -> str | None:
    """The line of a micro batch that is left out because it does not hold so many tokens; None for one that does."""
    if micro_batch >= needed:
        return None
    return f"{MICRO_BATCH}={micro_batch}: a prompt and its answer need up to {needed:,} tokens"


def _rows(folder: Path) -> list[dict[str, Any]]:
    return list(read_metrics(folder)) if folder.exists() else []


def _spread(ranks: Iterable[int]) -> list[int]:
    """At most MOST_RANKS of them, the smallest and the largest first.

    >>> _spread([1, 2, 3, 4, 5]), _spread([4])
    ([1, 3, 5], [4])
    """
    ordered = sorted(ranks)
    if len(ordered) <= MOST_RANKS:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(place * last / (MOST_RANKS - 1))] for place in range(MOST_RANKS)]

"""A configuration, or a finished run, tuned: calibrated, searched by simulation, chosen from by a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from streamrl import preflight
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.engine.hardware import has_cuda
from streamrl.hub.model import with_local_models
from streamrl.lab.simulate.calibration import ALONE, calibrate, learner_kind
from streamrl.lab.simulate.circle import Circle
from streamrl.lab.simulate.command import check_lengths, checked
from streamrl.lab.simulate.figures import WARM_UP, Figures, at_ends, between, figures, mean
from streamrl.lab.simulate.model import Model
from streamrl.lab.tune.runs import MICRO_BATCH, Calibration, Measured, tokens_needed, too_small
from streamrl.lab.tune.search import Found, Point, Rule, Searched, choose, search
from streamrl.lab.tune.space import Devices, Setting, Space, groups_in_flight, own_devices
from streamrl.lab.tune.speeds import DOUBLING, LearnerSpeeds, seconds_of_a_token
from streamrl.model_dtype import with_dtype
from streamrl.observe.bars import Bar
from streamrl.observe.metrics import read_metrics
from streamrl.places import RECORD, load_run, program
from streamrl.recorded.formats import answered_run

# Learner steps of a simulation behind the warm-up, and but for those at its ends.
SHORT, LONG = 12, 24

OLDEST = 8.0  # learner steps: the largest bound, unless the command line says otherwise

LONG_SIMULATIONS = 4  # of a point that is near the front: their mean counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the command line says besides configuration and rule."""

    cores: int | None = None
    gpus: int | None = None  # both None: as many as the configuration uses
    oldest: float | None = None  # largest bound; None: OLDEST, or the configuration's where that is larger
    doubling: float = DOUBLING  # of a rank's tokens/s, kept by each doubling of unmeasured ranks
    points: int = 200  # settings that are simulated


STEPS = 30  # learner steps of a calibration run
BUDGET = 3600.0  # seconds of all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The calibration runs of a configuration."""

    folder: Path | None = None  # None: beside the run's
    steps: int | None = None  # learner steps of each; None: STEPS
    budget: float | None = None  # seconds of all; None: BUDGET
    others: tuple[Path, ...] = ()  # finished ones, which count too


@dataclass(frozen=True, slots=True)
class Source:
    """What is tuned: a configuration, which is calibrated first, or a finished run, which is its calibration."""

    path: Path  # of the configuration file
    overrides: tuple[str, ...]
    run: Path | None = None

    @classmethod
    def of(cls, path: Path, overrides: Sequence[str]) -> Source:
        """Raises ConfigError."""
        if path.is_dir():
            run = answered_run(path)
            own = load_run(run, ALONE)
            check_lengths(run, own, [checked(run, own, overrides)])
            return cls(run / RECORD, tuple(overrides), run)
        return cls(path, tuple(overrides))

    def load(self, further: Sequence[str] = ()) -> Config:
        words = [*self.overrides, *further]
        if self.run is not None:
            return load_run(self.run, [*ALONE, *words])
        return with_dtype(config_file.load(self.path, words), fresh=True)

    @property
    def given(self) -> list[str]:
        """Overrides of a run with the choice, without those of the choice: it has a name of its own."""
        alone = [] if self.run is None else ALONE
        return [f"run.name={self.load().run.name}-tuned", *alone, *self.overrides]

    @property
    def words(self) -> list[str]:
        """The command that trains it."""
        return [program(), "train", str(self.path), *self.given]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What `tuned` found."""

    space: Space
    model: Model
    speeds: LearnerSpeeds
    configured: Figures | None  # None where the configured setting cannot run
    searched: Searched
    choice: Found
    notes: list[str]  # what is assumed, and what is left out

    def setting(self, found: Found) -> Setting:
        return self.space.setting(found.point)

    def overrides(self, found: Found) -> tuple[str, ...]:
        return self.space.overrides(self.setting(found))


def tuned(source: Source, rule: Rule, limits: Limits, runs: Runs) -> Tuned:
    """Calibrate and search. Raises ConfigError before anything is started, and RunEndedError."""
    config = source.load()
    if config.generate.pools:
        raise ConfigError(f"generate.pools: {len(config.generate.pools)} pools, and tune knows one kind; allowed: []")
    if not limits.doubling:
        raise ConfigError("--doubling: 0 leaves nothing of two ranks; allowed: above 0, up to 1")
    devices = _devices(source, config, limits)
    oldest = max(OLDEST, config.replay.max_staleness) if limits.oldest is None else limits.oldest
    seen = groups_in_flight(config)
    first = Space(source.load, devices, oldest=oldest, seen=seen)
    measured = _measured(source, config, first, runs)
    with Bar("tune", "simulations") as bar:
        model = calibrate(measured.folders)
        if source.run is not None:  # it has learned: answers are as long as they became
            model = replace(model, answers=model.answers.last)
        speeds = _speeds(model, measured, limits.doubling, config)
        seen = max(groups_in_flight(load_run(run)) for run in measured.folders)
        space = Space(source.load, devices, oldest=oldest, seen=seen, micro_batches=speeds.micro_batches)

        def simulate(point: Point, long: bool) -> Figures | None:
            bar.advance(LONG_SIMULATIONS if long else 1)
            return simulated(space, space.setting(point), model, speeds, long=long)

        searched = search(space.sizes, space.begins(), simulate, limits.points)
        configured = simulated(space, space.configured, model, speeds, long=True)
    if not searched.front:
        raise ConfigError(f"{source.path}: no setting can run on {devices.count} {devices.unit}")
    try:
        choice = choose(searched.front, rule)
    except ValueError as error:
        raise ConfigError(f"--mean-age: {error}") from None
    return Tuned(space, model, speeds, configured, searched, choice, _notes(space, speeds, measured))


def simulated(space: Space, setting: Setting, model: Model, speeds: LearnerSpeeds, *, long: bool) -> Figures | None:
    """What is expected of a setting between a run's begin and its end; None: it cannot run."""
    config = space.loaded(setting, ["run.epochs=null", "checkpoint.every=0"])
    if config is None:
        return None
    steps = at_ends(config) + WARM_UP + (LONG if long else SHORT)
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
    own = replace(model, learner=speeds.line(setting.ranks, setting.micro_batch))
    seeds = range(config.run.seed, config.run.seed + (LONG_SIMULATIONS if long else 1))
    try:
        return mean([figures(between(Circle(config, own, seed).run(), config)) for seed in seeds])
    except ConfigError:  # its service would give it up
        return None


# -- calibration

# A metric that runs on GPUs alone have: the machine on which they are tuned may be another one.
OF_GPUS = "memory/peak"


def _devices(source: Source, config: Config, limits: Limits) -> Devices:
    on_gpus = has_cuda() if source.run is None else any(OF_GPUS in row for row in read_metrics(source.run))
    seen = "GPUs" if on_gpus else "cores"
    for flag, unit, count in (("--gpus", "GPUs", limits.gpus), ("--cores", "cores", limits.cores)):
        if count is None:
            continue
        if unit != seen:
            raise ConfigError(f"{flag}: {count}, but speeds are calibrated on {seen}; allowed: --{seen.lower()}")
        return Devices(unit, count)
    return own_devices(config, seen)


def _measured(source: Source, config: Config, space: Space, runs: Runs) -> Measured:
    """From the run that is given, or from runs that are made now."""
    others = [answered_run(run) for run in runs.others]
    if source.run is not None:
        for flag in ("folder", "steps", "budget"):
            if (given := getattr(runs, flag)) is not None:
                raise ConfigError(f"--{flag}: {given} is for new runs, and {source.run} is done; allowed: with CONFIG")
        return Measured([source.run, *others])
    preflight.check_start(with_local_models(config), fresh=True)
    ranks = sorted({ranks for _, ranks in space.splits} - {config.learner.ranks})
    folder = (runs.folder or config.run_folder.with_name(f"{config.run.name}-tune")).absolute()
    calibration = Calibration(source.path, source.overrides, folder, runs.steps or STEPS, runs.budget or BUDGET, ranks)
    calibration.prepare()
    for line in calibration.lines():
        print(line, flush=True)
    measured = calibration.run()
    measured.folders += others
    return measured


def _speeds(model: Model, measured: Measured, doubling: float, config: Config) -> LearnerSpeeds:
    """Those measured, and those of whole runs with other learners; not of micro batches that are too small."""
    own, *others = measured.folders
    kind, known = learner_kind(load_run(own)), dict(measured.learner)
    base = seconds_of_a_token(list(read_metrics(own))[WARM_UP:])
    kinds = {run: learner_kind(load_run(run)) for run in others}
    smaller = {micro_batch for _, micro_batch in kinds.values() if micro_batch < kind[1]}
    needed = tokens_needed(own, config) if smaller else 0
    lines = {each: line for each in sorted(smaller) if (line := too_small(each, needed)) is not None}
    measured.left_out += [line for line in lines.values() if line not in measured.left_out]
    for run, other in kinds.items():
        if other != kind and other[1] not in lines:
            known[other] = seconds_of_a_token(list(read_metrics(run))[WARM_UP:]) / base
    return LearnerSpeeds(model.learner, kind, known, doubling)


def _notes(space: Space, speeds: LearnerSpeeds, measured: Measured) -> list[str]:
    """What a reader must know: assumptions first, then what is no choice."""
    left_out = [*space.left_out, *measured.left_out]
    assumed = []
    calibrated = load_run(measured.folders[0]).generate.workers
    if any(workers != calibrated for workers, _ in space.splits):
        assumed.append("generate.workers: every server is as fast as the calibrated one, on devices of its own")
    kinds = {(ranks, micro) for _, ranks in space.splits for micro in speeds.micro_batches}
    assumed += speeds.assumptions(kinds)
    if len(speeds.micro_batches) == 1 and not any(MICRO_BATCH in line for line in left_out):
        left_out.append(f"{MICRO_BATCH}: {speeds.own[1]} alone was measured (--also RUN adds one)")
    return [*(f"assumed: {line}" for line in assumed), *(f"left out: {line}" for line in left_out)]

"""Is the model right? Calibration runs and other settings for real, each beside what the model had said before.

Generation and learner have cores of their own here, as they have machines of their own elsewhere: worker and server
run on one half of the cores, the learner on the other. One server serves all runs. The weights hardly move
(`learner.optimizer.lr`), so that answers are as long in one run as in the other: it is time that is compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from streamrl import preflight
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.in_flight import most_requests, without_lag
from streamrl.config.positions import OVERRIDE
from streamrl.engine.server import serving
from streamrl.hub.model import with_local_models
from streamrl.lab.simulate.calibration import calibrate
from streamrl.lab.simulate.circle import expected
from streamrl.lab.simulate.figures import WARM_UP, Figures, figures
from streamrl.lab.simulate.model import Model
from streamrl.lab.simulate.on_cores import Cores, pin, run_command
from streamrl.model_dtype import with_dtype
from streamrl.observe.bars import Bar
from streamrl.observe.metrics import read_metrics

RATE_BAR = 0.10  # tokens/s: largest difference, as a share of what was measured
STALENESS_BAR = 0.3  # mean staleness: largest difference in learner steps

STEPS = 30  # learner steps of one run, the warm-up included
RUN_TIMEOUT = 1800.0  # seconds that one run may take

# What all runs have in common besides the run's own configuration.
SAME = (
    "run.exit_interval=null", "run.exit_duration=null", "generate.workers=1", "generate.pools=[]",
    "generate.probes=0", "publish.keep_every=0", "observe.console=false",
    "observe.wandb=off", "journal.keep=all", "checkpoint.every=0", "evaluate.every=0",
    "learner.optimizer.lr=1e-12", "learner.optimizer.min_lr=0",
)  # fmt: skip

# What a configuration may say of its own length and of the way to its servers.
OWN = ("run.epochs=null", "generate.router=null")

# In the place of the one server that all runs attach to, before it is started.
ANY_SERVER = ("generate.attach=[http://127.0.0.1:1]",)

# The second calibration run has so many times fewer groups in flight: different loads alone tell what a decoding step
# costs from what a sample of it costs.
FEWER = 4


@dataclass(frozen=True, slots=True)
class Compared:
    """One setting: what the model said, and what came."""

    setting: str
    predicted: Figures
    measured: Figures
    speed: float | None = None  # of the machine, over that of the calibration; None: the calibration run itself

    @property
    def expected(self) -> float:
        """Trained tokens/s that were predicted, on the machine as it was when the setting ran."""
        return self.predicted.trained * (self.speed or 1.0)

    @property
    def rate_error(self) -> float:
        """Trained tokens/s, expected over measured, less 1."""
        return self.expected / self.measured.trained - 1

    @property
    def staleness_error(self) -> float:
        return self.predicted.staleness_mean - self.measured.staleness_mean

    @property
    def holds(self) -> bool:
        return abs(self.rate_error) <= RATE_BAR and abs(self.staleness_error) <= STALENESS_BAR


def settings(config: Config) -> list[tuple[str, ...]]:
    """Six of them round a run's own: three bounds, another order, publish interval and group size."""
    half = max(1, config.generate.group_size // 2)
    return [
        ("replay.max_staleness=0", "replay.order=fifo"),
        ("replay.max_staleness=1", "replay.order=fifo"),
        ("replay.max_staleness=4", "replay.order=fifo"),
        ("replay.max_staleness=2", "replay.order=windowed", f"replay.window={config.replay.groups_per_step}"),
        ("replay.max_staleness=2", "replay.order=fifo", "publish.every=2"),
        ("replay.max_staleness=2", "replay.order=fifo", f"generate.group_size={half}"),
    ]


def fewer(config: Config) -> list[str]:
    """Overrides with a part of what is in flight."""
    own = without_lag(config, config.generate)
    key = "requests_in_flight" if own.by_sample else "groups_in_flight"
    now = most_requests(config, own) if own.by_sample else own.groups_in_flight
    few = max(1, now // FEWER)
    least = ["generate.least_in_flight=0"] if own.least_in_flight > few else []
    return ["generate.lag=null", f"generate.{key}={few}", *least]


def validate(
    config_path: Path, overrides: Sequence[str], count: int, steps: int = STEPS
) -> tuple[Model, list[Compared]]:
    """Calibrate by a run of its own and one with fewer in flight, then compare the first `count` settings.

    The first calibration run is made again behind each of them: a prediction is scaled by what the machine gave just
    before and behind its setting. Raises ConfigError on a single core and for what `train` would refuse, ServerFailed,
    and RunEndedError.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("--validate: one core; allowed: at least two, one for generation and one for the learner")
    if steps <= WARM_UP + 1:
        raise ConfigError(f"--steps: {steps} are too few to calibrate; allowed: above {WARM_UP + 1}")
    halves = set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 :])
    with tempfile.TemporaryDirectory(prefix="streamrl-validate-") as name:
        folder = Path(name)
        config = with_dtype(with_local_models(config_file.load(config_path, overrides)), fresh=True)
        preflight.check(config)
        others = settings(config)[:count]
        few = fewer(config)
        for setting in ((), few, *others):
            _check(config_path, overrides, setting)
        with Bar("validate", "runs", 2 + 2 * len(others)) as bar, serving(config, folder) as server:  # one for all runs
            pin(server.pid, halves[0])
            address = server.address
            common = [
                *overrides,
                *SAME,
                *OWN,
                f"generate.attach=[{address}]",
                f"run.folder={folder}",
                f"run.steps={steps}",
            ]
            run = partial(_measure, config_path, folder, halves, bar)
            own, first = run([*common, "run.name=calibration"])
            run([*common, *few, "run.name=few-in-flight"])
            model = calibrate([folder / "calibration", folder / "few-in-flight"])
            compared = [_compare("the calibration run", own, model, first)]
            before = first
            for number, setting in enumerate(others):
                other, measured = run([*common, *setting, f"run.name=setting-{number}"])
                _, after = run([*common, f"run.name=calibration-{number}"])
                speed = (before.trained + after.trained) / 2 / first.trained
                compared.append(_compare(" ".join(setting), other, model, measured, speed))
                before = after
    return model, compared


def _check(config_path: Path, overrides: Sequence[str], setting: Sequence[str]) -> None:
    """Raises ConfigError for a setting that is no valid configuration; `()`: the calibration run's."""
    try:
        config_file.load(config_path, [*overrides, *SAME, *OWN, *ANY_SERVER, *setting])
    except ConfigError as error:
        which = f"{' '.join(setting)}: " if setting else ""
        lines = (f"--validate: {which}{line.removeprefix(OVERRIDE)}" for line in error.lines)
        raise ConfigError("\n".join(lines)) from None


def _measure(
    config_path: Path, folder: Path, halves: Cores, bar: Bar, overrides: Sequence[str]
) -> tuple[Config, Figures]:
    """One run for real, and its figures."""
    config = config_file.load(config_path, overrides)
    command = [sys.executable, "-m", "streamrl.cli", "train", str(config_path), *overrides]
    run_command(command, folder / "train.log", RUN_TIMEOUT, halves)
    bar.advance()
    return config, figures(list(read_metrics(folder / config.run.name)))


def _compare(name: str, config: Config, model: Model, measured: Figures, speed: float | None = None) -> Compared:
    compared = Compared(name, expected(config, model), measured, speed)
    print(
        f"{name}: {compared.expected:.0f} tokens/s expected, {compared.measured.trained:.0f} measured", file=sys.stderr
    )
    return compared

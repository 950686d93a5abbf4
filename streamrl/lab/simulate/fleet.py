"""Plans of 64 to 4,096 GPUs from figures of one: which part of a fleet should generate, and what that gives.

Nothing here is measured by streamrl. The file says what a server and a learner of the user's model take, and each
fleet is then simulated with the same circle as a recorded run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.section import Section
from streamrl.config.words import as_text
from streamrl.lab.simulate.circle import Circle
from streamrl.lab.simulate.figures import WARM_UP, Figures, at_ends, between, edge, figures
from streamrl.lab.simulate.model import Answers, Line, Model, RecordedGroup
from streamrl.lab.simulate.modelled import check_modelled
from streamrl.lab.simulate.server import ServerSpeed
from streamrl.lab.sweep.plan import override

DRAWN = 512  # groups of answers that are drawn from the distribution, once for all fleets

# Learner steps of a simulation that count, at least.
STEPS = 9

# Waves that count, at least: groups that are begun at once are trained in one step more than the bound has, and make
# room for the next wave. The steps of one are not alike.
WAVES = 2


# Seconds that a group may take, whatever the default: how long the longest answers take is what is asked.
PATIENCE = 1e9

# Keys of the configuration that the file's own sections say.
OF_THE_FILE = {
    "generate.workers": "shares",
    "generate.servers": "shares",
    "generate.pools": "shares",
    "generate.tensor_parallel": "server.gpus",
    "publish.at_once": "publish.at_once",
    "generate.sampling.max_new_tokens": "answers.longest",
}

# Keys of what data teaches, which only a recorded run shows.
OF_A_RUN = ("replay.adaptive.", "replay.filter.", "replay.reuse")

FARTHEST = 700.0  # of a logarithm from the median's: beyond it `exp` overflows


class ServerFigures(Section):
    """One inference server of the user's model."""

    gpus: int = Field(8, ge=1, description="GPUs of one server (its tensor-parallel size)")
    step: float = Field(gt=0, description="seconds of a decoding step with few samples")
    sample: float = Field(ge=0, description="seconds of a decoding step more for each running sample")
    prefill: float = Field(gt=0, description="prompt tokens a second")
    max_running: int = Field(256, ge=1, description="samples at once")


class LearnerFigures(Section):
    """The learner on a reference number of GPUs."""

    tokens: float = Field(gt=0, description="trained tokens a second and GPU")
    fixed: float = Field(0.0, ge=0, description="seconds of a step besides: optimizer, checkpoint's share, export")
    gpus: int = Field(8, ge=1, description="GPUs with which `tokens` was measured")
    doubling: float = Field(
        1.0, gt=0, le=1, description="share of tokens a GPU that is left after each doubling of the GPUs"
    )


class AnswerFigures(Section):
    """Log-normal lengths of answers."""

    prompt: int = Field(ge=0, description="tokens of a prompt")
    median: float = Field(gt=0, description="tokens of the median answer")
    sigma: float = Field(0.8, ge=0, le=10, description="standard deviation of the logarithm")
    longest: int = Field(ge=1, description="tokens at which an answer is cut")


class PublishFigures(Section):
    """What new weights cost."""

    pause: float = Field(ge=0, description="seconds that one server draws no token")
    copy_seconds: float = Field(0.0, ge=0, description="seconds that the learner waits")
    at_once: int = Field(1, ge=1, description="servers that are updated at the same time")


class Fleet(Section):
    """The file of `--fleet`."""

    gpus: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (64, 128, 256, 512, 1024, 2048, 4096), min_length=1, description="sizes of the fleets"
    )
    shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (0.25, 0.5, 0.75), min_length=1, description="shares of a fleet that generate"
    )
    server: ServerFigures = Field(description="a server")
    learner: LearnerFigures = Field(description="the learner")
    answers: AnswerFigures = Field(description="the answers")
    publish: PublishFigures = Field(description="publishing")
    config: dict[str, Any] = Field(default_factory=dict, description="keys of the configuration, as key: value")


def enough_steps(config: Config) -> int:
    """Learner steps of which `steady` counts whole waves."""
    wave = edge(config) + 1
    return at_ends(config) + WARM_UP + wave * max(WAVES, math.ceil(STEPS / wave))


def steady(config: Config, model: Model, seed: int = 0) -> tuple[float, Figures]:
    """Simulate `run.steps` of a run: seconds of a step, and the figures, between its begin and its end.

    Raises ConfigError where too few steps are left, or the run fails.
    """
    if config.run.steps <= (least := at_ends(config) + WARM_UP + 1):
        raise ConfigError(
            f"run.steps: {config.run.steps} are too few, of which {least - 1} do not count; allowed: above {least}"
        )
    rows = between(Circle(config, model, seed).run(), config)
    return sum(row["time/step"] for row in rows[WARM_UP:]) / len(rows[WARM_UP:]), figures(rows)


@dataclass(frozen=True, slots=True)
class Planned:
    """One split of one fleet."""

    gpus: int
    generating: int  # of them
    servers: int
    step_seconds: float
    figures: Figures
    best: bool = False

    def as_json(self) -> dict[str, Any]:
        numbers = {"gpus": self.gpus, "generating": self.generating, "servers": self.servers, "best": self.best}
        return {**numbers, "step_seconds": self.step_seconds, **self.figures.as_json()}


def read_fleet(path: Path) -> Fleet:
    """Read and check the file. Raises ConfigError with one line."""
    try:
        tree = config_file.parse_yaml(path.read_text(), where=path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"--fleet: {path}: {reason}; allowed: a YAML file, as in docs/simulate.md") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--fleet: {path}: no mapping; allowed: {', '.join(Fleet.model_fields)}")
    try:
        return Fleet.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"--fleet: {path}: {_complaint(error.errors()[0])}") from None


def _complaint(error: ErrorDetails) -> str:
    """What is wrong with one key, and what it is for."""
    section: type[BaseModel] = Fleet
    for part in error["loc"][:-1]:
        inner = section.model_fields[str(part)].annotation if str(part) in section.model_fields else None
        section = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else section
    key = ".".join(map(str, error["loc"]))
    field = section.model_fields.get(str(error["loc"][-1]))
    match error["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key; allowed: {', '.join(section.model_fields)}"
        case "missing" if field is not None:
            return f"{key}: is missing; allowed: {field.description}"
    return f"{key}: {as_text(error['input'])}: {error['msg']}" + (f" ({field.description})" if field else "")


def plan(fleet: Fleet, overrides: Sequence[str] = ()) -> list[Planned]:
    """Every split of every fleet, in order.

    Raises ConfigError for a fleet without room for a server and a learner, and for keys that are not modelled.
    """
    _check_keys(fleet, overrides)
    rows: list[Planned] = []
    for gpus in fleet.gpus:
        splits = {round(gpus * share / fleet.server.gpus) for share in fleet.shares}
        servers = sorted(count for count in splits if count and gpus - count * fleet.server.gpus > 0)
        if not servers:
            raise ConfigError(f"--fleet: gpus: {gpus} hold no server of {fleet.server.gpus} and a learner")
        planned = [_planned(fleet, gpus, count, overrides) for count in servers]
        best = max(planned, key=lambda row: row.figures.trained)
        rows += [replace(row, best=row is best) for row in planned]
    return rows


def _check_keys(fleet: Fleet, overrides: Sequence[str]) -> None:
    given = config_file.load(None, [*(override(key, value) for key, value in fleet.config.items()), *overrides])
    for key in config_file.changed(Config(), given):
        if key in OF_THE_FILE:
            raise ConfigError(f"--fleet: {key}: {OF_THE_FILE[key]} of the file says it; allowed: leave it out")
        if key.startswith(OF_A_RUN):
            raise ConfigError(f"--fleet: {key}: no file of figures says what data teaches; allowed: simulate RUN")
    check_modelled(Config(), given, "--fleet: ")


def _planned(fleet: Fleet, gpus: int, servers: int, overrides: Sequence[str]) -> Planned:
    generating = servers * fleet.server.gpus
    given = [override(key, value) for key, value in fleet.config.items()]
    longest = f"generate.sampling.max_new_tokens={fleet.answers.longest}"
    patient = f"replay.group_timeout={PATIENCE}"
    words = [*given, *overrides, longest, patient, f"generate.workers={servers}"]
    steps = enough_steps(config_file.load(None, words))  # unless one of the words says how many
    config = config_file.load(None, [f"run.steps={steps}", *words])
    return Planned(gpus, generating, servers, *steady(config, fleet_model(fleet, gpus - generating, config)))


def fleet_model(fleet: Fleet, learning: int, config: Config) -> Model:
    """The model's parts for a learner of so many GPUs."""
    learner, server, answers = fleet.learner, fleet.server, fleet.answers
    doublings = math.log2(learning / learner.gpus)
    tokens = learner.tokens * learning * learner.doubling ** max(0.0, doublings)
    speed = ServerSpeed(
        step=server.step,
        sample=server.sample,
        start=answers.prompt / server.prefill / config.generate.group_size,  # the prompt is shared by its group
        max_running=server.max_running,
    )
    return Model(
        answers=_answers(answers, config.generate.group_size),
        server=speed,
        learner=Line(learner.fixed, 1.0 / tokens),
        update=Line(fleet.publish.pause, 0.0),
        copy=fleet.publish.copy_seconds,
        at_once=fleet.publish.at_once,
    )


def _answers(answers: AnswerFigures, group_size: int) -> Answers:
    rng = random.Random(0)

    def group() -> RecordedGroup:
        logarithms = (min(rng.gauss(0.0, answers.sigma), FARTHEST) for _ in range(group_size))
        drawn = (answers.median * math.exp(logarithm) for logarithm in logarithms)
        lengths = tuple(max(1, round(min(answers.longest, length))) for length in drawn)
        right = tuple(rng.random() < 0.5 for _ in lengths)
        return RecordedGroup(0, lengths, tuple(map(float, right)), right)

    return Answers(tuple(group() for _ in range(DRAWN)))

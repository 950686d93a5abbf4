"""The server's half of `publish.mismatch`: it scores the learner's answers by prefill, once it has their version.

    Publish ─▶ Applied ─▶ prefill of each answer ─▶ against the learner's scores ─▶ Mismatch
                       └▶ bfloat16, until ROUNDED tokens: drawn, and prefilled ─▶ the limit of the next ones

Beside the groups, which do not wait for it. What another version has computed is not compared: a newer version that
comes meanwhile ends the measurement of the older one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.generate.inference import ServerPolicy
from streamrl.observe.events import EventLog
from streamrl.observe.limits import Limits, by_decode, limits_of, of_rounding, rounds
from streamrl.observe.mismatch import Scores, excess, mismatch_metrics
from streamrl.stream.messages import Message, Mismatch, Publish, ScoredAnswer
from streamrl.tasks.episodes import together
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

ROUNDED = 128  # tokens of a server whose rounding is measured: its mean is then known to a tenth
DRAWN = 32  # tokens of an answer that is drawn for it, at most: few enough to be drawn before the next version comes


class OtherVersionError(RuntimeError):
    """The server has taken in another version."""


class MismatchMeter:
    """The measurements of one server, one at a time. `close` it.

    Usage:
        meter.begin(publish, served.policy)
    """

    def __init__(self, config: Config, events: EventLog, send: Callable[[Message], Awaitable[bool]]) -> None:
        """`send`: one message to the replay service."""
        self._config = config
        self._events = events
        self._send = send
        self._task: asyncio.Task[None] | None = None
        self._rounded: list[np.ndarray] = []  # |log ratio| of decode and prefill

    def begin(self, publish: Publish, policy: ServerPolicy) -> None:
        """The server has this version now."""
        self.close()
        if publish.scored:
            self._task = asyncio.ensure_future(self._measure(publish, policy))

    def close(self) -> None:
        """End what is under way."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _measure(self, publish: Publish, policy: ServerPolicy) -> None:
        server, version = publish.server, publish.version
        with self._events.span("mismatch", server=server, version=str(version)) as outcome:
            try:
                answers = await _score(publish.scored, version, policy)
                outcome["metrics"] = metrics = self._metrics(version, answers)
            except (EngineError, OtherVersionError) as error:
                log.info("the mismatch of %s with version %s was not measured: %s", server, version, error)
                outcome["failed"] = str(error)
                return
            except Exception as error:  # nobody waits for a measurement: a defect of one is told here
                log.exception("the mismatch of %s with version %s was not measured", server, version)
                outcome["failed"] = f"{type(error).__name__}: {error}"
                return
        if excess(metrics) > 1:
            log.warning("%s is too far from the learner with version %s: %s", server, version, metrics)
        await self._send(Mismatch(server=server, version=version, metrics=metrics))
        if rounds(self._config) and sum(map(len, self._rounded)) < ROUNDED:
            await self._round_all(publish, policy)

    async def _round_all(self, publish: Publish, policy: ServerPolicy) -> None:
        """What fails is drawn with the next version."""
        try:
            await together(self._round(answer, publish.version, policy) for answer in publish.scored)
        except (EngineError, OtherVersionError) as error:
            log.info("the rounding of %s was not measured to its end: %s", publish.server, error)
        except Exception:
            log.exception("the rounding of %s was not measured to its end", publish.server)

    async def _round(self, answer: ScoredAnswer, version: PolicyVersion, policy: ServerPolicy) -> None:
        """Measure on another answer to the same prompt how far decode and prefill are apart."""
        prompt = answer.ids[: answer.prompt]
        tokens = max(2, min(DRAWN, len(answer.ids) - answer.prompt))
        sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
        (drawn,) = await policy.generate(prompt, sampling, 1)
        decoded = np.array([entry[0] for entry in drawn.meta_info.output_token_logprobs], np.float32)
        prefilled = await _prefill([*prompt, *drawn.output_ids], answer.prompt, version, policy)
        if other := {span.version for span in drawn.meta_info.weight_versions} - {str(version)}:
            raise OtherVersionError(f"version {min(other)} has drawn tokens")
        difference = np.abs(prefilled - decoded)[1:]  # a prefill has drawn the first token
        self._rounded.append(difference[np.isfinite(difference)])

    def _metrics(self, version: PolicyVersion, answers: Sequence[Scores]) -> dict[str, float]:
        rounding = self._rounding()
        limits = limits_of(self._config) if rounding is None else by_decode(rounding)
        return {"mismatch/step": float(version.step), **mismatch_metrics(answers, limits, rounding)}

    def _rounding(self) -> Limits | None:
        """What was measured of it; None before that.

        Also where decode and prefill make no difference: such a server shows nothing of what another way changes.
        """
        if sum(map(len, self._rounded)) < ROUNDED:
            return None
        rounding = of_rounding(self._rounded)
        return rounding if rounding is not None and rounding.mean > 0 else None


async def _score(scored: Sequence[ScoredAnswer], version: PolicyVersion, policy: ServerPolicy) -> list[Scores]:
    """Each answer's scores by a server that has `version`. Raises EngineError, and OtherVersionError."""
    found = await together(_prefill(answer.ids, answer.prompt, version, policy) for answer in scored)
    return [
        Scores(each[answer.trained], np.array(answer.logprobs, np.float32), np.array(answer.former, np.float32))
        for answer, each in zip(scored, found, strict=True)
    ]


async def _prefill(ids: Sequence[int], start: int, version: PolicyVersion, policy: ServerPolicy) -> np.ndarray:
    """Log-probs float32 of the tokens from `start` on."""
    prefill = await policy.score(ids, start)
    if prefill.version != str(version):
        raise OtherVersionError(f"version {prefill.version} has scored tokens")
    return np.array(prefill.logprobs, np.float32)

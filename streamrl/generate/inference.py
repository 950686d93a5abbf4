"""The handle through which a task reaches the policy: a prompt in, completions with ids, log-probs and versions out."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from streamrl.config.generate import GenerateConfig
from streamrl.engine.answers import Answer, PrefillScores
from streamrl.engine.client import EngineError, SentImage
from streamrl.generate.moe_routing import routing_columns
from streamrl.generate.prompt_images import PromptImage
from streamrl.generate.sampling import Drawing, Sampling
from streamrl.generate.stop_strings import StopStrings
from streamrl.generate.tokenizer import Tokenizer
from streamrl.sampling_columns import kept_columns, temperature_column
from streamrl.stream.contiguous import answer_arrays
from streamrl.tasks.cut import Cut
from streamrl.tasks.environment import Completion, Message, Prompt
from streamrl.tasks.episodes import together
from streamrl.types import PolicyVersion, VersionSpan

# Seconds that a server has to give what a request reached when it is ended at its deadline: the way there, one decoding
# step and the way back.
CUT_TIMEOUT = 5.0


class Load:
    """How much a worker's servers have worked since its start."""

    def __init__(self) -> None:
        self.generated = 0  # tokens
        self.verified = 0  # passes of the policy over drafts
        self.accepted = 0  # drafts that were kept in them
        self._running = 0
        self._asleep = False
        self._busy = 0.0
        self._since: float | None = None  # that they work without a break; None while they do not

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        self._running += 1
        self._changed()
        try:
            yield
        finally:
            self._running -= 1
            self._changed()

    @property
    def asleep(self) -> bool:
        """Have the servers lent their devices to the learner? Requests wait then, and nobody works for them."""
        return self._asleep

    @asleep.setter
    def asleep(self, asleep: bool) -> None:
        self._asleep = asleep
        self._changed()

    @property
    def busy(self) -> float:
        """Seconds with at least one request running."""
        return self._busy + (0.0 if self._since is None else time.monotonic() - self._since)

    def record(self, answers: Iterable[Answer]) -> None:
        """Count what was answered."""
        for answer in answers:
            self.generated += len(answer.output_ids)
            self.verified += answer.meta_info.spec_verify_ct
            self.accepted += answer.meta_info.spec_num_correct_drafts

    def _changed(self) -> None:
        works = self._running > 0 and not self._asleep
        if works and self._since is None:
            self._since = time.monotonic()
        elif not works and self._since is not None:
            self._busy, self._since = self._busy + time.monotonic() - self._since, None


class PartlyAnswered(EngineError):
    """A request that a server refused when it had given tokens, or contradicted itself in: `answers` are all of it.

    What is finished is whole, the others are aborts with what is known of them.
    """

    def __init__(self, error: EngineError, answers: Sequence[Answer]) -> None:
        super().__init__(error.address, error.path, error.status, error.reason)
        self.answers = answers


class Policy(Protocol):
    """What answers requests: a server, or the newest adapter on it."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: dict[str, Any],
        n: int,
        request_id: str | None = None,
        *,
        routed_experts: bool = False,
        kept_sets: bool = False,
        ends: StopStrings | None = None,
        priority: int = 0,
        images: Sequence[SentImage] = (),
        at_least: PolicyVersion | None = None,
    ) -> list[Answer]:
        """`ends`: where one of them is found the rest need not be drawn; the caller cuts the answer there.

        Raises EngineError; PartlyAnswered where it knows of tokens and no other server may be asked.
        """
        ...

    async def abort(self, request_id: str = "") -> None: ...


class ServerPolicy(Policy, Protocol):
    """One server alone."""

    async def score(
        self,
        input_ids: Sequence[int],
        start: int,
        request_id: str | None = None,
        *,
        cached: bool = True,
        cache: str | None = None,
    ) -> PrefillScores:
        """As of `EngineClient`, with the newest weights that the server has."""
        ...


class EngineInference:
    """`Inference` on one SGLang server, with the configured sampling, the task's own, or greedy.

    A request that fails costs its own answers: they come back with the finish reason `abort`, and the reason is in
    `failures`. They are empty; where they come in pieces they have the tokens that are known, and those that had come
    to their end are whole. Only a server that cannot be reached raises EngineError.

    What still runs at the `deadline` is ended there, and gives the tokens that it reached, as an `abort`. So does a
    request for several samples whose answers come in pieces, and those that had come to their end are whole; where
    they come at once (`generate.stream_every`), nothing is known of them.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        config: GenerateConfig,
        load: Load,
        *,
        greedy: bool = False,
        deadline: float | None = None,
        routed_experts: bool = False,
        priority: int | None = None,
        trained: bool = True,
    ) -> None:
        """`deadline`: seconds, on the event loop's clock. `routed_experts`: of each token, for the router replay.
        `trained`: answers carry how they were drawn, and what could not be trained is refused.

        `priority`: of the requests that wait in a server, lower ones go first; None: before all that have one.
        """
        self.deadline = deadline
        self._policy = policy
        self._tokenizer = tokenizer
        self._load = load
        self._single = config.single_requests or config.by_sample
        # A policy need not know of what a request does not have.
        self._options: dict[str, Any] = {"routed_experts": routed_experts}
        self._options |= {"priority": priority} if priority is not None else {}
        self.failures: list[str] = []
        # Answers that have the log-probs of decode, where prefills are asked for.
        self.decoded: int | None = None if config.score == "decode" else 0
        self._cut: tuple[Prompt, Cut] | None = None
        self._references: tuple[str, ...] = ()
        self._images: tuple[PromptImage, ...] = ()  # of them; none for a model whose images are not known here
        self._asked: set[tuple[PromptImage, ...]] = set()  # of all requests with images
        self._sampling = Sampling(config, tokenizer, greedy=greedy, trained=trained)

    async def generate(
        self,
        prompt: str | list[Message] | np.ndarray,
        n: int,
        *,
        images: Sequence[str] = (),
        at_least: PolicyVersion | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """`n` completions. Raises ValueError for a prompt that has no ids, or `sampling` that is not possible."""
        drawing = self._sampling.drawing(sampling)
        await self.hold_images(images)
        prompt_ids = prompt if isinstance(prompt, np.ndarray) else self.prompt_ids(prompt)
        ids, sent = self._sent(prompt_ids, images)
        options = self._options | ({"images": sent} if sent else {})
        options |= {"at_least": at_least} if at_least is not None else {}
        options |= {"kept_sets": True} if drawing.kept_sets else {}
        options |= {"ends": drawing.stop} if drawing.stop is not None else {}
        counts = [1] * n if self._single or drawing.apart else [n]
        requests = (self._request(ids, drawing.of_answer(i), count, options) for i, count in enumerate(counts))
        answers = await together(requests)
        return self._completions(prompt_ids, [answer for some in answers for answer in some], drawing)

    def prompt_ids(self, prompt: str | Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        """As `Inference` has it. Raises ValueError, too, for a prompt with images that is cut."""
        ids = self._expanded(self._tokenizer.prompt_ids(prompt, tools))
        if self._cut is None or prompt != self._cut[0].content:
            return ids
        asked, cut = self._cut
        kept = cut.kept(ids)
        if asked.images and len(kept) < len(ids):
            raise ValueError(f"prompt {asked.index}: it has images and {len(ids)} tokens, and a cut might part one")
        return kept

    async def ids_of(self, prompt: Prompt) -> np.ndarray:
        """int32 [P] of a task's prompt. Raises ValueError as `prompt_ids` and `hold_images`."""
        await self.hold_images(prompt.images)
        return self.prompt_ids(prompt.content)

    async def hold_images(self, references: Sequence[str]) -> None:
        """Read the images of the prompt that is asked now; `prompt_ids` then has all tokens of each.

        Raises ValueError for what is no image.
        """
        if not references or tuple(references) == self._references:
            return
        known = self._tokenizer.images
        self._images = () if known is None else await known.load(references)
        self._references = tuple(references)

    @property
    def images(self) -> tuple[bytes, ...]:
        """The encoded files of the images of its requests."""
        return tuple(image.file for image in next(iter(self._asked), ()))

    def wrong_prompt(self, prompt_ids: np.ndarray) -> str | None:
        """Why prompt ids are not those of a prompt with `images`, or there are several such; None where all is well."""
        if len(self._asked) > 1:
            return "requests with different images; allowed: the same ones in all requests of a group"
        known = self._tokenizer.images
        return None if known is None else known.wrong(prompt_ids, next(iter(self._asked), ()))

    def _expanded(self, ids: np.ndarray) -> np.ndarray:
        """With all tokens of the images, where it has places for them. Raises ValueError where it has not as many."""
        known = self._tokenizer.images if self._images else None
        return ids if known is None or not known.has_places(ids) else known.expanded(ids, self._images)

    def _sent(self, ids: np.ndarray, references: Sequence[str]) -> tuple[list[int], list[SentImage]]:
        """Ids and images as a server is asked with them."""
        known = self._tokenizer.images
        if known is None or not references:
            return ids.tolist(), [SentImage(reference) for reference in references]
        self._asked.add(self._images)
        sent = [SentImage(image.url, image.tokens) for image in self._images]
        return known.collapsed(ids, self._images).tolist(), sent

    def cut_prompt(self, prompt: Prompt, cut: Cut) -> None:
        """Cut the ids of this prompt, and of no other: those of a further turn are added behind what stays."""
        self._cut = (prompt, cut)

    def added_ids(
        self,
        history: Sequence[Message],
        added: str | Sequence[Message],
        last: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> np.ndarray:
        if isinstance(added, str):
            return self._tokenizer.plain_ids(added)
        return self._tokenizer.added_ids(history, added, last, tools)

    async def _request(
        self, ids: list[int], sampling: dict[str, Any], n: int, options: dict[str, Any]
    ) -> Sequence[Answer | None]:
        """The answers of one request; None for each of which nothing is known."""
        try:
            with self._load.request():
                answers = await self._in_time(ids, sampling, n, options)
        except PartlyAnswered as error:
            self.failures.append(str(error))
            answers = error.answers
        except EngineError as error:
            if error.status is None and not error.late:
                raise
            self.failures.append(str(error))
            return [None] * n
        known = [answer for answer in answers if answer is not None]
        self._load.record(known)
        if self.decoded is not None:
            self.decoded += sum(not answer.meta_info.by_prefill for answer in known)
        return answers

    async def _in_time(
        self, ids: list[int], sampling: dict[str, Any], n: int, options: dict[str, Any]
    ) -> Sequence[Answer | None]:
        """The answers of one request, or what there is of them at the deadline."""
        name = uuid.uuid4().hex
        asking = asyncio.ensure_future(self._policy.generate(ids, sampling, n, name, **options))
        try:
            await asyncio.wait((asking,), timeout=self._remaining())
            if not asking.done():
                self.failures.append("not finished at the deadline")
                await self._end(asking, name)
            return asking.result() if asking.done() else [None] * n
        finally:
            asking.cancel()  # the server ends what nobody listens to any more

    async def _end(self, asking: asyncio.Future[list[Answer]], name: str) -> None:
        """End a request where it is, and wait for what it reached, CUT_TIMEOUT for both. Raises EngineError."""
        ending = asyncio.ensure_future(self._policy.abort(name))
        try:
            await asyncio.wait((asking, ending), timeout=CUT_TIMEOUT)
            if ending.done():
                ending.result()
        finally:
            ending.cancel()

    def _remaining(self) -> float | None:
        """Seconds until the deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - asyncio.get_running_loop().time())

    def _completions(
        self, prompt_ids: np.ndarray, answers: Sequence[Answer | None], drawing: Drawing
    ) -> list[Completion]:
        if (stop := drawing.stop) is not None:
            answers = [None if answer is None else _stopped(answer, stop, len(prompt_ids)) for answer in answers]
        ids = [answer.output_ids if answer else [] for answer in answers]
        prompt_ids, arrays = answer_arrays(prompt_ids, [len(each) for each in ids])
        texts = self._tokenizer.text(ids)
        own = drawing.temperature
        completions = [self._completion(prompt_ids, *each, own) for each in zip(answers, texts, arrays, strict=True)]
        if not self._tokenizer.keeps_marks:
            return completions
        marked = zip(completions, ids, strict=True)
        return [replace(each, marked=self._tokenizer.marked(some)) for each, some in marked]

    def _completion(
        self,
        prompt_ids: np.ndarray,
        answer: Answer | None,
        text: str,
        arrays: tuple[np.ndarray, np.ndarray],
        temperature: float | None,
    ) -> Completion:
        why = "deadline" if self._remaining() == 0.0 else "server"
        if answer is not None:
            try:
                made = completion(prompt_ids, answer, text, arrays)
                if temperature is not None:
                    column = temperature_column(len(made.output_ids), temperature)
                    made = replace(made, extras={**made.extras, **column})
                return replace(made, failure=why) if made.finish_reason == "abort" else made
            except ValueError as error:
                self.failures.append(str(error))
        return Completion.failed(prompt_ids, why)


def completion(prompt_ids: np.ndarray, answer: Answer, text: str, arrays: tuple[np.ndarray, np.ndarray]) -> Completion:
    """The typed form of a server's answer of T tokens, in `arrays`: its ids int32 [T] and log-probs float32 [T].

    Raises ValueError where the answer contradicts itself or names no policy version.
    """
    meta = answer.meta_info
    output_ids, logprobs = arrays
    if [entry[1] for entry in meta.output_token_logprobs] != answer.output_ids:
        raise ValueError(f"answer {meta.id}: log-probs of other tokens than its output ids")
    spans = tuple(
        VersionSpan(PolicyVersion.parse(span.version), span.start, span.end, span.exact)
        for span in meta.weight_versions
        if span.end > span.start
    )
    if (spans[-1].end if spans else 0) != len(answer.output_ids):
        raise ValueError(f"answer {meta.id}: weight versions {meta.weight_versions} do not cover its tokens")
    output_ids[:] = answer.output_ids
    logprobs[:] = [entry[0] for entry in meta.output_token_logprobs]
    sets, among = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if sets is not None and among is not None:
        if not len(sets) == len(among) == len(output_ids):
            raise ValueError(f"answer {meta.id}: {len(sets)} kept sets for {len(output_ids)} tokens")
        logprobs[:] = among
    routed = meta.routed_experts
    return Completion(
        text=text,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
        spans=spans,
        finish_reason=meta.finish_reason.type,
        extras={
            **({} if routed is None else routing_columns(routed, len(prompt_ids), len(answer.output_ids))),
            **({} if sets is None else kept_columns(sets)),
        },
    )


def _stopped(answer: Answer, stop: StopStrings, prompt: int) -> Answer:
    """The answer up to its stop string; what was cut off before one stays as it is."""
    return answer if answer.meta_info.finish_reason.type == "abort" else stop.cut(answer, prompt)

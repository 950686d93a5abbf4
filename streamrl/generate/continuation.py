"""One answer in parts: cut by an update or by the loss of its server, and gone on with from its last token.

    part 1: prompt               ─▶ a b c ✂             (aborted, or its server is gone)
    part 2: prompt a b c         ─▶ d e f stop
    answer:                         a b c d e f         log-probs and version spans joined in the same way

Pure: it is given whole parts, or the pieces of one, and asked for the next request. What was received is never drawn
again, so that each token keeps the log-prob and the version with which it was drawn. One exception: a server tells
which token is of which version only at the end of a part. Of a part that was under way during an update and never
came to an end, the pieces that came after the update are drawn again, because nobody can say whose they are.

A server that ends a request looks for no end in the tokens of its last step. An end token among those of an aborted
part is the answer's end, and what was drawn behind it (of drafts) is dropped.

The experts of tokens come at the end of a part, too. Where a part had none, the next one tells those that its own
version routed the tokens to. They are UNKNOWN then, unless both are of one version: the learner's router decides. To
draw the tokens again would cost a long answer for the routing of some of it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from streamrl.engine.answers import Answer, AnswerMeta, FinishReason, Piece, PieceMeta, WeightVersionSpan
from streamrl.moe_routing import UNKNOWN
from streamrl.types import PolicyVersion

LENGTH, STOP = FinishReason("length"), FinishReason("stop")

Logprobs = list[tuple[float, int, str | None]]  # of each token: log-prob, id, text
Kept = list[tuple[float, list[int]]]  # of each token: log-prob in the set from which it was drawn, and that set
Ends = Callable[[Sequence[int], int], bool]  # do these ids have an end of the request's own, searched from a place on?


class Continuation:
    """An answer under way.

    >>> answer = Continuation([5, 6], {"max_new_tokens": 8})
    >>> answer.rest()
    ([5, 6], {'max_new_tokens': 8})

    After `add` of a part with the tokens 17, 4 and 9 and the end `abort`, `rest` is `([5, 6, 17, 4, 9],
    {'max_new_tokens': 5})`.
    """

    def __init__(self, prompt: Sequence[int], sampling: dict[str, Any], ends: Ends | None = None) -> None:
        """`prompt` ids and SGLang's sampling parameters of the whole answer, `max_new_tokens` among them.

        Its `stop_token_ids` are all the tokens that end the answer; none does with `ignore_eos`.
        `ends`: an answer in which it finds an end is finished, whatever the server says; what is behind it stays.
        """
        self._prompt = prompt
        self._sampling = sampling
        self._end_ids = frozenset(() if sampling.get("ignore_eos") else sampling.get("stop_token_ids") or ())
        self._id = ""
        self._ids: list[int] = []
        self._logprobs: Logprobs = []
        self._kept: Kept | None = None  # where they were asked for
        self._ends = ends
        self._searched = 0  # tokens in which no end was found
        self._spans: list[WeightVersionSpan] = []
        self._prompt_tokens = len(prompt)  # as the server reads it: with all those of its images
        self._experts: np.ndarray | None = None  # int32 [tokens read, layers * top_k]
        self._verified = self._accepted = 0  # of drafts, in the parts that came to their end
        self._finish: FinishReason | None = None
        # How a server contradicted itself, or why it does not go on: the answer stays an abort, and nothing is added.
        self.fault = ""
        self._part: _Part | None = None  # that comes in pieces

    def __len__(self) -> int:
        """Tokens so far, those of the present part too."""
        return len(self._ids) + (len(self._part.ids) if self._part else 0)

    @property
    def ended(self) -> bool:
        """The request's own end is among the tokens, those of the present part too."""
        if self._ends is None:
            return False
        ids = self._ids + (self._part.ids if self._part else [])
        if self._searched < len(ids):
            if self._ends(ids, self._searched):
                return True
            self._searched = len(ids)
        return False

    @property
    def finished(self) -> bool:
        """The answer has come to an end of its own."""
        return not self.fault and self._finish is not None and self._finish.type != "abort"

    @property
    def goes_on(self) -> bool:
        """A server can be asked for what is missing."""
        return not self.finished and not self.fault

    @property
    def version(self) -> PolicyVersion | None:
        """The version of the last token, None without one: only a server of this version or a newer one may go on."""
        return PolicyVersion.parse(self._spans[-1].version) if self._spans else None

    def begin(self, version: PolicyVersion, *, keeps_cache: bool = False) -> None:
        """A server that has `version` is asked for what is missing.

        `keeps_cache`: an update leaves what `version` computed. Tokens of other versions then follow from it, and are
        not exact.
        """
        self._part = _Part(str(version), keeps_cache)

    def add(self, part: Answer | Piece) -> None:
        """What a server answered to the prompt, or to `rest`: the whole part, or its next piece after `begin`.

        Where that contradicts itself, or names no version of a policy, it is the answer's `fault`.
        """
        if self.fault:
            return
        try:
            self._take(part)
        except ValueError as error:
            self.fault, self._part = f"answer {part.meta_info.id}: {error}", None

    def _take(self, part: Answer | Piece) -> None:
        """Raises ValueError."""
        if isinstance(part, Piece):
            assert self._part is not None, "a piece of no part"
            self._part.add(part)
            if part.meta_info.finish_reason is not None:
                self._join(part.meta_info, self._part.ids, self._part.logprobs, self._part.kept)
        else:
            kept = _kept(part.meta_info, len(part.output_ids))
            self._join(part.meta_info, part.output_ids, part.meta_info.output_token_logprobs, kept)

    def cut(self) -> None:
        """The present part comes to no end: what is known of it stays."""
        if self._part is not None:
            part, known = self._part, self._part.known
            kept = None if part.kept is None else part.kept[:known]
            self._add(part.ids[:known], part.logprobs[:known], kept, (WeightVersionSpan(part.version, 0, known),))
            self._id = self._id or part.id

    def rest(self) -> tuple[list[int], dict[str, Any]]:
        """Input ids and sampling parameters of the request for what is missing."""
        missing = self._sampling["max_new_tokens"] - len(self._ids)
        return [*self._prompt, *self._ids], {**self._sampling, "max_new_tokens": missing}

    def answer(self) -> Answer:
        """The whole answer, as an uninterrupted server would have given it."""
        unfinished = FinishReason("abort", self.fault or "it was not answered to its end")
        finish = None if self.fault else self._finish
        meta = AnswerMeta(
            id=self._id,
            finish_reason=finish or unfinished,
            weight_versions=tuple(self._spans),
            output_token_logprobs=self._logprobs,
            routed_experts=self._routed(),
            output_token_sampling_mask=None if self._kept is None else [ids for _, ids in self._kept],
            output_token_sampling_logprobs=None if self._kept is None else [logprob for logprob, _ in self._kept],
            spec_verify_ct=self._verified,
            spec_num_correct_drafts=self._accepted,
        )
        return Answer(output_ids=self._ids, meta_info=meta)

    def _join(self, meta: AnswerMeta | PieceMeta, ids: list[int], logprobs: Logprobs, kept: Kept | None) -> None:
        """A part that came to its end. Raises ValueError."""
        for span in meta.weight_versions:
            if span.end > span.start:
                PolicyVersion.parse(span.version)
        self._id = self._id or meta.id
        self._finish = meta.finish_reason
        self._verified += meta.spec_verify_ct
        self._accepted += meta.spec_num_correct_drafts
        spans = meta.weight_versions if self._part is None else self._part.stamped(meta.weight_versions)
        before = len(self._ids)
        self._add(ids, logprobs, kept, spans)
        if meta.prompt_tokens is not None:
            self._prompt_tokens = meta.prompt_tokens - before
        if meta.routed_experts is not None and ids:
            self._read(np.frombuffer(base64.b64decode(meta.routed_experts), np.int32), before, before + len(ids))

    def _add(self, ids: list[int], logprobs: Logprobs, kept: Kept | None, spans: Sequence[WeightVersionSpan]) -> None:
        before, self._part = len(self._ids), None
        if not self.finished and (end := self._length(ids)) is not None:
            ids, logprobs, kept = ids[:end], logprobs[:end], None if kept is None else kept[:end]
            spans = [replace(span, end=min(span.end, end)) for span in spans if span.start < end]
            self._finish = STOP
        self._ids += ids
        self._logprobs += logprobs
        if kept is not None:
            self._kept = [*(self._kept or ()), *kept]
        self._searched = min(self._searched, before)
        for span in spans:
            self._append(replace(span, start=before + span.start, end=before + span.end))
        if not self.finished and len(self._ids) >= self._sampling["max_new_tokens"]:
            self._finish = LENGTH  # it was cut behind its last token
        if not self.finished and self.ended:
            self._finish = STOP

    def _length(self, ids: Sequence[int]) -> int | None:
        """Tokens up to the first end token; None without one."""
        return next((place for place, token in enumerate(ids, 1) if token in self._end_ids), None)

    def _append(self, span: WeightVersionSpan) -> None:
        """A span behind the others; neighbours of one version are one, where both are exact or neither is."""
        if span.end == span.start:
            return
        if self._spans and (last := self._spans[-1]).version == span.version and last.exact == span.exact:
            span = replace(self._spans.pop(), end=span.end)
        self._spans.append(span)

    def _read(self, told: np.ndarray, before: int, drawn: int) -> None:
        """The experts of every token that the server read for this part, the prompt and former parts among them.

        told: int32 [tokens read * layers * top_k]; before: tokens of former parts. Those were read again, perhaps by
        newer weights: what was recorded when they were drawn stays. Of the others, token t + 1 of the output was drawn
        from the experts of token t: they are UNKNOWN where that was not by the one version of this part. drawn: tokens
        of all parts, with those behind an end token, which the server has read as well. Raises ValueError where their
        number does not fit the tokens.
        """
        prompt, read = self._prompt_tokens, self._prompt_tokens + drawn - 1
        if read < 1 or len(told) % read:
            raise ValueError(f"{len(told)} routed experts for {read} tokens that were read")
        experts = told.reshape(read, -1)[: prompt + len(self._ids) - 1].copy()
        known = 0 if self._experts is None else len(self._experts)
        if self._experts is not None:
            experts[:known] = self._experts
        versions = {span.version for span in self._spans if span.end > before}
        for span in self._spans:
            if versions != {span.version}:
                first, end = max(prompt, known, prompt + span.start - 1), prompt + min(span.end, before) - 1
                experts[first:end] = UNKNOWN
        self._experts = experts

    def _routed(self) -> str | None:
        """The experts of all tokens but the last, which nobody has read; UNKNOWN of those that no part told."""
        if self._experts is None:
            return None
        untold = self._prompt_tokens + len(self._ids) - 1 - len(self._experts)
        experts = np.pad(self._experts, ((0, untold), (0, 0)), constant_values=UNKNOWN)
        return base64.b64encode(experts.tobytes()).decode()


class _Part:
    """The pieces of a part so far."""

    def __init__(self, version: str, keeps_cache: bool) -> None:
        self.version = version  # of the server when it was asked
        self._keeps_cache = keeps_cache
        self.id = ""
        self.ids: list[int] = []
        self.logprobs: Logprobs = []
        self.kept: Kept | None = None
        self.known = 0  # tokens of `version` for certain: while the server still has it, no update came in between

    def stamped(self, spans: Sequence[WeightVersionSpan]) -> Sequence[WeightVersionSpan]:
        """The server's spans, those marked whose tokens follow from what another version computed."""
        if not self._keeps_cache:
            return spans
        return [replace(span, exact=span.version == self.version) for span in spans]

    def add(self, piece: Piece) -> None:
        """Raises ValueError where a piece is missing before this one."""
        meta = piece.meta_info
        ids = piece.output_ids[:-1] if self._repeats_its_last(piece) else piece.output_ids
        new, start = len(ids), meta.completion_tokens - len(ids)
        if start not in (0, len(self.ids)):
            raise ValueError(f"a piece begins at token {start}, {len(self.ids)} are known")
        self.id = meta.id
        self.ids[start:] = ids
        self.logprobs[start:] = meta.output_token_logprobs[-new:] if new else []
        if (kept := _kept(meta, new)) is not None:
            self.kept = [*(self.kept or [])[:start], *kept]
        if meta.weight_version == self.version:
            self.known = len(self.ids)

    def _repeats_its_last(self, piece: Piece) -> bool:
        """Whether the last id was told before: SGLang repeats it where it ends a request that waits in its queue.

        Such a piece seems to begin at the last known token. Where one token is known, so does a piece that has all of
        them again: there the log-probs are those of its own ids.
        """
        meta, others = piece.meta_info, piece.output_ids[:-1]
        if meta.finish_reason is None or meta.finish_reason.type != "abort":
            return False
        told = [token for _, token, _ in meta.output_token_logprobs]
        return meta.completion_tokens - len(others) == len(self.ids) and told[len(told) - len(others) :] == others


def _kept(meta: AnswerMeta | PieceMeta, tokens: int) -> Kept | None:
    """The kept sets of the last tokens of an answer, or of a piece. Raises ValueError where the server gave fewer."""
    sets, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if sets is None or logprobs is None:
        return None
    if len(sets) != len(logprobs) or len(sets) < tokens:
        raise ValueError(f"{len(sets)} kept sets and {len(logprobs)} log-probs of {tokens} tokens")
    return list(zip(logprobs[-tokens:], sets[-tokens:], strict=True)) if tokens else []

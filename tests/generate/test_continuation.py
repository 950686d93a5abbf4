"""An answer in parts is the answer that one server would have given."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.engine.answers import Answer, AnswerMeta, FinishReason, Piece, PieceMeta, WeightVersionSpan
from streamrl.generate.continuation import Continuation
from streamrl.moe_routing import UNKNOWN
from streamrl.types import PolicyVersion

PROMPT = [5, 6, 7]
SAMPLING = {"temperature": 0.7, "max_new_tokens": 12}
IDS = list(range(20, 32))
EXPERTS = np.arange((len(PROMPT) + len(IDS) - 1) * 2, dtype=np.int32)  # two numbers for each token that is read


def part(start: int, end: int, finish: str, *spans: tuple[str, int, int], experts: np.ndarray = EXPERTS) -> Answer:
    """Tokens `start <= t < end`, as a server tells them that was asked for them; the spans count from its first."""
    read = 2 * (len(PROMPT) + end - 1)
    meta = AnswerMeta(
        id="a",
        finish_reason=FinishReason(finish),
        weight_versions=tuple(WeightVersionSpan(*span) for span in spans),
        output_token_logprobs=[(-0.1 * token, token, None) for token in IDS[start:end]],
        routed_experts=base64.b64encode(experts[:read].tobytes()).decode(),
    )
    return Answer(output_ids=IDS[start:end], meta_info=meta)


def test_the_parts_of_an_answer_are_joined_and_each_request_asks_for_what_is_missing():
    answer = Continuation(PROMPT, SAMPLING)
    answer.add(part(0, 5, "abort", ("1.0", 0, 3), ("2.0", 3, 5)))
    assert answer.rest() == (PROMPT + IDS[:5], {"temperature": 0.7, "max_new_tokens": 7})
    answer.add(part(5, 5, "abort"))
    answer.add(part(5, 9, "abort", ("2.0", 0, 4), experts=-EXPERTS))
    assert not answer.finished
    assert answer.rest() == (PROMPT + IDS[:9], {"temperature": 0.7, "max_new_tokens": 3})
    answer.add(part(9, 11, "stop", ("3.0", 0, 2), experts=EXPERTS + 100))
    assert answer.finished
    whole = answer.answer()
    assert whole.output_ids == IDS[:11]
    assert [entry[1] for entry in whole.meta_info.output_token_logprobs] == IDS[:11]
    assert [(span.version, span.start, span.end) for span in whole.meta_info.weight_versions] == [
        ("1.0", 0, 3), ("2.0", 3, 9), ("3.0", 9, 11)
    ]  # fmt: skip
    assert whole.meta_info.finish_reason.type == "stop"


def test_what_was_verified_and_kept_of_drafts_is_added_up():
    answer = Continuation(PROMPT, SAMPLING)
    parts = part(0, 5, "abort", ("1.0", 0, 5)), part(5, 9, "stop", ("1.0", 0, 4))
    for one, verified, kept in zip(parts, (2, 1), (3, 2), strict=True):
        meta = replace(one.meta_info, spec_verify_ct=verified, spec_num_correct_drafts=kept)
        answer.add(replace(one, meta_info=meta))
    meta = answer.answer().meta_info
    assert (meta.spec_verify_ct, meta.spec_num_correct_drafts) == (3, 5)


def test_the_experts_of_a_token_are_those_of_the_part_that_read_it_first():
    answer = Continuation(PROMPT, SAMPLING)
    answer.add(part(0, 5, "abort", ("1.0", 0, 5)))
    answer.add(part(5, 9, "length", ("2.0", 0, 4), experts=EXPERTS + 1000))
    experts = np.frombuffer(base64.b64decode(answer.answer().meta_info.routed_experts), np.int32)
    known, read = 2 * (len(PROMPT) + 5 - 1), 2 * (len(PROMPT) + 9 - 1)
    assert np.array_equal(experts[:known], EXPERTS[:known])
    assert np.array_equal(experts[known:], EXPERTS[known:read] + 1000)


def cut_in_the_middle(known: int) -> Continuation:
    """An answer whose first `known` tokens are of version 1: their server was lost before it told any experts."""
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1))
    answer.add(piece(0, known, "1.0"))
    answer.cut()
    return answer


def rows(answer: Continuation) -> list[list[int]]:
    return np.frombuffer(base64.b64decode(answer.answer().meta_info.routed_experts), np.int32).reshape(-1, 2).tolist()


@pytest.mark.parametrize("images", [0, 4], ids=["text", "with images"])
def test_no_token_is_replayed_by_the_experts_of_another_version_than_drew_the_next_one(images: int):
    """A server reads more tokens of a prompt with images than it is sent."""
    answer = cut_in_the_middle(5)
    read = len(PROMPT) + images + 9 - 1
    told = np.arange(2 * read, dtype=np.int32)
    answer.begin(PolicyVersion(2))
    last = part(5, 9, "stop", ("2.0", 0, 4))
    routed = base64.b64encode(told.tobytes()).decode()
    answer.add(
        replace(last, meta_info=replace(last.meta_info, routed_experts=routed, prompt_tokens=len(PROMPT) + images + 5))
    )
    expected = told.reshape(-1, 2)
    expected[len(PROMPT) + images : len(PROMPT) + images + 4] = UNKNOWN  # the fifth token is read by version 2 first
    assert rows(answer) == expected.tolist()
    assert spans(answer) == [("1.0", 0, 5), ("2.0", 5, 9)]


def test_the_experts_that_a_lost_server_did_not_tell_are_those_of_another_one_with_the_same_version():
    answer = cut_in_the_middle(5)
    answer.begin(PolicyVersion(1))
    answer.add(part(5, 9, "stop", ("1.0", 0, 4)))
    assert rows(answer) == EXPERTS[: 2 * (len(PROMPT) + 8)].reshape(-1, 2).tolist()


def test_experts_are_unknown_where_nobody_can_say_which_of_two_versions_read_the_tokens():
    answer = cut_in_the_middle(5)
    answer.begin(PolicyVersion(1))
    answer.add(part(5, 9, "stop", ("1.0", 0, 1), ("2.0", 1, 4)))
    assert rows(answer)[len(PROMPT) : len(PROMPT) + 6] == [[UNKNOWN] * 2] * 4 + [[14, 15], [16, 17]]


def test_an_answer_whose_last_part_told_no_experts_has_a_row_for_every_token_that_was_read():
    answer = Continuation(PROMPT, SAMPLING)
    answer.add(part(0, 5, "abort", ("1.0", 0, 5)))
    answer.begin(PolicyVersion(1))
    answer.add(piece(5, 12, "1.0", again=5))
    answer.cut()
    assert answer.finished
    known = len(PROMPT) + 4
    assert rows(answer) == EXPERTS[: 2 * known].reshape(-1, 2).tolist() + [[UNKNOWN] * 2] * 7


def test_an_answer_that_was_cut_behind_its_last_token_is_whole():
    answer = Continuation(PROMPT, SAMPLING)
    answer.add(part(0, 12, "abort", ("1.0", 0, 12)))
    assert answer.finished
    assert answer.answer().meta_info.finish_reason.type == "length"


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("drawn", [5, 7], ids=["the last token", "drafts behind it"])
def test_an_answer_that_is_ended_in_the_step_of_its_end_token_is_whole(drawn: int, in_pieces: bool):
    """The server looks for no end any more in that step, in which it may keep several drafts."""
    answer = Continuation(PROMPT, {**SAMPLING, "stop_token_ids": [9, IDS[4]]})
    cut = part(0, drawn, "abort", ("1.0", 0, 3), ("2.0", 3, drawn))
    sets, logprobs = [[token, 1] for token in IDS[:drawn]], [-0.5] * drawn
    told = replace(cut.meta_info, output_token_sampling_mask=sets, output_token_sampling_logprobs=logprobs)
    if in_pieces:
        answer.begin(PolicyVersion(1))
        for start, end, finish in ((0, 3, None), (3, drawn, told.finish_reason)):
            kept = sets[:end], logprobs[:end]
            known = told.weight_versions, told.output_token_logprobs[:end], told.routed_experts
            answer.add(Piece(IDS[start:end], PieceMeta("a", finish, *known, *kept, end, "1.0")))
    else:
        answer.add(replace(cut, meta_info=told))
    assert (answer.fault, answer.finished, answer.goes_on) == ("", True, False)
    whole = answer.answer()
    meta = whole.meta_info
    assert (whole.output_ids, meta.finish_reason) == (IDS[:5], FinishReason("stop"))
    assert [entry[1] for entry in meta.output_token_logprobs] == IDS[:5]
    assert spans(answer) == [("1.0", 0, 3), ("2.0", 3, 5)]
    assert rows(answer) == EXPERTS[: 2 * (len(PROMPT) + 4)].reshape(-1, 2).tolist()
    assert meta.output_token_sampling_mask == [[token, 1] for token in IDS[:5]]
    assert meta.output_token_sampling_logprobs == [-0.5] * 5


def test_the_end_token_of_a_later_part_is_the_answers_too():
    answer = Continuation(PROMPT, {**SAMPLING, "stop_token_ids": [IDS[6]]})
    answer.add(part(0, 5, "abort", ("1.0", 0, 5)))
    assert answer.goes_on
    answer.add(part(5, 9, "abort", ("1.0", 0, 1), ("2.0", 1, 4)))
    assert answer.finished
    assert answer.answer().output_ids == IDS[:7]
    assert spans(answer) == [("1.0", 0, 6), ("2.0", 6, 7)]
    assert len(rows(answer)) == len(PROMPT) + 6


def test_an_end_token_in_the_last_place_is_an_end_and_no_lack_of_room():
    answer = Continuation(PROMPT, {**SAMPLING, "stop_token_ids": [IDS[11]]})
    answer.add(part(0, 12, "abort", ("1.0", 0, 12)))
    assert answer.answer().meta_info.finish_reason.type == "stop"


@pytest.mark.parametrize("own", [{"stop_token_ids": []}, {"stop_token_ids": [IDS[4]], "ignore_eos": True}])
def test_where_no_token_is_to_end_an_answer_it_goes_on(own: dict):
    answer = Continuation(PROMPT, {**SAMPLING, **own})
    answer.add(part(0, 5, "abort", ("1.0", 0, 5)))
    assert answer.rest() == (PROMPT + IDS[:5], {**SAMPLING, **own, "max_new_tokens": 7})


@pytest.mark.parametrize("tokens", [0, 4])
def test_an_answer_that_is_given_up_is_an_abort_with_what_it_has(tokens: int):
    answer = Continuation(PROMPT, SAMPLING)
    answer.add(part(0, tokens, "abort", ("1.0", 0, tokens)))
    whole = answer.answer()
    assert (whole.output_ids, whole.meta_info.finish_reason.type) == (IDS[:tokens], "abort")


def piece(start: int, end: int, version: str, *, ends: str | None = None, again: int | None = None) -> Piece:
    """Tokens `start <= t < end` of the answer, of a part that begins at `again`, or at 0; told under `version`."""
    first = again or 0
    meta = PieceMeta(
        id="a",
        finish_reason=FinishReason(ends) if ends else None,
        weight_versions=(WeightVersionSpan(version, 0, end - first),) if ends else (),
        output_token_logprobs=[(-0.1 * token, token, None) for token in IDS[start:end]],
        completion_tokens=end - first,
        weight_version=version,
    )
    return Piece(output_ids=IDS[start:end], meta_info=meta)


def spans(answer: Continuation) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in answer.answer().meta_info.weight_versions]


@pytest.mark.parametrize("again", [False, True], ids=["what is new", "all of it again"])
def test_the_pieces_that_a_lost_server_had_told_are_kept(again: bool):
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1))
    answer.add(piece(0, 3, "1.0"))
    answer.add(piece(0 if again else 3, 5, "1.0"))
    assert len(answer) == 5
    answer.cut()
    assert answer.rest() == (PROMPT + IDS[:5], {"temperature": 0.7, "max_new_tokens": 7})
    assert answer.version == PolicyVersion(1)
    answer.begin(PolicyVersion(2))
    answer.add(piece(5, 8, "2.0", again=5))
    answer.add(piece(8, 9, "2.0", again=5, ends="stop"))
    assert answer.finished
    answer.cut()
    assert answer.answer().output_ids == IDS[:9]
    assert [entry[1] for entry in answer.answer().meta_info.output_token_logprobs] == IDS[:9]
    assert spans(answer) == [("1.0", 0, 5), ("2.0", 5, 9)]


def test_pieces_behind_an_update_are_drawn_again_because_nobody_knows_whose_they_are():
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1))
    answer.add(piece(0, 3, "1.0"))
    answer.add(piece(3, 5, "2.0"))
    answer.add(piece(5, 7, "2.0"))
    answer.cut()
    assert (len(answer), spans(answer)) == (3, [("1.0", 0, 3)])


def test_a_piece_that_was_told_after_an_update_in_the_first_interval_is_nobodys():
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1))
    answer.add(piece(0, 3, "2.0"))
    answer.cut()
    assert (len(answer), answer.version) == (0, None)


LONG = list(range(100, 133))


def streamed(start: int, end: int, finish: str | None = None) -> Piece:
    """Tokens `start <= t < end` of LONG, as SGLang tells what is new: with their log-probs and kept sets."""
    ids = LONG[start:end]
    logprobs, sets = [(-0.1 * token, token, None) for token in ids], [[token, 1] for token in ids]
    reason = FinishReason(finish) if finish else None
    version = (WeightVersionSpan("1.0", 0, end),) if finish else ()
    return Piece(ids, PieceMeta("a", reason, version, logprobs, None, sets, [-0.5] * len(ids), end, "1.0"))


def ended_in_the_queue(end: int, unsent: Piece | None = None) -> Piece:
    """What SGLang tells where a request waits in its queue and is ended: its last id again, and all log-probs.

    `unsent`: a piece that was not sent yet is joined with it, as SGLang does that.
    """
    known = streamed(0, end, "abort")
    told = replace(known.meta_info, output_token_sampling_mask=None, output_token_sampling_logprobs=None)
    again = Piece(known.output_ids[-1:], told)
    if unsent is None:
        return again
    one, own = unsent.meta_info, again.meta_info
    joined = replace(
        own,
        output_token_logprobs=one.output_token_logprobs + own.output_token_logprobs,
        output_token_sampling_mask=one.output_token_sampling_mask,
        output_token_sampling_logprobs=one.output_token_sampling_logprobs,
    )
    return Piece(unsent.output_ids + again.output_ids, joined)


@pytest.mark.parametrize(
    "pieces",
    [
        (streamed(0, 1), streamed(1, 17), streamed(17, 33), ended_in_the_queue(33)),
        (streamed(0, 1), streamed(1, 17), ended_in_the_queue(33, streamed(17, 33))),
        (streamed(0, 1), ended_in_the_queue(33, streamed(1, 33))),
        (ended_in_the_queue(33, streamed(0, 33)),),
        (streamed(0, 1), streamed(0, 33, "abort")),
    ],
    ids=["sent", "joined", "joined behind one token", "joined into one", "all of it again"],
)
def test_the_pieces_of_a_request_that_was_ended_in_its_servers_queue_are_those_of_an_abort(pieces: tuple[Piece, ...]):
    answer = Continuation(PROMPT, {"max_new_tokens": 100})
    answer.begin(PolicyVersion(1))
    for each in pieces:
        answer.add(each)
    assert answer.fault == ""
    assert answer.rest() == (PROMPT + LONG, {"max_new_tokens": 67})
    whole = answer.answer()
    assert whole.meta_info.output_token_logprobs == [(-0.1 * token, token, None) for token in LONG]
    assert whole.meta_info.output_token_sampling_mask == [[token, 1] for token in LONG]
    assert whole.meta_info.output_token_sampling_logprobs == [-0.5] * 33
    assert spans(answer) == [("1.0", 0, 33)]


def test_a_request_of_one_token_that_was_ended_in_its_servers_queue_goes_on_behind_it():
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1))
    answer.add(streamed(0, 1))
    answer.add(ended_in_the_queue(1))
    assert answer.rest()[0] == PROMPT + LONG[:1]


def test_a_missing_piece_is_a_fault():
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1))
    answer.add(piece(0, 3, "1.0"))
    answer.add(piece(5, 7, "1.0"))
    assert answer.fault == "answer a: a piece begins at token 5, 3 are known"


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (part(0, 5, "stop", ("1.0", 0, 5), experts=EXPERTS[:5]), "5 routed experts for 7 tokens that were read"),
        (
            part(0, 5, "abort", ("1.0-partial", 0, 5)),
            "policy version '1.0-partial' is not of the form STEP.INCARNATION",
        ),
    ],
)
def test_an_answer_in_which_a_server_contradicts_itself_stays_an_abort(wrong: Answer, fault: str):
    answer = Continuation(PROMPT, SAMPLING)
    answer.add(wrong)
    answer.add(part(5, 9, "stop", ("2.0", 0, 4)))
    assert (answer.finished, answer.goes_on) == (False, False)
    assert answer.answer().meta_info.finish_reason == FinishReason("abort", f"answer a: {fault}")


def stamps(answer: Continuation) -> list[tuple[str, int, int, bool]]:
    return [(span.version, span.start, span.end, span.exact) for span in answer.answer().meta_info.weight_versions]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_where_an_update_keeps_the_cache_tokens_behind_it_are_inexact_until_another_request_goes_on(in_pieces: bool):
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1), keeps_cache=True)
    if in_pieces:
        answer.add(piece(0, 3, "1.0"))
        last = piece(3, 7, "2.0", ends="abort")
        spans_of_all = (WeightVersionSpan("1.0", 0, 5), WeightVersionSpan("2.0", 5, 7))
        answer.add(replace(last, meta_info=replace(last.meta_info, completion_tokens=7, weight_versions=spans_of_all)))
    else:
        answer.add(part(0, 7, "abort", ("1.0", 0, 5), ("2.0", 5, 7)))
    answer.cut()
    answer.begin(PolicyVersion(2), keeps_cache=True)  # reads all tokens again
    answer.add(part(7, 11, "stop", ("2.0", 0, 4)))
    answer.cut()
    assert stamps(answer) == [("1.0", 0, 5, True), ("2.0", 5, 7, False), ("2.0", 7, 11, True)]


def test_where_an_update_empties_the_cache_every_token_is_exact():
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1))
    answer.add(part(0, 11, "stop", ("1.0", 0, 5), ("2.0", 5, 11)))
    assert stamps(answer) == [("1.0", 0, 5, True), ("2.0", 5, 11, True)]


def test_a_request_that_waited_while_the_cache_changed_hands_is_inexact_from_its_first_token():
    answer = Continuation(PROMPT, SAMPLING)
    answer.begin(PolicyVersion(1), keeps_cache=True)
    answer.add(part(0, 11, "stop", ("2.0", 0, 11)))
    assert stamps(answer) == [("2.0", 0, 11, False)]

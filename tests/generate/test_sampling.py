"""How a request is drawn: what a task may choose, what is refused, and where stop strings end an answer."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from streamrl.config.generate import GenerateConfig
from streamrl.engine.answers import Answer, AnswerMeta, FinishReason, Piece, PieceMeta, WeightVersionSpan
from streamrl.generate.continuation import Continuation
from streamrl.generate.sampling import IMPLIED_TOP_K, Sampling
from streamrl.generate.stop_strings import StopStrings
from streamrl.types import PolicyVersion


class Letters:
    """One token a letter; the end token is 0, and <end> is special."""

    end_ids = (0,)
    special = {"<end>": 99}  # noqa: RUF012

    def text(self, ids):
        return ["".join(chr(token) for token in each if token) for each in ids]


def drawing(own, *, greedy=False, trained=True, **generate):
    config = GenerateConfig.model_validate({"sampling": {"max_new_tokens": 8}, **generate})
    return Sampling(config, Letters(), greedy=greedy, trained=trained).drawing(own)


@pytest.mark.parametrize(
    ("own", "options", "parameters", "kept", "temperature"),
    [
        ({}, {}, {"temperature": 1.0, "top_k": -1}, False, None),
        ({"temperature": 0.5}, {}, {"temperature": 0.5}, False, 0.5),
        ({"temperature": 1}, {}, {"temperature": 1.0}, False, None),
        ({"top_p": 0.9}, {}, {"top_p": 0.9, "top_k": IMPLIED_TOP_K}, True, None),
        ({"top_p": 0.9, "top_k": 20}, {}, {"top_p": 0.9, "top_k": 20}, True, None),
        ({"min_p": 0.1}, {}, {"min_p": 0.1, "top_k": IMPLIED_TOP_K}, True, None),
        ({"top_k": 0, "top_p": None}, {}, {"top_k": -1, "top_p": 1.0}, False, None),
        ({"top_p": 0.9, "temperature": 0.0}, {"trained": False}, {"top_p": 0.9, "temperature": 0.0}, False, None),
        ({"temperature": 0.7, "top_p": 0.5}, {"greedy": True}, {"temperature": 0.0, "top_p": 1.0}, False, None),
        ({"stop_token_ids": [5]}, {}, {"stop_token_ids": [0, 5]}, False, None),
        ({"stop": "<end>"}, {}, {"stop_token_ids": [0, 99]}, False, None),
        ({"most_new_tokens": 100}, {}, {"max_new_tokens": 8}, False, None),
        ({}, {"sampling": {"top_k": 64}}, {"top_k": 64}, True, None),
    ],
)
def test_a_task_draws_in_its_own_way_and_what_shapes_a_trained_draw_is_recorded(
    own, options, parameters, kept, temperature
):
    made = drawing(own, **options)
    assert {name: made.parameters[name] for name in parameters} == parameters
    assert (made.kept_sets, made.temperature) == (kept, temperature)
    assert made.apart == kept


@pytest.mark.parametrize(
    ("own", "options", "reason"),
    [
        ({"frequency_penalty": 1.0}, {}, "sampling override 'frequency_penalty'; allowed: max_new_tokens"),
        ({"temperature": 0}, {}, "temperature: 0 draws greedily"),
        ({"temperature": float("nan")}, {}, "temperature: nan is not allowed"),
        ({"top_k": 1}, {}, "top_k: 1 is not allowed in training"),
        ({"top_k": 5000}, {}, "allowed: -1, 2 to 4096"),
        ({"top_p": 0.0}, {}, "top_p: 0 is not allowed"),
        ({"top_p": 0.5}, {"attach": ["http://a:1"], "router": "http://b:2"}, "generate.router=http://b:2"),
        ({"top_p": 0.5}, {"speculation": {"algorithm": "ngram"}}, "speculation.algorithm=ngram return no kept sets"),
        ({"min_p": 0.1}, {"speculation": {"algorithm": "ngram"}, "trained": False}, "min_p: 0.1 is nothing that"),
        ({"seed": 3}, {}, "seed: 3 would not be kept to"),
        ({"min_p": 0.1}, {"server_args": {"enable_deterministic_inference": True}}, "min_p"),
        ({"stop": ["a", ""]}, {}, "stop: "),
        ({"stop_token_ids": [-1]}, {}, "stop_token_ids: "),
        ({"max_new_tokens": 0}, {}, "max_new_tokens: 0"),
    ],
)
def test_what_could_not_be_trained_is_refused_in_one_line(own, options, reason):
    with pytest.raises(ValueError, match=r"\w") as refused:
        drawing(own, **options)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_answers_of_a_request_with_a_seed_are_drawn_by_seeds_of_their_own():
    made = drawing({"seed": 7}, server_args={"enable_deterministic_inference": True})
    assert [made.of_answer(number)["sampling_seed"] for number in range(2)] == [7, 8]
    assert made.apart


def answer(text: str, finish: str = "length") -> Answer:
    ids, prompt = [ord(letter) for letter in text], 3
    experts = np.arange((prompt + len(ids) - 1) * 2, dtype=np.int32)
    spans = (WeightVersionSpan("1.0", 0, 4), WeightVersionSpan("2.0", 4, len(ids)))
    return Answer(
        output_ids=ids,
        meta_info=AnswerMeta(
            id="a",
            finish_reason=FinishReason(finish),
            weight_versions=spans,
            output_token_logprobs=[(-1.0, token, None) for token in ids],
            routed_experts=base64.b64encode(experts.tobytes()).decode(),
            output_token_sampling_mask=[[token] for token in ids],
            output_token_sampling_logprobs=[0.0] * len(ids),
        ),
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("x" * 40, None),
        ("the end of it", "the end"),
        ("x" * 30 + "end" + "x" * 30 + "end", "x" * 30 + "end"),
        ("x" * 15 + "end" + "stop", "x" * 15 + "end"),
        ("a stop", "a stop"),
    ],
)
def test_an_answer_goes_as_far_as_the_token_that_completes_a_stop_string(text, kept):
    stop = StopStrings(["end", "stop"], Letters())
    cut = stop.cut(whole := answer(text), prompt=3)
    if kept is None:
        assert cut is whole
        return
    meta = cut.meta_info
    assert Letters().text([cut.output_ids]) == [kept]
    assert meta.finish_reason.type == "stop"
    assert meta.weight_versions[-1].end == len(kept) == len(meta.output_token_logprobs)
    assert len(meta.output_token_sampling_mask) == len(meta.output_token_sampling_logprobs) == len(kept)
    assert len(base64.b64decode(meta.routed_experts)) == (3 + len(kept) - 1) * 8


def piece(ids, *, after: int, finish: str | None = None, version: str = "1.0") -> Piece:
    meta = PieceMeta(
        id="a",
        finish_reason=None if finish is None else FinishReason(finish),
        weight_versions=(WeightVersionSpan(version, 0, after),) if finish else (),
        output_token_logprobs=[(-1.0, token, None) for token in ids],
        output_token_sampling_mask=[[token, 1] for token in ids],
        output_token_sampling_logprobs=[-0.5] * len(ids),
        completion_tokens=after,
        weight_version=version,
    )
    return Piece(output_ids=ids, meta_info=meta)


def test_kept_sets_of_pieces_and_parts_are_those_of_the_answer_and_a_stop_string_finishes_it():
    stop = StopStrings(["cd"], Letters())
    under_way = Continuation([5, 6], {"max_new_tokens": 100}, stop.found)
    under_way.begin(PolicyVersion(1))
    under_way.add(piece([97, 98], after=2))
    assert not under_way.ended
    under_way.cut()  # its server is lost
    under_way.begin(PolicyVersion(2))
    under_way.add(piece([99, 100], after=2, version="2.0"))
    assert under_way.ended
    assert not under_way.finished  # which version drew the tokens is told at the end of the part
    under_way.add(piece([101], after=3, finish="abort", version="2.0"))
    assert under_way.finished
    made = under_way.answer()
    assert made.meta_info.output_token_sampling_mask == [[token, 1] for token in (97, 98, 99, 100, 101)]
    assert made.meta_info.output_token_sampling_logprobs == [-0.5] * 5
    assert stop.cut(made, prompt=2).output_ids == [97, 98, 99, 100]

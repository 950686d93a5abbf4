"""The keys of generators that belong together."""

from __future__ import annotations

import pytest

from streamrl.config import Config

FOUR = tuple(f"http://gpu-{index}:30000" for index in range(4))


def generate(**keys: object) -> dict[str, object]:
    return {"generate": keys}


def test_the_addresses_of_a_pool_go_to_its_workers_in_turn():
    config = Config.model_validate(generate(workers=2, servers=2, attach=FOUR))
    assert [config.of_worker(index).generate.attach for index in range(2)] == [FOUR[:2], FOUR[2:]]
    assert config.of_worker(1).generate.servers == 2
    with pytest.raises(ValueError, match=r"none for generator 2.*servers=2 for each of generate.workers=2"):
        config.of_worker(2)


@pytest.mark.parametrize(
    ("tree", "seconds"),
    [
        ({}, 900),
        ({"replay": {"group_timeout": 3600}}, 3600),
        ({"evaluate": {"timeout": 5000}}, 5000),
        (generate(request_timeout=60), 60),
        (generate(request_timeout=60, pools=[{"name": "slow", "request_timeout": 70}]), 70),
    ],
)
def test_a_request_may_take_as_long_as_its_answer_counts_unless_the_pool_says_otherwise(tree, seconds):
    assert Config.model_validate(tree).of_worker(0).request_timeout == seconds


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        (
            generate(workers=2, servers=3, attach=FOUR),
            r"4 addresses for .*allowed: generate.servers=3 for each",
        ),
        (generate(workers=5, attach=FOUR), r"4 addresses for generate.workers=5; allowed: one for each worker, 5"),
        (generate(router="http://gpu-9:8000"), r"router: http://gpu-9:8000.*allowed: generate.attach"),
        (generate(least_in_flight=40), r"least_in_flight: 40 is above groups_in_flight=32; allowed: up to 32"),
        (
            generate(router="http://r:1", attach=FOUR) | {"publish": {"interruption": "abort"}},
            r"publish.interruption: abort .*generate.router=http://r:1.*allowed: retract, in_place",
        ),
        (
            generate(router="http://r:1", attach=FOUR) | {"learner": {"lora": {"rank": 4, "publish": "adapter"}}},
            r"generate.router: http://r:1 would choose a server without the adapter",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_one_line(tree: dict[str, object], told: str):
    with pytest.raises(ValueError, match=told):
        Config.model_validate(tree)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"generate": {"attach": ["http://127.0.0.1:1"]}}, r"generate\.attach: http://127\.0\.0\.1:1 .* allowed: "),
        ({"publish": {"interruption": "drain"}}, r"publish\.interruption: drain .* allowed: retract"),
    ],
)
def test_what_cannot_take_turns_is_refused_in_a_shared_placement(given, refused):
    Config.model_validate(given)
    with pytest.raises(ValueError, match=refused):
        Config.model_validate({**given, "run": {"placement": "shared"}})

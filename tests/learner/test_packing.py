"""Which sample goes where, and what a packed row says."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_parts import make_batch

from streamrl.config.file import ConfigError
from streamrl.learner.batch_metrics import batch_metrics
from streamrl.learner.bins import plan
from streamrl.learner.packing import MicroBatch, Packing, SequenceTooLongError, cut, plan_batch, plan_step
from streamrl.sampling_columns import TEMPERATURE, kept_columns
from streamrl.types import Batch, PolicyVersion, VersionSpan


def packing(ranks: int = 1, budget: int = 100, share_prompts: bool = True, **more) -> Packing:
    return Packing(ranks=ranks, budget=budget, share_prompts=share_prompts, **more)


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    ranks=st.integers(1, 4),
    budget=st.integers(50, 120),
    multiple=st.integers(1, 3),
)
def test_every_index_is_planned_once_within_the_budget_and_every_rank_has_as_many_bins(
    lengths, ranks, budget, multiple
):
    bins = plan(lengths, ranks, budget, multiple)
    (count,) = {len(of_rank) for of_rank in bins}
    assert count % multiple == 0
    assert sorted(index for of_rank in bins for chosen in of_rank for index in chosen) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in chosen) <= budget for of_rank in bins for chosen in of_rank)


def test_the_longest_go_first_so_that_bins_are_even():
    lengths = [1, 7, 3, 9, 2, 8]
    assert [sum(lengths[index] for index in chosen) for (chosen,) in plan(lengths, 3, budget=100)] == [10, 10, 10]


def test_the_example_of_a_packed_row_holds(two_answers):
    ((row,),) = plan_batch(two_answers, [1.0, -1.0], packing(1, 100, True))
    assert row.ids.tolist() == [5, 6, 7, 8, 9]
    assert row.positions.tolist() == [0, 1, 2, 3, 2]
    assert row.segments.tolist() == [[0, 2, 0, 0], [2, 2, 0, 2], [4, 1, 0, 2]]
    assert row.targets.tolist() == [1, 2, 3, 1, 4]
    assert row.tokens.tolist() == [7, 8, 2, 9, 2]
    assert row.sample.tolist() == [0, 0, 0, 1, 1]
    assert row.place.tolist() == [0, 1, 2, 3, 4]
    assert row.routed_experts is None
    assert row.advantages.tolist() == [1, 1, 1, -1, -1]
    assert row.staleness.tolist() == [1, 1, 1, 1, 1]


def test_bins_that_run_at_the_same_time_are_neighbours_in_length_and_ranks_take_turns_with_the_longer_one():
    bins = plan([9, 8, 6, 5], ranks=2, budget=9)
    assert bins == [[[0], [3]], [[1], [2]]]


@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.3])
def test_bins_of_very_uneven_sequences_are_of_one_length(sigma):
    lengths = np.clip(np.random.default_rng(0).lognormal(7.3, sigma, 1024), 64, 12000).astype(int).tolist()
    loads = [sum(lengths[index] for index in chosen) for of_rank in plan(lengths, 8, 16384) for chosen in of_rank]
    assert max(loads) <= 1.0075 * sum(loads) / len(loads)


def test_a_bin_that_overflows_is_retried_with_one_more():
    # 3 x 7 tokens are less than two rows of 12, but no two of them share one.
    assert plan([7, 7, 7], ranks=1, budget=12) == [[[0], [1], [2]]]
    assert plan([7, 7, 7], ranks=1, budget=12, multiple=2) == [[[0], [1], [2], []]]


@given(groups=st.integers(1, 9), parts=st.integers(1, 9))
def test_mini_batches_are_the_groups_in_order_in_nearly_equal_parts(groups, parts):
    batch = make_batch(groups=groups, size=2)
    if parts > groups:
        with pytest.raises(ConfigError, match=f"learner.mini_batches: {parts} .* allowed: 1..{groups}"):
            cut(batch, parts)
        return
    found = cut(batch, parts)
    assert [group for part in found for group in part.groups] == list(batch.groups)
    assert len(found) == parts
    assert max(len(part.groups) for part in found) - min(len(part.groups) for part in found) <= 1


@pytest.mark.parametrize("share_prompts", [True, False])
def test_mini_batches_train_what_the_whole_batch_trains_and_number_its_tokens_through(share_prompts):
    batch = make_batch(step=3, groups=5)
    advantages = [float(index) for index in range(len(batch.samples))]
    parts = plan_step(batch, advantages, packing(2, 60, share_prompts), mini_batches=3)
    whole = plan_batch(batch, advantages, packing(1, 4096, share_prompts))
    rows = [row for part in parts for of_rank in part for row in of_rank]

    def trained(rows):
        return sorted(
            (int(place), entry) for row in rows for place, entry in zip(row.place, _trained(row), strict=True)
        )

    assert trained(rows) == trained(whole[0])
    places = [place for row in rows for place in row.place.tolist()]
    assert sorted(places) == list(range(sum(group.trained_tokens for group in batch.groups)))
    first = [place for of_rank in parts[0] for row in of_rank for place in row.place.tolist()]
    assert sorted(first) == list(range(batch.groups[0].trained_tokens))


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_experts_of_the_generator_are_beside_their_tokens(share_prompts, two_answers):
    first, second = two_answers.groups[0].samples
    experts = np.arange(3 * 4, dtype=np.uint8).reshape(3, 4)  # two layers, two experts of each token
    prompt = np.array([[[50, 51, 52, 53]], [[54, 55, 56, 57]], [[-1, -1, -1, -1]]], np.int16)
    first = msgspec.structs.replace(first, extras={"routed_experts": experts, "prompt_routed_experts": prompt})
    batch = _with_samples(two_answers, (first, second))
    ((row,),) = plan_batch(batch, [1.0, -1.0], packing(share_prompts=share_prompts, routing=(2, 2)))
    assert (row.routed_experts.dtype, row.routed_experts.shape) == (np.int16, (len(row.ids), 2, 2))
    prompts, unknown = [[[50, 51], [52, 53]], [[54, 55], [56, 57]]], [[-1, -1], [-1, -1]]
    answer = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    expected = [*prompts, *answer, *([] if share_prompts else prompts), unknown]
    assert row.routed_experts.tolist() == expected


def test_samples_share_a_prompt_only_if_it_took_the_same_experts(two_answers):
    first, second = two_answers.groups[0].samples
    routing = {"routed_experts": np.zeros((3, 1), np.int16), "prompt_routed_experts": np.ones((3, 1, 1), np.int16)}
    first = msgspec.structs.replace(first, extras=routing)
    newer = (VersionSpan(PolicyVersion(3), 0, 1), VersionSpan(PolicyVersion(4), 1, 2))
    for spans, segments in ((second.spans, 3), (newer, 4)):
        batch = _with_samples(two_answers, (first, msgspec.structs.replace(second, spans=spans)))
        ((row,),) = plan_batch(batch, [1.0, -1.0], packing(routing=(1, 1)))
        assert len(row.segments) == segments
        assert row.routed_experts[-3:].ravel().tolist() == ([0, 0, -1] if segments == 3 else [-1, -1, -1])


def test_a_row_without_work_has_unknown_experts(two_answers):
    batch = _with_samples(two_answers, two_answers.groups[0].samples[:1])
    (_,), (idle,) = plan_batch(batch, [1.0], packing(ranks=2, routing=(3, 2)))
    assert (idle.routed_experts == -1).all()
    assert idle.routed_experts.shape == (1, 3, 2)


def test_without_sharing_every_answer_has_its_own_prompt(two_answers):
    ((row,),) = plan_batch(two_answers, [1.0, -1.0], packing(1, 100, False))
    assert row.ids.tolist() == [5, 6, 7, 8, 5, 6, 9]
    assert row.segments.tolist() == [[0, 4, 0, 0], [4, 3, 0, 0]]
    assert row.targets.tolist() == [1, 2, 3, 5, 6]


def test_whole_answers_have_the_last_token_too_where_there_is_room_for_it(two_answers):
    ((row,),) = plan_batch(two_answers, [1.0, -1.0], packing(1, 100, False, whole_answers=True))
    ((least,),) = plan_batch(two_answers, [1.0, -1.0], packing(1, 100, False))
    assert row.segments[:, 1].tolist() == (least.segments[:, 1] + 1).tolist()
    for field in ("tokens", "behaviour", "advantages", "place"):
        assert np.array_equal(getattr(row, field), getattr(least, field)), field
    for start, length, *_ in row.segments.tolist():
        assert row.ids[start : start + length].tolist() in [
            [*sample.prompt_ids, *sample.output_ids] for sample in two_answers.samples
        ]
    longest = max(len(sample.prompt_ids) + len(sample.output_ids) for sample in two_answers.samples)
    rows = plan_batch(two_answers, [1.0, -1.0], packing(1, longest - 1, False, whole_answers=True))[0]
    assert sorted(length for each in rows for length in each.segments[:, 1].tolist()) == [4, 4]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(("ranks", "budget"), [(1, 30), (1, 4096), (3, 40)])
def test_every_trained_token_is_in_one_row_with_what_belongs_to_it(ranks, budget, share_prompts):
    batch = make_batch(step=3)
    advantages = [float(index) for index in range(len(batch.samples))]
    rows = [r for of_rank in plan_batch(batch, advantages, packing(ranks, budget, share_prompts)) for r in of_rank]
    assert all(len(row.ids) <= budget for row in rows)
    found = sorted(entry for row in rows for entry in _trained(row))
    expected = sorted(
        (
            advantage,
            (*sample.prompt_ids.tolist(), *sample.output_ids[:t].tolist()),
            int(sample.output_ids[t]),
            float(sample.logprobs[t]),
            3 - int(sample.token_steps()[t]),
        )
        for sample, advantage in zip(batch.samples, advantages, strict=True)
        for t in np.flatnonzero(sample.loss_mask)
    )
    assert found == expected


def test_a_group_over_the_budget_is_cut_into_bundles_that_repeat_the_prompt():
    batch = make_batch(groups=1, size=8)
    prompt = len(batch.samples[0].prompt_ids)
    (rows,) = plan_batch(batch, [0.0] * 8, packing(1, prompt + 25, True))
    assert len(rows) > 1
    assert all(row.segments[0].tolist() == [0, prompt, 0, 0] for row in rows)


def test_a_rank_without_work_gets_a_row_without_targets():
    batch = Batch(step=0, groups=(msgspec.structs.replace(make_batch().groups[1], samples=make_batch().samples[4:5]),))
    (_,), (idle,) = plan_batch(batch, [1.0], packing(2, 100, True))
    assert len(idle.ids) == 1
    assert len(idle.targets) == idle.samples == 0


def test_a_sequence_over_the_budget_is_refused_by_name():
    with pytest.raises(SequenceTooLongError, match=r"tokens_per_micro_batch: 5 .* group 0 sample 1 of \d+ tokens"):
        plan_batch(make_batch(), [0.0] * 12, packing(1, 5, True))


def test_an_empty_prompt_is_refused_by_name(two_answers):
    group = two_answers.groups[0]
    empty = msgspec.structs.replace(group.samples[1], prompt_ids=np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="group 7 sample 1 has an empty prompt"):
        _plan(two_answers, (group.samples[0], empty))


def test_tokens_newer_than_the_step_have_age_0(two_answers):
    """Behind a restored checkpoint a lost group is generated again by servers that are further."""
    group = two_answers.groups[0]
    late = msgspec.structs.replace(group.samples[1], spans=(VersionSpan(PolicyVersion(9), 0, 2),))
    batch = _with_samples(two_answers, (group.samples[0], late))
    ((micro,),) = plan_batch(batch, [1.0, 1.0], packing())
    assert micro.staleness[micro.sample == 1].tolist() == [0, 0]
    assert batch_metrics(batch)["staleness/max"] == micro.staleness.max()


def test_a_rehearsal_has_no_row_with_two_groups():
    batch = make_batch(groups=4)
    apart = dataclasses.replace(packing(1, 200, True), apart=True)
    ((*rows,),) = plan_batch(batch, [0.0] * 16, apart)
    assert sorted(row.groups for row in rows if row.groups) == [((group_id, 0),) for group_id in range(4)]
    ((together,),) = plan_batch(batch, [0.0] * 16, packing(1, 1000, True))
    assert sorted(together.groups) == [(group_id, 0) for group_id in range(4)]


def _plan(batch: Batch, samples: tuple) -> None:
    plan_batch(_with_samples(batch, samples), [0.0, 0.0], packing())


def _with_samples(batch: Batch, samples: tuple) -> Batch:
    groups = (msgspec.structs.replace(batch.groups[0], samples=samples),)
    return msgspec.structs.replace(batch, groups=groups)


def _trained(row: MicroBatch) -> list[tuple]:
    """(advantage, the tokens that the target's position sees, token, behaviour log-prob, staleness) of each target."""
    entries = []
    for index, place in enumerate(row.targets):
        start, _, prefix, length = next(s for s in row.segments if s[0] <= place < s[0] + s[1])
        seen = [*row.ids[prefix : prefix + length].tolist(), *row.ids[start : place + 1].tolist()]
        assert row.positions[place] == len(seen) - 1
        entries.append(
            (
                float(row.advantages[index]),
                tuple(seen),
                int(row.tokens[index]),
                float(row.behaviour[index]),
                int(row.staleness[index]),
            )
        )
    return entries


@pytest.mark.parametrize("share_prompts", [True, False])
def test_kept_sets_and_temperatures_are_those_of_the_trained_tokens(two_answers, share_prompts):
    (group,) = two_answers.groups
    first, second = group.samples
    own = {**kept_columns([[7, 9], [], [2]]), TEMPERATURE: np.array([0.5, 0.0, 0.0])}
    first = msgspec.structs.replace(first, extras=own, loss_mask=np.array([True, False, True]))
    group = msgspec.structs.replace(group, samples=(first, second), temperature=0.9)
    rows = packing(share_prompts=share_prompts)
    ((micro,),) = plan_batch(msgspec.structs.replace(two_answers, groups=(group,)), [1.0, 1.0], rows)
    order = np.argsort(micro.place)
    assert micro.temperature[order].tolist() == [0.5, 0.9, 0.9, 0.9]
    assert micro.kept.counts[order].tolist() == [2, 1, 0, 0]
    assert micro.kept.ids.tolist() == [7, 9, 2]
    ((plain,),) = plan_batch(two_answers, [1.0, 1.0], rows)
    assert plain.kept is None


def test_branches_follow_their_own_prompts_and_know_the_tokens_of_their_rollout(two_answers):
    first, second = two_answers.groups[0].samples
    summary = msgspec.structs.replace(second, prompt_ids=np.array([4], np.int32))
    group = msgspec.structs.replace(
        two_answers.groups[0], samples=(first, summary, first, summary, second), branches=(2, 2, 1), arena=None
    )
    batch = msgspec.structs.replace(two_answers, groups=(group,))
    ((row,),) = plan_batch(batch, [1.0, 1.0, -1.0, -1.0, 0.0], packing())
    assert row.ids.tolist() == [5, 6, 7, 8, 7, 8, 9, 4, 9, 9]  # each prompt once
    assert row.place.tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 3, 4, 8, 9]  # as the batch has them
    assert row.rollout_tokens.tolist() == [5, 5, 5, 5, 5, 5, 2, 2, 5, 5, 5, 5]
    assert row.advantages.tolist() == [1, 1, 1, -1, -1, -1, 0, 0, 1, 1, -1, -1]
    ((plain,),) = plan_batch(two_answers, [1.0, -1.0], packing())
    assert plain.rollout_tokens is None


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("budget", [30, 4096])
def test_every_branch_is_packed_once_whatever_the_rows(budget, share_prompts):
    batch = make_batch(step=3, groups=2, size=6)
    branched = msgspec.structs.replace(
        batch, groups=tuple(msgspec.structs.replace(group, branches=(1, 3, 2)) for group in batch.groups)
    )
    advantages = [float(index) for index in range(len(batch.samples))]

    def entries(each):
        planned = plan_batch(each, advantages, packing(2, budget, share_prompts))
        rows = [row for of_rank in planned for row in of_rank]
        places = [place for row in rows for place in row.place.tolist()]
        return sorted(zip(places, (entry for row in rows for entry in _trained(row)), strict=True))

    assert entries(branched) == entries(batch)

"""Groups that are trained again: under every schedule that hypothesis finds, and the rules one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from pydantic import ValidationError
from replay_schedule import Schedule
from test_buffer import NEW, SCHEDULES, complete, issue_all, written

from streamrl.config import Config
from streamrl.lab.audit.findings import Findings
from streamrl.lab.audit.history import History
from streamrl.lab.audit.reuse import Sizes
from streamrl.replay.buffer import Buffer, make_buffer
from streamrl.replay.history import Contents
from streamrl.replay.records import Consumed, Snapshot
from streamrl.replay.reuse import Reuse
from streamrl.types import Batch, Group, PolicyVersion


class ReuseSchedule(Schedule):
    """The learner tells the effective sample sizes of most groups, and some groups turn out to be untrainable."""

    def reuse(self, data: st.DataObject, groups: int, bound: float) -> dict[str, Any]:
        most = int(groups - groups / (bound + 1) + 1e-9) if bound else 0
        if most == 0:
            return {}
        return {
            "reuse": data.draw(st.integers(2, 3), label="uses"),
            "reuse_share": data.draw(st.integers(1, most), label="reused") / groups,
            "reuse_max_age": data.draw(st.sampled_from([None, 1, 2, 5]), label="age"),
        }

    def train(self) -> bool:
        step = self.position
        if not super().train():
            return False
        told = [[None, 0.3, 0.6, 0.9, 1.0][hash((step, group_id)) % 5] for group_id in self.trained[step]]
        self.buffer.measured(step, told if step % 4 != 3 else [])
        self.write()
        return True

    def check_uses(self, step: int, groups: dict[int, Group]) -> None:
        replay = self.config.replay
        earlier = {i: group for before in range(step) for i, group in self.trained.get(before, {}).items()}
        fresh = {group_id: group for group_id, group in groups.items() if group_id not in earlier}
        assert len(fresh) >= replay.fresh, "more places than are configured"
        self.check_ages(step, fresh.values())
        for group_id in groups.keys() - fresh.keys():
            uses = sum(group_id in self.trained.get(before, {}) for before in range(step))
            assert uses < replay.reuse, "trained too often"
            assert groups[group_id] is earlier[group_id], "another group under the same id"
            oldest = groups[group_id].oldest
            assert oldest is not None
            assert step - oldest.step <= replay.reuse_bound, "too old to be trained again"
        if replay.order == "fifo":
            assert list(fresh) == list(range(len(earlier), len(earlier) + len(fresh)))

    @property
    def audited(self) -> Config:
        """With which the buffer was made."""
        return self.config

    def teardown(self) -> None:
        """And the audit counts what was trained again, and finds nothing to say about it."""
        super().teardown()
        if not hasattr(self, "buffer"):
            return
        ends = {step: str(PolicyVersion(step + 1, self.incarnation)) for step in self.trained}
        history, findings = History(self.audited, ends), Findings(bound=self.buffer.order.worst_staleness)
        for step, groups in sorted(self.trained.items()):
            history.check(Batch(step=step, groups=tuple(groups.values())), findings)
        uses = Counter(group_id for groups in self.trained.values() for group_id in groups)
        assert findings.problems == []
        assert findings.reused == sum(uses.values()) - len(uses)
        if self.journalled:
            sizes = Sizes(self.config.replay)
            assert [problem for record in self.records for problem in sizes.add(record)] == []

    @precondition(lambda self: self.position in self.trained or self.position - 1 in self.trained)
    @rule(data=st.data())
    def cannot_be_trained(self, data: st.DataObject) -> None:
        step = self.position - 1
        group = data.draw(st.sampled_from(sorted(self.trained.get(step, {}).values(), key=lambda each: each.group_id)))
        self.buffer.quarantine(step, group.group_id, group.attempt, "too much")
        self.write()


def test_every_schedule_trains_a_group_k_times_at_most_within_its_age_and_survives_crashes() -> None:
    run_state_machine_as_test(ReuseSchedule, settings=settings(SCHEDULES, max_examples=60))


@pytest.mark.slow
def test_many_more_schedules_with_reuse() -> None:
    run_state_machine_as_test(ReuseSchedule, settings=settings(SCHEDULES, max_examples=2500))


class AllSlots(ReuseSchedule):
    """The slots of a run without reuse: what the schedules must notice."""

    @staticmethod
    def make(config: Config) -> Buffer:
        buffer = make_buffer(config)
        if config.replay.order != "fifo":
            return buffer
        worst = buffer.order.worst_staleness
        order = type("Wider", (type(buffer.order),), {"worst_staleness": worst})
        slots = int((config.replay.bound + 1) * config.replay.groups_per_step)
        buffer.order = order(config.replay.groups_per_step, slots)
        buffer.order.fresh = config.replay.fresh
        buffer.adaptive.slots = slots
        return buffer


@pytest.mark.slow
def test_the_slots_of_a_run_without_reuse_would_break_the_bound() -> None:
    failing = settings(SCHEDULES, max_examples=3000, phases=[HypothesisPhase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError, match="older than the bound"):
        run_state_machine_as_test(AllSlots, settings=failing)


# -- the rules one by one


def buffer_of(**replay: Any) -> Buffer:
    """A buffer of steps of four groups, two of which may be trained again, that has begun."""
    keys = {"groups_per_step": 4, "max_staleness": 2, "reuse": 2} | replay
    buffer = make_buffer(Config.model_validate({"run": {"steps": 20}, "replay": keys}))
    buffer.begin(NEW)
    buffer.acknowledge(NEW)
    return buffer


def train(buffer: Buffer, step: int, ess: list[float | None] | float = 1.0) -> list[int]:
    """One step in which everything is answered, told and published."""
    version = PolicyVersion(step)
    complete(buffer, issue_all(buffer, version=version), version)
    batch = buffer.pop(step)
    assert batch is not None
    written(buffer)
    buffer.measured(step, ess if isinstance(ess, list) else [ess] * len(batch))
    buffer.acknowledge(PolicyVersion(step + 1))
    return [stored.group_id for stored in batch]


def test_half_of_each_batch_are_the_groups_of_the_one_before_and_each_is_trained_twice() -> None:
    buffer = buffer_of()
    trained = [train(buffer, step) for step in range(7)]
    assert trained[:4] == [[0, 1, 2, 3], [4, 5, 0, 1], [6, 7, 2, 3], [8, 9, 6, 7]]
    assert all(sum(group_id in ids for ids in trained) <= 2 for group_id in range(20))
    assert buffer.selection_metrics()["replay/reused_share"] == 0.5
    assert buffer.ledger().below == len({group_id for ids in trained for group_id in ids})


def test_the_largest_effective_sample_size_comes_first_and_what_is_unknown_or_small_is_not_reused() -> None:
    buffer = buffer_of(reuse_min_ess=0.4)
    train(buffer, 0, [0.5, None, 0.3, 0.9])
    assert train(buffer, 1, [])[2:] == [3, 0]  # nothing is told of step 1
    assert len(set(train(buffer, 2)) & {0, 1, 2, 3, 4, 5}) == 0
    once = buffer_of(reuse=1)
    train(once, 0)
    assert train(once, 1) == [4, 5, 6, 7]
    assert "replay/reused" not in once.selection_metrics()


def test_a_group_is_trained_three_times_while_it_is_young_enough() -> None:
    uses = {}
    for age in (1, 2):
        buffer = buffer_of(reuse=3, reuse_share=0.25, reuse_max_age=age)
        trained = [train(buffer, step, [0.9 if i == 0 else 0.0 for i in range(4)]) for step in range(1)]
        for step in (1, 2, 3):
            ids = train(buffer, step, [0.9 if i == 3 else 0.0 for i in range(4)])
            trained.append(ids)
        uses[age] = [0 in ids for ids in trained]
    assert uses == {1: [True, True, False, False], 2: [True, True, True, False]}


def test_what_is_trained_again_is_as_much_younger_as_an_adaptive_bound_is_lowered() -> None:
    adaptive = {"enabled": True, "patience": 1}
    buffer = buffer_of(max_staleness=6, reuse=4, adaptive=adaptive)
    sizes = [1.0, 1.0, 0.0, 0.0]
    assert train(buffer, 0, sizes)[:2] == [0, 1]
    assert train(buffer, 1, 0.0)[2:] == [0, 1]  # 1 step old
    buffer.measured(1, [0.0, 0.0, 1.0, 1.0])
    buffer.adaptive._admit(1.0)
    assert buffer.adaptive.lowered == 5
    assert not {0, 1} & set(train(buffer, 2, 0.0))  # 2 steps old
    buffer.adaptive._admit(6.0)
    assert {0, 1} <= set(train(buffer, 3, 0.0))


def test_the_audit_of_selection_counts_a_group_at_its_first_step() -> None:
    buffer = buffer_of()
    counts = []
    for step in range(3):
        train(buffer, step)
        counts.append(buffer.selection_metrics()["selection/trained/groups"])
    assert counts == [4, 2, 2]


def test_what_a_run_owes_to_tickets_ends_with_its_history() -> None:
    buffer = buffer_of()
    for step in range(4):
        train(buffer, step)
    buffer.lose(2, [0])
    assert buffer._state.floors
    buffer.begin(PolicyVersion(4, 1))
    buffer.saved(4)
    buffer.begin(PolicyVersion(1, 2))
    assert buffer._state.floors == {}


def test_a_recovered_buffer_goes_on_with_the_same_batches() -> None:
    buffer, recovered, from_snapshot = buffer_of(), buffer_of(), buffer_of()
    journal = written(buffer)
    for step in range(4):
        version = PolicyVersion(step)
        complete(buffer, issue_all(buffer, version=version), version)
        journal += written(buffer)
        assert buffer.pop(step) is not None
        buffer.measured(step, [0.6, 0.7, 0.8, 0.9])
        buffer.acknowledge(PolicyVersion(step + 1))
        if step == 2:
            buffer.saved(2)
        journal += written(buffer)
    recovered.restore(None, journal)
    assert recovered.snapshot() == buffer.snapshot()
    packed = msgspec.msgpack.encode(buffer.snapshot())
    from_snapshot.restore(msgspec.msgpack.decode(packed, type=Snapshot))
    assert from_snapshot.snapshot() == buffer.snapshot()
    expected = [train(buffer, step) for step in range(4, 8)]
    assert [train(recovered, step) for step in range(4, 8)] == expected


def test_frames_that_are_lost_take_back_the_last_use_alone_and_the_group_is_not_trained_again() -> None:
    buffer = buffer_of()
    train(buffer, 0)
    assert train(buffer, 1) == [4, 5, 0, 1]
    buffer.begin(PolicyVersion(1, 1))
    buffer.lose(1, [0, 4])
    contents = Contents()
    for record in (Consumed(step=0, group_ids=(0, 1, 2, 3)), Consumed(step=1, group_ids=(4, 5, 0, 1), reused=(0, 1))):
        contents.add(record)
    assert contents.uses()[0] == (0, 1)
    complete(buffer, issue_all(buffer, version=PolicyVersion(2)), PolicyVersion(2))
    batch = buffer.pop(1)
    assert batch is not None
    ids = [stored.group_id for stored in batch]
    assert ids == [4, 5, 2, 3]
    assert batch[0].attempt == 1  # generated again


def test_a_group_that_cannot_be_trained_again_stays_trained_where_it_was() -> None:
    buffer = buffer_of()
    train(buffer, 0)
    train(buffer, 1)
    assert buffer.quarantine(1, 0, 0, "no")
    assert not buffer.quarantine(1, 0, 0, "no")
    assert buffer.ledger().quarantined == {0: 0}
    buffer.begin(PolicyVersion(0, 1))
    quarantined = [[each.quarantined for each in buffer.pop(step) or ()] for step in (0, 1)]
    assert quarantined == [[False] * 4, [False, False, True, False]]


def test_groups_are_kept_beyond_the_checkpoint_until_they_are_too_old() -> None:
    buffer = buffer_of(reuse_min_ess=0.4)
    train(buffer, 0, [0.5, 0.6, 0.1, 0.1])
    buffer.saved(1)
    assert buffer.phase(0) is not None
    assert train(buffer, 1, 0.0)[2:] == [1, 0]
    buffer.saved(2)
    assert buffer.phase(0) is None  # two uses, and no step that has it comes again
    assert buffer.phase(2) is not None
    train(buffer, 2, 0.0)
    train(buffer, 3, 0.0)
    assert buffer.phase(2) is None


def test_what_a_step_looks_at_does_not_grow_with_a_run_that_saves_no_checkpoint() -> None:
    buffer = buffer_of()
    looked_at = []
    for step in range(18):
        train(buffer, step)
        looked_at.append(len(buffer._state.reusable._measured))
    assert max(looked_at[9:]) <= max(looked_at[:9])


def test_only_so_many_tickets_are_out_as_steps_with_reuse_consume() -> None:
    buffer = buffer_of()
    assert buffer.order.capacity == 6  # 3 steps of two fresh groups
    assert len(issue_all(buffer)) == 6


REFUSED = {
    ("replay.order=synchronous",): "reuse: 2 is not possible with order=synchronous; allowed: 1, or an order of ",
    ("replay.max_staleness=0",): "reuse: 2 trains old tokens, max_staleness=0 has none; allowed: 1, or ",
    ("replay.reuse_share=0.1",): "reuse_share: 0.1 of 8 groups is none; allowed: 0.125 or more",
    ("replay.max_staleness=0.5",): "reuse_share: 0.5 leaves 6 slots at max_staleness=0.5, .* allowed: up to 0.25, or ",
    ("journal.keep=none",): "replay.reuse: 2 needs the groups that a journal keeps, and journal.keep=none; allowed: 1",
    ("learner.passes=2",): "replay.reuse: 2 goes by the effective sample size .* allowed: 1, or learner.passes=1",
    ("run.epochs=1.0",): "replay.reuse: 2 leaves open how many steps run.epochs=1 has; allowed: 1, or run.steps",
    ("publish.every=2",): "publish.every: 2 would deadlock: 16 groups train before a publish",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_what_makes_no_sense_is_refused(keys: tuple[str, ...]) -> None:
    tree: dict[str, Any] = {"replay": {"reuse": 2}}
    for key in keys:
        path, value = key.split("=")
        section, name = path.split(".")
        tree.setdefault(section, {})[name] = value if name in ("order", "keep") else float(value)
    with pytest.raises(ValidationError, match=REFUSED[keys]):
        Config.model_validate(tree)


def test_a_group_without_tokens_or_frames_is_not_trained_again() -> None:
    reuse = Reuse(times=2, most=1, groups=2, least_ess=0.5, max_age=3)
    buffer = buffer_of()
    train(buffer, 0)
    life = buffer._lives[0]
    assert reuse.select(1, [life]) == (0,)
    assert reuse.select(4, [life]) == ()
    assert life.completed is not None
    for field, value in (("completed", msgspec.structs.replace(life.completed, oldest=None)), ("place", None)):
        changed = msgspec.structs.replace(life, **{field: value, "frames": None})
        assert reuse.select(1, [changed]) == ()


def test_a_step_that_is_put_together_again_takes_no_more_groups_again_than_its_tickets_allow() -> None:
    """Sample sizes that died with a service come again: with them a step would consume fewer groups than before."""
    buffer = buffer_of(max_staleness=1, reuse_max_age=9)
    made: dict[int, int] = {}  # group id: version

    def generate(version: int) -> None:
        tickets = issue_all(buffer, version=PolicyVersion(version))
        made.update((ticket.group_id, version) for ticket in tickets)
        complete(buffer, tickets, PolicyVersion(version))
        written(buffer)

    def step(number: int, *sizes: float) -> bool:
        batch = buffer.pop(number)
        if batch is None:
            return False
        written(buffer)
        oldest = max(number - made[place.group_id] for place in batch if not place.again)
        assert oldest <= buffer.order.worst_staleness
        buffer.measured(number, [*sizes] * len(batch))
        return True

    generate(0)
    assert step(0)
    for version in (1, 2):
        buffer.acknowledge(PolicyVersion(version))
        generate(version)
        assert version == 2 or step(1)
    buffer.begin(PolicyVersion(0, 1))  # the learner's checkpoint is of step 0
    assert step(0, 1.0)
    assert buffer.pop(1) is not None
    buffer.lose(1, [4])
    for number in range(1, 7):
        generate(2 if number < 3 else number)
        assert step(number, 1.0)
        if number >= 2:
            buffer.acknowledge(PolicyVersion(number + 1))
            generate(number + 1)

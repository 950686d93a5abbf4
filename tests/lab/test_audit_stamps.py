"""The audit finds a stamp that is off by one where each single difference is below the rounding of the numbers."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replaced
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from launch import tiny_model
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.replay import JournalConfig
from streamrl.lab.audit import versions
from streamrl.lab.audit.command import audit
from streamrl.lab.audit.findings import Findings
from streamrl.observe.events import EventLog, event_path
from streamrl.observe.limits import LIMITS
from streamrl.observe.stamps import Neighbours, spread_over
from streamrl.replay.journal import Journal
from streamrl.replay.records import Completed, Consumed
from streamrl.stream.codec import encode_group
from streamrl.types import PolicyVersion, Sample, VersionSpan

STEPS, SAMPLES, TOKENS = 4, 8, 32
CHANGE = 2e-3  # of a weight in a step, where a typical one is 0.1: less than the limits of unmeasured bfloat16
SMALL = 1e-5  # less than what bfloat16 rounds away of a log-prob


@pytest.mark.parametrize(("drawn_by", "expected"), [("own", 0.0), ("other", 1.0)])
def test_the_slope_says_which_of_two_versions_drew_tokens_below_ten_times_the_noise(drawn_by, expected):
    random = np.random.default_rng(1)
    neighbours = Neighbours()
    for _ in range(200):
        own = -random.exponential(1.0, 50)
        other = own + random.normal(0.003, 0.005, 50)
        noise = 0.05 * random.normal(size=50) + 0.01  # ten times what a step changes, and to one side
        neighbours.add((own if drawn_by == "own" else other) + noise, own, other)
    slope = neighbours.slope()
    assert slope is not None
    assert slope.tells
    assert abs(slope.value - expected) < 4 * slope.error
    assert slope.wrong == (drawn_by == "other")


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 8])
def test_few_long_answers_with_right_stamps_are_hardly_ever_told_to_be_another_versions(samples):
    random = np.random.default_rng(samples)
    slopes = []
    for _ in range(1000):
        neighbours = Neighbours()
        for _ in range(samples):
            neighbours.add(random.normal(0.0, 0.02, 200), np.zeros(200), random.normal(0.0, 1.3e-3, 200))
        slopes.append(neighbours.slope())
    assert sum(slope.wrong for slope in slopes) < 25
    assert not slopes[0].tells if samples == 1 else any(slope.tells for slope in slopes)


def test_versions_that_do_not_differ_are_not_told_apart():
    random = np.random.default_rng(2)
    same, near = Neighbours(), Neighbours()
    for _ in range(20):
        own = -random.exponential(1.0, 10)
        same.add(own + 0.05 * random.normal(size=10), own, own)
        near.add(own + 0.05 * random.normal(size=10), own, own + 1e-4 * random.normal(size=10))
    assert same.slope() is None
    assert Neighbours().slope() is None
    slope = near.slope()
    assert slope is not None
    assert not slope.tells
    assert not slope.wrong


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 8))
def test_samples_are_chosen_from_the_whole_range_and_none_twice(sizes, most, fewest):
    chosen = spread_over(sizes, most, fewest=fewest)
    assert chosen == sorted(set(chosen))
    assert len(chosen) >= min(fewest, len(sizes))
    assert set(chosen) <= set(range(len(sizes)))
    assert len(chosen) == len(sizes) if sum(sizes) <= most else 1 <= len(chosen) <= len(sizes)


def drawn(policy: PreTrainedModel, prompt: np.ndarray) -> Sample:
    """Drawn and scored by `policy` in bfloat16, token by token as a server does it."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    told = []
    with torch.inference_mode():
        for _ in range(TOKENS):
            distribution = torch.log_softmax(policy(ids).logits[0, -1].float(), -1)
            token = torch.multinomial(distribution.exp(), 1)
            told.append(float(distribution[token]))
            ids = torch.cat([ids, token[None]], 1)
    output = ids[0, len(prompt) :].numpy().astype(np.int32)
    return Sample(
        prompt_ids=prompt,
        output_ids=output,
        logprobs=np.array(told, np.float32),
        loss_mask=np.ones(TOKENS, np.bool_),
        spans=(VersionSpan(PolicyVersion(0), 0, TOKENS),),
        reward=0.0,
    )


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Path, list[list[Sample]]]:
    """A run in bfloat16 with its weights, and what each version drew. The parameter is what a step changes."""
    folder = tmp_path_factory.mktemp("bf16")
    tiny_model.make(folder / "model", seed=1)
    torch.manual_seed(3)
    policy = AutoModelForCausalLM.from_pretrained(folder / "model").float()
    random = np.random.default_rng(4)
    samples = []
    for step in range(STEPS + 1):
        rounded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
        rounded.load_state_dict({name: weight.bfloat16() for name, weight in policy.state_dict().items()})
        rounded.save_pretrained(folder / "run" / "weights" / f"{step}.0")
        prompts = random.integers(2, 8, (SAMPLES, 6), dtype=np.int32)
        samples.append([drawn(rounded.eval(), prompt) for prompt in prompts])
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(torch.randn_like(weight), alpha=getattr(request, "param", CHANGE))
    tree = {
        "model": {"path": folder / "model", "dtype": "bfloat16"},
        "replay": {"groups_per_step": 1, "max_staleness": 1},
        "generate": {"group_size": SAMPLES},
        "publish": {"keep_every": 1},
        "journal": {"keep": "all"},
    }
    config = Config.model_validate(tree)
    config_file.save(config, folder / "run" / "config.yaml")
    return config, folder / "run", samples


@pytest.fixture
def audited(recorded, make_group, tmp_path):
    """`audited(off, unknown, lost, newest, asked)`: what is found where what version v + off drew carries the stamp v.

    The kept weights of version `unknown` are no numbers, those of `lost` are not there, and the last start is `newest`.
    `asked`: versions that the log says were to be kept; without it there is no log. `ready`: with it, that of a start
    that has made no step.
    """
    config, run, samples = recorded

    def find(
        off: int,
        *,
        unknown: int | None = None,
        lost: Sequence[int] = (),
        newest: int = 0,
        asked: Sequence[int] = (),
        ready: str | None = None,
    ) -> Findings:
        for folder in ("weights", "journal", "events"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        if asked:
            (tmp_path / "events").mkdir()
            with contextlib.closing(EventLog(event_path(tmp_path, "learner"), "learner-0")) as log:
                for version in asked:
                    log.emit("publish.keep", phase="begin", version=f"{version}.0")
                if ready is not None:
                    log.emit("ready", version=ready)
        shutil.copytree(run / "weights", tmp_path / "weights")
        for version in lost:
            shutil.rmtree(tmp_path / "weights" / f"{version}.0")
        if unknown is not None:
            file = tmp_path / "weights" / f"{unknown}.0" / "model.safetensors"
            save_file({name: weight * math.nan for name, weight in load_file(file).items()}, file)
        journal = Journal(tmp_path / "journal", JournalConfig(keep="all"), b"")
        rows = []
        for step in range(STEPS):
            span = VersionSpan(PolicyVersion(step), 0, TOKENS)
            answers = tuple(replaced(sample, spans=(span,)) for sample in samples[step + off])
            group = replaced(make_group(step), samples=answers)
            frames = [bytes(frame) for frame in encode_group(group, 1 << 20)]
            journal.append_group(Completed(group_id=step, attempt=0, size=1, tokens=SAMPLES * TOKENS), frames)
            journal.append(Consumed(step=step, group_ids=(step,)))
            counts = {"tokens/trained": SAMPLES * TOKENS, "staleness/max": 0}
            rows.append(json.dumps({"step": step + 1, "version": f"{step + 1}.{newest}", **counts}) + "\n")
        journal.commit()
        journal.close()
        (tmp_path / "metrics.jsonl").write_text("".join(rows))
        return audit(tmp_path, config)

    return find


def test_a_run_in_bfloat16_is_held_to_a_few_times_its_own_rounding(audited):
    findings = audited(0)
    assert findings.problems == []
    assert findings.audited == STEPS * SAMPLES * TOKENS
    assert findings.limits.mean < LIMITS["bfloat16"].mean / 2
    differences = np.concatenate(findings.differences)
    assert differences.mean() > findings.limits.mean / 10, "the limits are not far from what is seen"


def test_the_rounding_of_a_run_is_measured_on_all_of_its_versions(audited, monkeypatch):
    monkeypatch.setattr(versions, "ROUNDED", STEPS * TOKENS)
    assert [len(of_sample) for of_sample in audited(0).rounded] == [TOKENS] * STEPS


def test_stamps_that_are_off_by_one_step_are_beyond_the_run_s_own_limits_although_the_old_ones_pass_each_token(audited):
    findings = audited(1)
    differences = np.concatenate(findings.differences)
    assert differences.max() < LIMITS["bfloat16"].largest
    assert differences.mean() < LIMITS["bfloat16"].mean
    single, p99, mean, slope = findings.problems
    assert "tokens differ from their stamped version by more than" in single
    assert p99.startswith("the 99th percentile of the differences is")
    assert mean.startswith("the mean of the differences is")
    assert "another version drew them" in slope
    assert "behind" in slope


@pytest.mark.parametrize("recorded", [SMALL], indirect=True)
def test_where_a_step_changes_less_than_rounding_the_slope_alone_finds_them(audited):
    findings = audited(1)
    (problem,) = findings.problems
    assert "another version drew them" in problem
    assert "behind" in problem


def test_weights_that_should_have_been_kept_are_missed_also_those_of_a_former_start(audited):
    def missed(lost: Sequence[int], newest: int, asked: Sequence[int] = (), ready: str | None = None) -> list[str]:
        found = audited(0, lost=lost, newest=newest, asked=asked, ready=ready).problems
        return [problem for problem in found if "are not kept" in problem]

    told = "version 2.0 is stamped on tokens, but its weights are not kept"
    assert missed([2], newest=0) == missed([2], newest=1) == [told]
    assert missed([1, 3], newest=1, asked=(0, 2, 4)) == []  # before the run was resumed with every one
    assert missed([1, 2, 3], newest=1, asked=(0, 2, 4)) == [told]
    assert len(missed([1, 3], newest=0, asked=(0, 2, 4))) == 2
    assert missed([1, 3], newest=0, asked=(0, 2, 4), ready=f"{STEPS}.1") == []  # the resumed one has made no step


def test_kept_weights_that_are_no_numbers_are_found_and_loosen_no_limit(audited):
    findings = audited(0, unknown=1)
    assert math.isfinite(findings.limits.largest)
    assert any(f"{SAMPLES * TOKENS} tokens differ" in problem for problem in findings.problems), findings.problems
    assert any(problem.startswith("the 99th percentile of the differences is inf") for problem in findings.problems)

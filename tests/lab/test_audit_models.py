"""The audit computes log-probs with the weights of a version, in every family of models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from launch import tiny_model
from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.replay import JournalConfig
from streamrl.lab.audit.logprobs import load_kept
from streamrl.mamba_steps import without_floor
from streamrl.replay.journal import Journal
from streamrl.replay.records import Completed, Consumed
from streamrl.stream.codec import encode_group
from streamrl.types import Group, PolicyVersion, VersionSpan
from tests.operations_table import documented
from tests.slow_families import slow_but


@pytest.mark.parametrize("family", slow_but(tiny_model.FAMILIES, "qwen2", "qwen3_moe"))
def test_the_weights_of_a_version_are_those_that_are_audited(family, tmp_path):
    tiny_model.make(tmp_path / "base", seed=1, family=family)
    tiny_model.make(tmp_path / "trained", seed=2, family=family)
    kept = tmp_path / "kept"  # weights alone, without a configuration
    kept.mkdir()
    shutil.copy(tmp_path / "trained" / "model.safetensors", kept)
    audited = load_kept(kept, AutoConfig.from_pretrained(tmp_path / "base"), tmp_path / "base")
    trained = without_floor(AutoModelForCausalLM.from_pretrained(tmp_path / "trained"))
    ids = torch.tensor([[1, 4, 2, 7]])
    with torch.no_grad():
        assert torch.equal(audited(ids).logits, trained(ids).logits)
        assert not audited.training

    weights = load_file(kept / "model.safetensors")
    del weights[next(name for name in weights if name in ("model.norm.weight", "backbone.norm_f.weight"))]
    save_file(weights, kept / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights missing \['model\.norm(_f)?\.weight'\], unexpected \[\]"):
        load_kept(kept, AutoConfig.from_pretrained(tmp_path / "base"), tmp_path / "base")


V0 = PolicyVersion(0)
EXACT, INEXACT = VersionSpan(V0, 0, 3), VersionSpan(V0, 3, 5, exact=False)


@pytest.fixture
def recorded(tmp_path: Path, make_group: Callable[..., Group]) -> Callable[..., Path]:
    """`recorded(interruption, spans, wrong)`: a run of one step, of which tokens from `wrong` on are 1 nat off."""
    model = tmp_path / "model"
    tiny_model.make(model, seed=1)
    policy = AutoModelForCausalLM.from_pretrained(model)

    def make(interruption: str, spans: tuple[VersionSpan, ...], wrong: int) -> Path:
        folder = tmp_path / "run"
        (folder / "weights").mkdir(parents=True)
        shutil.copytree(model, folder / "weights" / "0.0")
        settings = {
            "model": {"path": model},
            "replay": {"groups_per_step": 1},
            "publish": {"interruption": interruption, "keep_every": 1},
            "journal": {"keep": "all"},
        }
        config_file.save(Config.model_validate(settings), folder / "config.yaml")
        (sample,) = make_group(0, samples=1, tokens=5).samples
        ids = np.concatenate([sample.prompt_ids, sample.output_ids]) % policy.config.vocab_size
        with torch.no_grad():
            logprobs = torch.log_softmax(policy(torch.tensor(ids[None].astype(np.int64))).logits[0, :-1], -1)
        told = logprobs.gather(1, torch.tensor(ids[1:, None].astype(np.int64)))[6:, 0].numpy().copy()
        told[wrong:] -= 1
        sample = replaced(sample, prompt_ids=ids[:7], output_ids=ids[7:], logprobs=told, spans=spans)
        group = replaced(make_group(0), samples=(sample,))
        journal = Journal(folder / "journal", JournalConfig(keep="all"), b"")
        frames = [bytes(frame) for frame in encode_group(group, 1 << 20)]
        journal.append_group(Completed(group_id=0, attempt=0, size=1, tokens=5), frames)
        journal.append(Consumed(step=0, group_ids=(0,)))
        journal.commit()
        journal.close()
        row = {"step": 1, "version": "1.0", "tokens/trained": 5, "staleness/max": 0}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return folder

    return make


def test_inexact_tokens_are_counted_and_shown_apart_and_held_to_nothing(recorded, capsys: pytest.CaptureFixture[str]):
    run = recorded("in_place", (EXACT, INEXACT), wrong=3)
    assert cli.main(["audit", str(run)]) == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert "tokens audited 3, tokens trained 5" in told
    assert "tokens behind an update in place 2, of them compared 2, without a limit:\n" in told
    assert "    largest 1\n" in told


def test_a_batch_that_was_on_its_way_when_the_run_was_ended_is_no_broken_promise(recorded, capsys):
    run = recorded("retract", (VersionSpan(V0, 0, 5),), wrong=5)
    (run / "metrics.jsonl").write_text("")
    assert cli.main(["audit", str(run)]) == 0, capsys.readouterr().out
    assert "(the batch of step 0 was handed out and not trained; the next start trains it)" in capsys.readouterr().out

    (run / "checkpoints" / "step_1").mkdir(parents=True)  # it was trained: the metrics have lost its row
    assert cli.main(["audit", str(run)]) == 1
    assert "PROBLEM metrics.jsonl says 0 steps, the journal 1" in capsys.readouterr().out


def test_exact_tokens_are_held_to_the_limit_beside_inexact_ones(recorded, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["audit", str(recorded("in_place", (EXACT, INEXACT), wrong=2))]) == 1
    assert "PROBLEM 1 tokens differ from their stamped version by more than 0.0001" in capsys.readouterr().out


def test_a_stamp_that_the_run_cannot_have_made_excuses_nothing(recorded, capsys: pytest.CaptureFixture[str]):
    code = cli.main(["audit", str(recorded("retract", (EXACT, INEXACT), wrong=3))])
    documented(
        "PROBLEM ... trained tokens are stamped inexact, which only publish.interruption=in_place leaves",
        capsys.readouterr().out,
        code,
    )

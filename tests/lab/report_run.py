"""A small run folder as a run leaves it, written by the same writers, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.replay import JournalConfig
from streamrl.observe.metrics import MetricsWriter
from streamrl.replay.journal import Journal
from streamrl.replay.records import Completed, Consumed, Dropped
from streamrl.stream.codec import encode_group
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan

BEGIN = 1_800_000_000.0  # seconds since the epoch
STEPS = 6
GROUPS = 3  # a step
NASTY = "</script><script>document.title = 'broken'</script><img src=x onerror=alert(1)> é漢 &amp; \u2028"


def make_model(folder: Path, seed: int = 0) -> None:
    """A random Hugging Face model of 256 tokens, one for each byte, and its tokenizer."""
    vocabulary = {sign: index for index, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2", vocab_size=256, num_key_value_heads=2, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def record_run(folder: Path, model: Path, *, steps: int = STEPS, end: bool = True, **keys: Any) -> Path:
    """A run of `steps` steps with a dropped group each, a restart of the worker, and kept weights. `end`: it is over.

    keys: of the configuration, `learner__optimizer__lr=1` for `learner.optimizer.lr`.
    """
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    overrides += [f"model.path={model}", f"run.steps={steps}", f"run.folder={folder.parent}", f"run.name={folder.name}"]
    config = config_file.load(None, overrides)
    folder.mkdir(parents=True)
    config_file.save(config, folder / "config.yaml")
    (folder / "environment.json").write_text(json.dumps({"host": "test", "command": [NASTY]}))
    _write_metrics(folder, steps)
    _write_journal(folder, config, steps)
    for role, records in _events(steps, end).items():
        path = folder / "events" / f"{role}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"role": role, **record}) + "\n" for record in records))
    for step in range(steps):
        make_model(folder / "weights" / f"{step}.0", seed=step)
    return folder


def group(group_id: int, step: int, model: Path, samples: int = 5) -> Group:
    """A group whose answers have two versions, and rewards from 0 to 1; the first answer is text to trip over."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [NASTY, *(f"answer {index} of group {group_id}" for index in range(1, samples))]
    return Group(
        group_id=group_id,
        task="copy",
        prompt_index=group_id,
        samples=tuple(
            _sample(tokenizer.encode(text).ids, tokenizer.encode(f"say {group_id}: ").ids, step, reward)
            for text, reward in zip(texts, np.linspace(1.0, 0.0, samples), strict=True)
        ),
        worker="generator-0",
    )


def _sample(ids: list[int], prompt: list[int], step: int, reward: float) -> Sample:
    count, half = len(ids), len(ids) // 2
    older, newer = PolicyVersion(max(0, step - 2)), PolicyVersion(max(0, step - 1))
    spans = (VersionSpan(older, 0, half), VersionSpan(newer, half, count)) if older < newer else ()
    mask = np.ones(count, np.bool_)
    mask[1] = False
    return Sample(
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(ids, np.int32),
        logprobs=-np.linspace(0.1, 6.0, count, dtype=np.float32),
        loss_mask=mask,
        spans=spans or (VersionSpan(newer, 0, count),),
        reward=float(reward),
        reward_parts={"exact": float(reward == 1.0)},
    )


def _write_metrics(folder: Path, steps: int) -> None:
    writer = MetricsWriter(folder)
    for step in range(1, steps + 1):
        writer.write(
            {
                "step": step,
                "version": f"{step}.0",
                "time": BEGIN + 10 * step,
                "reward/mean": step / steps,
                "reward/std": 0.1,
                "pass_rate": step / (2 * steps),
                "staleness/mean": 1.5,
                "staleness/max": 2,
                "offpolicy/ess": float("nan") if step == 2 else 0.9,
                "loss/kl": 0.0,
                "tokens/trained": 100,
                "tokens/trained/s1": 40,
                "tokens/trained/s2": 60,
                "tokens/trained_per_s": 10.0,
                "time/step": 10.0,
                "idle/learner": 0.25,
                "eval/copy/pass@1": step / 10,
            }
        )
    writer.close()


def _write_journal(folder: Path, config: Config, steps: int) -> None:
    journal = Journal(folder / "journal", JournalConfig.model_validate({}), b"")
    group_id = 0
    for step in range(steps):
        ids = range(group_id, group_id + GROUPS)
        for each in (*ids, group_id + GROUPS):
            found = group(each, step, config.model.path)
            frames = [bytes(frame) for frame in encode_group(found, 1 << 20)]
            record = Completed(
                group_id=each,
                attempt=0,
                size=1,
                tokens=found.tokens,
                answers=len(found.answered),
                pass_rate=found.pass_rate,
            )
            journal.append_group(record, frames)
        journal.append(Dropped(group_id=group_id + GROUPS, attempt=0, reason="no signal", prompt_index=99))
        journal.append(Consumed(step=step, group_ids=tuple(ids)))
        group_id += GROUPS + 1
    journal.commit()
    journal.close()


def _events(steps: int, end: bool) -> dict[str, list[dict[str, Any]]]:
    """Of three roles: the worker is killed and started again in the third step, and a publish fails twice."""
    last = BEGIN + 10 * steps + 2
    service = [
        _event(0, "process.start"),
        _event(25, "publish.failed", server="server-0", version="2.0", reason=NASTY),
        _event(26, "publish.failed", server="server-0", version="2.0", reason="again"),
    ]
    worker = [_event(1, "process.start"), _event(4, "ready"), *_span(5, 24, "group", "a", group_id=0, tokens=50)]
    worker += [_event(30, "process.start"), _event(33, "ready")]
    worker += _span(34, 10 * steps, "group", "b", group_id=5, tokens=60)
    learner = [_event(1, "process.start"), _event(2, "ready")]
    for step in range(steps):
        learner += _span(10 * step + 2.5, 10 * step + 5, "learner.wait", f"w{step}")
        learner += _span(10 * step + 5, 10 * step + 10, "learner.step", f"s{step}")
    if end:
        service.append({"time": last, "event": "replay.stop", "reason": "the run is complete", "code": 0})
        for records in (service, worker, learner):
            records.append({"time": last, "event": "process.end"})
    return {"replay-0": service, "generator-0": worker, "learner-0": learner}


def _event(at: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"time": BEGIN + at, "event": event, **fields}


def _span(begin: float, end: float, event: str, span: str, **fields: Any) -> Iterator[dict[str, Any]]:
    yield _event(begin, event, phase="begin", span=span, **fields)
    yield _event(end, event, phase="end", span=span, seconds=end - begin, **fields)

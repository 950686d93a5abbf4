"""The groups of a journal as a table, one row a sample: `.jsonl` for any tool, `.parquet` for large runs.

Images of prompts lie beside it in NAME.images, each content once; a row has their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.images import write_named
from streamrl.observe.bars import track
from streamrl.observe.taken_off import taken_off
from streamrl.recorded.journal import RunJournal
from streamrl.types import Group, Sample
from streamrl.whole_files import drafted

Row = dict[str, Any]

# Samples of one row group, which is what memory holds.
ROWS_AT_ONCE = 1024

SCHEMA = pa.schema(
    {
        "group_id": pa.int64(),
        "attempt": pa.int32(),
        "sample": pa.int32(),  # index in its group
        "rollout": pa.int32(),  # index of its rollout in the group; several samples of one are its branches
        "task": pa.string(),
        "prompt_index": pa.int64(),
        "state": pa.string(),  # completed, consumed, committed, quarantined, dropped, or replaced by a later attempt
        "reason": pa.string(),  # why it was dropped
        "step": pa.int64(),  # that consumed it, the first one
        "steps": pa.list_(pa.int64()),  # all of them, more than one where it was trained again (`replay.reuse`)
        "position": pa.int32(),  # of the group in the batch of `step`, from 0; mini batches are cut in this order
        "positions": pa.list_(pa.int32()),  # in the batches of `steps`
        "worker": pa.string(),
        "started": pa.float64(),  # seconds since the epoch
        "finished": pa.float64(),
        "finish_reason": pa.string(),
        "reward": pa.float64(),
        "taken_off": pa.float64(),  # from the reward by algo.kl_reward when it was trained
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "images": pa.list_(pa.string()),  # files in the folder of the images, in the order of their places
        "prompt_ids": pa.list_(pa.int32()),
        "output_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "loss_mask": pa.list_(pa.bool_()),
        "versions": pa.list_(
            pa.struct({"version": pa.string(), "start": pa.int32(), "end": pa.int32(), "exact": pa.bool_()})
        ),
    }
)


def export(journal: RunJournal, output: Path, lost: list[str]) -> int:
    """Write every recorded sample to `output`, whose suffix is one of FORMATS, as a whole or not at all.

    Returns how many. A group that cannot be read is left out, and why is added to `lost`.
    """
    with drafted(output) as draft:
        return FORMATS[output.suffix](_rows(journal, output.with_suffix(".images"), lost), draft)


def _rows(journal: RunJournal, folder: Path, lost: list[str]) -> Iterator[Row]:
    lost_rewards = taken_off(journal.folder.parent)
    for recorded in track(journal.groups, "export", "groups"):
        try:
            group = journal.load(recorded)
            images = [write_named(image, folder).name for image in group.images]
        except ValueError as error:
            lost.append(str(error))
            continue
        fate = {name: getattr(recorded, name) for name in ("state", "reason", "step", "steps", "position", "positions")}
        penalties = lost_rewards.get((recorded.step, group.group_id)) if recorded.step is not None else None
        rollouts = group.rollout_of.tolist()
        for index, sample in enumerate(group.samples):
            own = {"rollout": rollouts[index], "taken_off": penalties[index] if penalties else 0.0}
            yield {**fate, **_of_group(group), "images": images, **_of_sample(index, sample), **own}


def _of_group(group: Group) -> Row:
    names = ("group_id", "attempt", "task", "prompt_index", "worker", "started", "finished")
    return {name: getattr(group, name) for name in names}


def _of_sample(index: int, sample: Sample) -> Row:
    names = ("finish_reason", "reward", "reward_parts", "prompt_ids", "output_ids", "logprobs", "loss_mask")
    versions = [
        {"version": str(span.version), "start": span.start, "end": span.end, "exact": span.exact}
        for span in sample.spans
    ]
    return {"sample": index, **{name: getattr(sample, name) for name in names}, "versions": versions}


def _write_jsonl(rows: Iterator[Row], output: Path) -> int:
    encoder = msgspec.json.Encoder(enc_hook=lambda array: array.tolist())
    count = 0
    with output.open("wb") as file:
        for row in rows:
            file.write(encoder.encode({name: row[name] for name in SCHEMA.names}) + b"\n")
            count += 1
    return count


def _write_parquet(rows: Iterator[Row], output: Path) -> int:
    count = 0
    with pq.ParquetWriter(output, SCHEMA, compression="zstd") as writer:
        while block := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_table(_table(block))
            count += len(block)
    return count


def _table(block: Sequence[Row]) -> pa.Table:
    columns = {name: [row[name] for row in block] for name in SCHEMA.names}
    columns["reward_parts"] = [list(parts.items()) for parts in columns["reward_parts"]]
    return pa.table(columns, schema=SCHEMA)


FORMATS: dict[str, Callable[[Iterator[Row], Path], int]] = {
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}

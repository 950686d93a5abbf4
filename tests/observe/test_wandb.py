"""What the real package writes without a network, read back from its own file: metrics, answers, configuration, id."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models

if TYPE_CHECKING:
    from wandb.proto import wandb_internal_pb2

RUN = """
import sys
import time
from pathlib import Path
import numpy as np
from streamrl.config import Config
from streamrl.observe.metrics import MetricsWriter
from streamrl.observe.sinks import open_sinks
from streamrl.types import Batch, Group, PolicyVersion, Sample, VersionSpan

folder = Path(sys.argv[1])
lr = {"learner": {"optimizer": {"lr": 0.125}}}
observe = {"wandb": "offline", "wandb_answers": 2}
keys = {"generate": {"server_args": {"api-key": "hidden", "admin_api_key": "hidden"}}}
run = {"run": {"name": "trial"}, "model": {"path": str(folder)}, "observe": observe}
config = Config.model_validate(run | lr | keys)


def sample(reward, *ids):
    tokens = np.array(ids, np.int32)
    spans = (VersionSpan(PolicyVersion(0), 0, len(ids)),)
    return Sample(
        prompt_ids=np.array([0], np.int32), output_ids=tokens, logprobs=np.zeros(len(ids), np.float32),
        loss_mask=np.ones(len(ids), np.bool_), spans=spans, reward=reward, reward_parts={"format": reward / 2},
    )


samples = (sample(0.5, 1), sample(1.0, 1, 2), sample(0.0, 2, 2), Sample.placeholder())
group = Group(group_id=7, task="copy", prompt_index=0, samples=samples)
for steps in (range(1, 4), range(4, 6)):
    writer = MetricsWriter(folder, open_sinks(config, folder))
    print(writer.places["Wandb"])
    for step in steps:
        writer.write_batch(step, Batch(step=step - 1, groups=(group,)))
        writer.write({"step": step, "reward/mean": step / 10, "grad_norm": float("nan"), "reward/part/format": 0.5})
    writer.close()
    time.sleep(1.1)  # the folder of a start is named by its second
"""

Record = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of steps 1 to 3 that was resumed for 4 and 5."""
    folder = tmp_path_factory.mktemp("run")
    Tokenizer(models.WordLevel({"say": 0, "yes": 1, "no": 2}, unk_token="no")).save(str(folder / "tokenizer.json"))
    (folder / "run.json").write_text('{"id": "9f86d081884c7d65", "adopted": false}')
    command = [sys.executable, "-c", RUN, str(folder)]
    said = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout.splitlines()
    assert all(line.startswith(f"offline; wandb sync {folder}/wandb/offline-run-") for line in said)
    assert {Path(line.split()[-1]) for line in said} == set(folder.glob("wandb/offline-run-*"))
    return folder


def test_a_resumed_run_goes_on_under_the_id_of_the_run(folder: Path) -> None:
    ids = [record.run.run_id for record in records(folder) if record.WhichOneof("record_type") == "run"]
    assert len(set(folder.glob("wandb/offline-run-*"))) == 2
    assert set(ids) == {"9f86d081884c7d65"}


def test_the_metrics_have_the_names_of_the_table(folder: Path) -> None:
    rows = [row for row in history(folder) if "reward/mean" in row]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(step, step / 10) for step in range(1, 6)]
    assert all(row["reward/part/format"] == 0.5 and "grad_norm" not in row for row in rows)


def test_the_whole_configuration_is_there(folder: Path) -> None:
    for record in records(folder):
        if record.WhichOneof("record_type") == "run":
            told = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert told["run"]["name"] == "trial"
            assert told["learner"]["optimizer"]["lr"] == 0.125
            assert told["replay"]["max_staleness"] is not None  # a default
            return
    pytest.fail("no configuration")


def test_no_key_of_a_server_is_there(folder: Path) -> None:
    assert not [path for path in folder.rglob("wandb/**/*") if path.is_file() and b"hidden" in path.read_bytes()]


def test_answers_are_tables_of_the_first_step_and_of_every_second(folder: Path) -> None:
    assert [row["step"] for row in history(folder) if "answers" in row or "answers/path" in row] == [1, 2, 4]
    tables = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("wandb/offline-run-*/files/media/table/answers_*.json"))
    ]
    assert len(tables) == 3
    for table in tables:
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert [(row["prompt"], row["answer"], row["reward"]) for row in rows] == [
            ("say", "yes no", 1.0),
            ("say", "no no", 0.0),
        ]
        assert rows[0]["parts"] == '{"format": 0.5}'
        assert (rows[0]["task"], rows[0]["group"], rows[0]["finish"], rows[0]["tokens"]) == ("copy", 7, "stop", 2)


def history(folder: Path) -> list[Record]:
    """Each record of the history, in the order of its writing."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def records(folder: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of all starts of a run."""
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        yield from records_of(file)


def records_of(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of a .wandb file: a LevelDB log of 32 KiB blocks, each of [crc u32, length u16, type u8, data]."""
    from wandb.proto import wandb_internal_pb2

    data, place, pending = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        pending += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            pending = b""
            yield record

"""Images of prompts: what a row may hold, where they are in the question, and how they travel."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import datasets
import numpy as np
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.environment import Completion, Message
from streamrl.tasks.images import image_references, with_images
from streamrl.tasks.registry import build_task

DATA = Path("tests/tasks/data").resolve()
PNG = (DATA / "geo3k" / "right.png").read_bytes()


def test_a_reference_is_a_path_a_url_or_bytes_that_are_written_once(tmp_path):
    rows = ["right.png", "https://host/a.jpg", {"bytes": PNG, "path": None}, {"path": "square.png", "bytes": None}]
    found = image_references(rows, beside=DATA / "geo3k", folder=tmp_path)
    assert found[0] == str(DATA / "geo3k" / "right.png")
    assert found[1] == "https://host/a.jpg"
    assert Path(found[2]).read_bytes() == PNG
    assert Path(found[2]).suffix == ".png"
    assert found[3].endswith("square.png")
    assert image_references({"bytes": PNG}, beside=tmp_path, folder=tmp_path) == (found[2],)
    assert len(list(tmp_path.iterdir())) == 1
    assert image_references(None, beside=tmp_path, folder=tmp_path) == ()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [("none.png", "does not exist"), (7, "7 is no image"), ({"bytes": b"MZ.."}, "allowed: PNG"), ({}, "no image")],
)
def test_what_is_no_image_is_refused_in_one_line(tmp_path, entry, reason):
    with pytest.raises(ValueError, match=reason):
        image_references(entry, beside=tmp_path, folder=tmp_path)


def test_images_are_placed_where_the_text_marks_them_or_before_it():
    image, system = {"type": "image"}, Message(role="system", content="look")
    marked = Message(role="user", content="a <image>b<image>")
    assert with_images([system, marked], 2) == (
        system,
        Message(role="user", content=[{"type": "text", "text": "a "}, image, {"type": "text", "text": "b"}, image]),
    )
    assert with_images([Message(role="user", content="c")], 1)[0]["content"] == [image, {"type": "text", "text": "c"}]
    assert with_images([system], 0) == (system,)
    parts = Message(role="user", content=[{"type": "text", "text": "a"}, {"type": "image", "text": None}])
    calls = {"role": "assistant", "tool_calls": [{"id": "c"}]}
    assert with_images([parts, calls], 1) == (
        Message(role="user", content=[{"type": "text", "text": "a"}, image]),
        calls,
    )
    with pytest.raises(ValueError, match="2 marks <image> for 1 images"):
        with_images([marked], 1)


def geo3k(path: Path, cache: Path, **args):
    args = {"path": str(path), "cache": str(cache), **args}
    return build_task(TaskConfig(name="geo3k", args=args), seed=1, split="train")


def test_a_prompt_has_its_images_and_the_users_reward_does_not(tmp_path):
    task = geo3k(DATA / "geo3k.jsonl", tmp_path, held_out_count=1)
    for index in range(task.size):
        prompt = task.prompt(index)
        (message,) = prompt.messages
        places = sum(part["type"] == "image" for part in message["content"])
        assert places == len(prompt.images) > 0
        assert all(Path(image).is_file() for image in prompt.images)
        assert message["content"][-1]["text"].endswith("\\boxed{}.")
        assert "images" not in prompt.metadata["values"]


@pytest.mark.parametrize("declared", [True, False])
def test_images_in_a_parquet_file_are_written_for_the_servers(tmp_path, declared):
    rows = [json.loads(line) for line in (DATA / "geo3k.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [{"bytes": (DATA / image).read_bytes(), "path": None} for image in row["images"]]
    data = datasets.Dataset.from_list(rows)
    if declared:  # as the hub has it
        data = data.cast_column("images", datasets.List(datasets.Image()))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    task = geo3k(tmp_path / "rows.parquet", tmp_path / "cache", held_out_count=1)
    images = {image for index in range(task.size) for image in task.prompt(index).images}
    assert {Path(image).parent for image in images} == {tmp_path / "cache" / "images"}
    known = {file.read_bytes() for file in (DATA / "geo3k").iterdir()}
    assert {Path(image).read_bytes() for image in images} <= known


def test_the_same_words_about_another_image_are_another_question(tmp_path):
    rows = [{"images": [f"geo3k/{name}.png"], "problem": "Find x.", "answer": name} for name in ("right", "square")]
    for row in rows:
        row["images"] = [{"bytes": (DATA / image).read_bytes()} for image in row["images"]]
    for name, part in (("train", rows), ("test", rows[:1])):
        datasets.Dataset.from_list(part).to_parquet(str(tmp_path / f"{name}.parquet"))
    task = geo3k(tmp_path / "train.parquet", tmp_path / "cache", test_path=str(tmp_path / "test.parquet"))
    assert [task.prompt(index).answer for index in range(task.size)] == ["square"]


def test_the_environment_passes_the_images_on(tmp_path):
    asked = []

    class Recorder:
        async def generate(self, prompt, n, *, images=(), **_):
            asked.append((prompt, images))
            none = np.empty(0, np.int32)
            answer = Completion(
                text="so \\boxed{4}",
                prompt_ids=none,
                output_ids=none,
                logprobs=np.empty(0, np.float32),
                spans=(),
                finish_reason="stop",
            )
            return [answer] * n

    task = geo3k(DATA / "geo3k.jsonl", tmp_path, held_out_count=1, judge="text")

    async def go():
        try:
            prompts = [task.prompt(index) for index in range(task.size)]
            return prompts, [await task.rollout_group(Recorder(), prompt, 1) for prompt in prompts]
        finally:
            await task.close()

    prompts, rollouts = asyncio.run(go())
    assert [images for _, images in asked] == [prompt.images for prompt in prompts]
    assert [rollout.reward for (rollout,) in rollouts] == [float(prompt.answer == "4") for prompt in prompts]


def test_a_missing_column_of_images_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"task\.args\.images: .*pictures"):
        geo3k(DATA / "geo3k.jsonl", tmp_path, images="pictures")

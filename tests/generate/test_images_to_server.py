"""Images of a prompt reach SGLang: what is sent, and what a real server makes of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from streamrl import cli
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.generate import GenerateConfig
from streamrl.config.task import TaskConfig
from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server
from streamrl.engine.stand_ins import KERNELS
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.prompt_images import PromptImages
from streamrl.generate.tokenizer import Tokenizer
from streamrl.images import data_url
from streamrl.preflight.prompts import measure_prompts, tokenizer_of
from streamrl.tasks.registry import build_task
from tests.generate import tiny_vision

IMAGES = ("one", "two", "three")
SERVER = {"mm_attention_backend": "sdpa", "disable_fast_image_processor": True}  # the others need a GPU, torchvision
TOKENS = 8
START_TIMEOUT = 500.0  # seconds; with images SGLang imports twice as much as without


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory) -> Path:
    """A tiny Qwen2.5-VL, and two images beside it."""
    folder = tmp_path_factory.mktemp("vision") / "model"
    tiny_vision.make(folder)
    for number, name in enumerate(IMAGES):
        tiny_vision.draw(folder / f"{name}.png", number)
    return folder


@pytest.fixture(scope="module")
def task_of(vision_model):
    """`task_of(cache)`: geo3k on rows with the images that lie beside the model, one of them held out."""

    def build(cache: Path):
        rows = [{"images": [f"{name}.png"], "problem": "<image>what?", "answer": name} for name in IMAGES]
        (vision_model / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        args = {"path": str(vision_model / "rows.jsonl"), "cache": str(cache), "suffix": "", "judge": "text"}
        return build_task(TaskConfig(name="geo3k", args={**args, "held_out_count": 1}), seed=1, split="train")

    return build


def requested(vision_model, task, images: PromptImages | None, prompt_tokens: int | None = None):
    """What a server is asked for prompt 0, the handle that asks, and its rollouts."""
    asked = []

    async def generate(request: web.Request) -> web.Response:
        asked.append(await request.json())
        meta = {
            "id": "0",
            "finish_reason": {"type": "stop"},
            "weight_versions": [{"version": "0.0", "start": 0, "end": 1}],
            "output_token_logprobs": [[-1.0, 5, None]],
            "prompt_tokens": prompt_tokens,
        }
        return web.json_response([{"output_ids": [5], "meta_info": meta}])

    async def go():
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout=30)
        try:
            inference = EngineInference(client, Tokenizer(vision_model, images=images), GenerateConfig(), Load())
            return asked, inference, await task.rollout_group(inference, task.prompt(0), 1)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(go())


def test_a_request_names_the_images_of_its_prompt(vision_model, task_of, tmp_path):
    task = task_of(tmp_path)
    (body,), *_ = requested(vision_model, task, images=None)
    assert body["image_data"] == list(task.prompt(0).images)
    pad = Tokenizer(vision_model).plain_ids("<|image_pad|>")
    assert np.isin(body["input_ids"], pad).sum() == len(body["image_data"]) == 1


def test_a_request_has_the_files_and_its_answers_all_tokens_of_the_images(vision_model, task_of, tmp_path):
    task, known = task_of(tmp_path), PromptImages.of(vision_model, limit=1 << 20)
    (body,), inference, _ = requested(vision_model, task, known)
    assert inference.failures == []  # as of a request that a server ended in its queue: it was not read
    right = len(body["input_ids"]) + 3  # 56 x 56 pixels are four tokens
    (body,), inference, (rollout,) = requested(vision_model, task, known, right)
    file = Path(task.prompt(0).images[0]).read_bytes()
    assert body["image_data"] == [data_url(file)]
    assert inference.images == (file,)
    assert len(rollout.completion.prompt_ids) == right
    assert inference.wrong_prompt(rollout.completion.prompt_ids) is None
    assert "1 image tokens, and its 1 images have 4" in str(inference.wrong_prompt(np.array(body["input_ids"])))
    _, inference, (rollout,) = requested(vision_model, task, known, right + 1)
    assert rollout.completion.finish_reason == "abort"
    (line,) = inference.failures
    assert line.endswith(
        f"the prompt has {right + 1} tokens there, and {right} by the image processor of the model's folder"
    )


def test_lengths_count_all_tokens_of_an_image_and_groups_its_bytes(vision_model, task_of, tmp_path):
    task, known = task_of(tmp_path), PromptImages.of(vision_model, limit=1 << 20)
    seen, blind = (
        asyncio.run(measure_prompts({"geo3k": task}, tokenizer_of(vision_model, images=images), 1000, {}))
        for images in (known, None)
    )
    assert seen.longest.tokens == blind.longest.tokens + 3
    files = [Path(task.prompt(index).images[0]) for index in range(task.size)]
    assert (seen.image_bytes, blind.image_bytes) == (max(file.stat().st_size for file in files), 0)
    with pytest.raises(ConfigError, match=r"^task\.name: prompt 0 of geo3k: image .*task\.max_image_bytes=9$"):
        asyncio.run(
            measure_prompts({"geo3k": task}, tokenizer_of(vision_model, images=PromptImages(known.counter, 9)), 9, {})
        )


def test_a_model_without_a_place_for_images_refuses_them_before_any_request(tmp_path):
    from launch import tiny_model

    tiny_model.make(tmp_path / "tiny")
    with pytest.raises(ValueError, match="no place for images; a vision-language model is needed"):
        Tokenizer(tmp_path / "tiny").prompt_ids([{"role": "user", "content": [{"type": "image"}]}])


def test_a_vision_language_model_is_read_with_its_tower(vision_model):
    from streamrl.learner.shape import read_shape

    assert read_shape(vision_model).vision is not None


@pytest.mark.slow
def test_kernels_that_are_named_at_import_raise_when_they_are_called():
    code = (
        "from streamrl.engine import stand_ins; absent = stand_ins.install()\n"
        "import sgl_kernel, torch\n"
        f"kernels = [getattr(torch.ops.sgl_kernel, name) for name in {KERNELS!r}]\n"
        "if 'sgl_kernel' in absent:\n"
        "    try: kernels[0](1)\n"
        "    except NotImplementedError: pass\n"
        "    else: raise SystemExit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(START_TIMEOUT + 300)
def test_a_real_server_sees_the_images(vision_model, task_of, tmp_path):
    """Its log-probs are those of transformers for the same image, and for no other."""
    generate = {"server_args": SERVER, "sampling": {"max_new_tokens": TOKENS}}
    config = Config.model_validate({"model": {"path": vision_model}, "generate": generate})
    task = task_of(tmp_path)
    groups = asyncio.run(_groups(Server(config, tmp_path, index=0), config, task))
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(vision_model, dtype=torch.float32).eval()
    images = [image for prompt, _ in groups for image in prompt.images]
    compared = 0
    for (prompt, rollouts), other in zip(groups, reversed(images), strict=True):
        for rollout in rollouts:
            answer = rollout.completion
            assert len(answer.output_ids) > 0
            expected = _logprobs(model, vision_model, answer, prompt.images[0])
            given = answer.logprobs[: len(expected)]
            np.testing.assert_allclose(given, expected, rtol=0, atol=1e-4)
            assert not len(given) or np.abs(given - _logprobs(model, vision_model, answer, other)).max() > 1e-3
            compared += len(given)
    assert compared > 4 * TOKENS


async def _groups(server: Server, config: Config, task):
    client = EngineClient(server.address, timeout=200)
    try:
        await server.ready(client, START_TIMEOUT)
        inference = EngineInference(client, Tokenizer(config.model.path), config.generate, Load())
        prompts = [task.prompt(index) for index in range(task.size)]
        groups = [(prompt, await task.rollout_group(inference, prompt, 4)) for prompt in prompts]
        assert not inference.failures
        return groups
    finally:
        await client.close()
        await task.close()
        await server.stop()


def _logprobs(model, folder: Path, answer, image: str) -> np.ndarray:
    """Of the answer's tokens, float32 [T], by transformers; the place of the image is as many tokens as it has.

    Up to where a random model writes the token of an image's place, which transformers would take for an image.
    """
    seen = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[Image.open(image)], return_tensors="pt")
    count = int(seen["image_grid_thw"].prod()) // 4
    pad = model.config.image_token_id
    ids = [each for token in answer.prompt_ids.tolist() for each in [token] * (count if token == pad else 1)]
    output = answer.output_ids.tolist()
    output = output[: output.index(pad)] if pad in output else output
    whole = torch.tensor([ids + output])
    kinds = (whole == pad).int()
    with torch.no_grad():
        logits = model(input_ids=whole, mm_token_type_ids=kinds, **seen).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, whole[0, len(ids) :, None])[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.timeout(START_TIMEOUT + 300)
def test_a_vision_language_model_is_evaluated(vision_model, task_of, tmp_path, capsys):
    task_of(tmp_path)
    file = tmp_path / "vision.yaml"
    task = {"path": str(vision_model / "rows.jsonl"), "cache": str(tmp_path), "judge": "text"}
    file.write_text(
        json.dumps(
            {
                "run": {"name": "vision", "folder": str(tmp_path / "runs")},
                "model": {"path": str(vision_model), "dtype": "float32"},
                "evaluate": {"tasks": [{"name": "geo3k", "args": task}], "samples": 2},
                "generate": {"server_args": SERVER, "sampling": {"max_new_tokens": TOKENS}},
            }
        )
    )
    assert cli.main(["eval", str(file)]) == 0, capsys.readouterr().out
    assert "geo3k" in capsys.readouterr().out

"""The images of a prompt in a worker: read once, counted, and in the prompt's ids with all their tokens."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from aiohttp import web

from streamrl.generate.prompt_images import PromptImages
from streamrl.images import data_url, png

PAD, LIMIT = 9, 2000
PNG = png(np.full((56, 84, 3), 7, np.uint8))


class Counter:
    """Four tokens an image, as no processor needs to be loaded for."""

    token = PAD

    def count(self, file: bytes) -> int:
        return 4


@pytest.mark.parametrize("config", [{}, {"vision_config": None}, {"image_token_id": PAD, "vision_config": None}])
def test_a_model_without_a_tower_has_no_images(config, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert PromptImages.of(tmp_path, LIMIT) is None


def loaded(images: PromptImages, *references: str):
    return asyncio.run(images.load(references))


def test_ids_are_expanded_and_collapsed_and_tokens_of_an_answer_stay() -> None:
    images = PromptImages(Counter(), LIMIT)
    two = loaded(images, data_url(PNG), data_url(PNG))
    ids = np.array([1, PAD, 2, PAD, 3], np.int32)
    whole = images.expanded(ids, two)
    assert whole.tolist() == [1, *[PAD] * 4, 2, *[PAD] * 4, 3]
    answered = np.append(whole, np.array([PAD, PAD, 5], np.int32))
    assert images.collapsed(answered, two).tolist() == [*ids.tolist(), PAD, PAD, 5]
    assert images.wrong(whole, two) is None
    assert images.wrong(ids, two) == "a prompt with 2 image tokens, and its 2 images have 8"
    with pytest.raises(ValueError, match="2 places for 1 images"):
        images.expanded(ids, two[:1])
    with pytest.raises(ValueError, match="image 1 has 4 tokens, and these ids not so many in a row there"):
        images.collapsed(images.expanded(ids[:3], two[:1]), two)


def test_what_is_no_image_or_another_than_before_or_too_large_is_one_line(tmp_path, monkeypatch) -> None:
    images = PromptImages(Counter(), LIMIT)
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    (found,) = loaded(images, str(file))
    assert (found.file, found.tokens, found.url) == (PNG, 4, data_url(PNG))
    file.write_bytes(png(np.zeros((56, 56, 3), np.uint8)))
    assert loaded(images, str(file)) == (found,)  # read once
    monkeypatch.setattr("streamrl.generate.prompt_images.KEPT_BYTES", 0)
    loaded(images, data_url(PNG))
    with pytest.raises(ValueError, match=rf"image {file}: it has changed, from \w+ to \w+ \(SHA-256\)$"):
        loaded(images, str(file))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "large.png").write_bytes(PNG + bytes(LIMIT))
    lines = {
        str(tmp_path / "none.png"): "No such file",
        str(tmp_path / "text.png"): "begin with b'no i'; allowed: PNG, JPEG, GIF, WebP",
        str(tmp_path / "large.png"): f"more bytes than task.max_image_bytes={LIMIT}",
        "data:image/png,abc": "is no file in base64",
        "http://127.0.0.1:9/a.png": "Cannot connect",
    }
    for reference, line in lines.items():
        with pytest.raises(ValueError, match=f"^image .*{line}"):
            loaded(images, reference)
    many = [data_url(PNG)] * (LIMIT // len(PNG) + 1)
    with pytest.raises(ValueError, match=r"its images have .* bytes; allowed: up to task.max_image_bytes=2000"):
        loaded(images, *many)


def test_an_image_that_is_its_own_reference_is_kept_within_the_limit_and_never_remembered(monkeypatch) -> None:
    images, references = PromptImages(Counter(), LIMIT), [data_url(PNG + bytes(index)) for index in range(1, 20)]
    held = [2 * len(reference) + len(PNG) + index for index, reference in enumerate(references, 1)]
    monkeypatch.setattr("streamrl.generate.prompt_images.KEPT_BYTES", held[-2] + held[-1])
    for reference in references:
        loaded(images, reference)
    assert images._bytes == held[-2] + held[-1]
    assert list(images._kept) == references[-2:]
    assert not images._seen


def test_a_url_is_fetched_once_and_in_time(monkeypatch) -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/late.png":
            await asyncio.sleep(30)
        return web.Response(body=PNG)

    async def go() -> None:
        app = web.Application()
        app.router.add_get("/{name}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        images = PromptImages(Counter(), LIMIT)
        try:
            for _ in range(2):
                (found,) = await images.load([f"{address}/a.png"])
                assert found.file == PNG
            monkeypatch.setattr("streamrl.generate.prompt_images.FETCH_TIMEOUT", 0.2)
            with pytest.raises(ValueError, match=r"late\.png: not there in 0\.2 seconds"):
                await images.load([f"{address}/late.png"])
        finally:
            await runner.cleanup()

    asyncio.run(go())
    assert asked == ["/a.png", "/late.png"]

"""The task shapes: what is drawn is what is asked for."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from streamrl.config.task import TaskConfig
from streamrl.images import content_of
from streamrl.tasks.built_in.shapes import COLOURS
from streamrl.tasks.registry import build_task
from tests.tasks.test_strings import answer


@pytest.mark.parametrize("ask", ["colour", "count"])
def test_the_image_shows_the_answer(ask):
    task = build_task(TaskConfig(name="shapes", args={"ask": ask}), seed=1, split="train")
    seen = set()
    for index in range(40):
        prompt = task.prompt(index)
        (url,) = prompt.images
        image = Image.open(io.BytesIO(content_of(url)))
        assert (image.size, image.mode) == ((56, 56), "RGB")
        pixels = np.asarray(image)
        grey = pixels[0, 0]
        middles = pixels[14::28, 14::28].reshape(-1, 3)
        squares = middles[(middles != grey).any(axis=1)]
        (colour,) = {tuple(square.tolist()) for square in squares}
        expected = str(len(squares)) if ask == "count" else {rgb: name for name, rgb in COLOURS.items()}[colour]
        assert prompt.answer == expected
        rewards = [asyncio.run(task.score(prompt, answer(text))).reward for text in (expected.upper(), "grey", "")]
        assert rewards == [1.0, 0.0, 0.0]
        seen.add(expected)
    assert len(seen) == (4 if ask == "count" else 6)

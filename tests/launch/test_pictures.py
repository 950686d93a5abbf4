"""The pictures of the README: the console's lines are on its page, and a browser draws both."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launch import pictures
from launch.screenshot import installed
from tests.lab.report_run import make_model, record_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    make_model(folder / "model")
    record_run(folder / "run", folder / "model")
    return folder / "run"


def test_the_page_of_the_console_has_its_lines_and_loads_nothing(run_folder):
    page = pictures.console_page(run_folder)
    text = re.sub(r"<[^>]+>", "", page)
    for line in ("streamrl · ", "reward", "staleness", "buffer"):
        assert line in text
    assert "url(" not in page
    assert "http" not in page


@pytest.mark.slow
@pytest.mark.skipif(installed() is None, reason="needs Debian's chromium: apt-get install chromium")
def test_a_browser_draws_both(run_folder, tmp_path):
    asyncio.run(pictures.capture(run_folder, tmp_path))
    for name in ("console.png", "report.png"):
        picture = np.asarray(Image.open(io.BytesIO((tmp_path / name).read_bytes())).convert("L"))
        assert picture.shape[1] >= pictures.CONSOLE_WIDTH
        assert picture.std() > 5, f"{name} is empty"

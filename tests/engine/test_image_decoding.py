"""Servers that a run starts decode images as the learner does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from streamrl.engine import image_decoding


@pytest.mark.parametrize(
    ("config", "reads"), [({}, False), ({"vision_config": None}, False), ({"vision_config": {}}, True)]
)
def test_a_model_with_a_tower_is_known_by_its_configuration(config, reads, tmp_path):
    assert not image_decoding.reads_images(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert image_decoding.reads_images(tmp_path) == reads


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sglangs_processors_of_models_that_are_trained_do_not_decode_on_a_gpu():
    code = (
        "from streamrl.engine import image_decoding, launch\n"
        "from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor\n"
        "from sglang.srt.utils import common\n"
        "def decodes():\n"
        "    common.is_cuda = lambda: True\n"
        "    return common.is_jpeg_with_cuda(b'\\xff\\xd8\\xff\\xd9', QwenVLImageProcessor.gpu_image_decode)\n"
        "before = decodes()\n"
        "image_decoding.install()\n"
        "print(before, decodes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True False"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_that_sglang_starts_afresh_are_told_too(tmp_path):
    code = (
        "import sys; sys.argv[1:] = {words!r}\n"
        "from streamrl.engine import image_decoding\n"
        "image_decoding.install = lambda: print('told')\n"
        "import runpy; runpy.run_module('streamrl.engine.launch', run_name='__mp_main__')\n"
    )
    for name, config, told in (("text", {}, ""), ("images", {"vision_config": {}}, "told\n")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        words = code.format(words=["--model-path", str(folder)])
        run = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=120, check=True)
        assert run.stdout == told

"""The trained model at the end of a run is, bit for bit, what `streamrl convert` makes of its last checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from learner_parts import make_batch, make_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from streamrl.config import Config
from streamrl.learner import trained_model
from streamrl.learner.conversion import to_huggingface
from streamrl.learner.huggingface import copy_description
from streamrl.learner.parallel import Ranks
from streamrl.learner.trainer import Trainer
from streamrl.observe.ending import saved_model
from streamrl.publish.peft import merge_adapter
from streamrl.types import PolicyVersion

LORA = {"lora": {"rank": 4, "publish": "adapter"}}


@contextmanager
def trained(config: Config, run: Path) -> Iterator[Trainer]:
    """One step, and the checkpoint of it."""
    trainer = Trainer(config, run)
    try:
        trainer.restore_or_start()
        trainer.train_step(make_batch())
        trainer.save()
        yield trainer
    finally:
        trainer.close()


def converted(config: Config, run: Path) -> Path:
    ranks = Ranks.start(config)
    try:
        to_huggingface(config, ranks, run / "checkpoints" / "step_1", run / "converted")
    finally:
        ranks.stop()
    return run / "converted"


def files(folder: Path) -> dict[str, object]:
    """The bytes of each file; of weights what is in them: the library writes the metadata in no certain order."""
    return {
        path.name: weights_in(path) if path.suffix == ".safetensors" else path.read_bytes() for path in folder.iterdir()
    }


def weights_in(path: Path) -> object:
    with safe_open(path, "pt") as file:
        tensors = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118  it is no mapping
        return file.metadata(), [(name, each.dtype, each.view(torch.uint8).numpy().tobytes()) for name, each in tensors]


@pytest.mark.parametrize(("dtype", "learner"), [("bfloat16", {}), ("float32", LORA)], ids=["bfloat16", "adapters"])
def test_every_file_of_the_model_is_that_of_the_converted_checkpoint(dtype, learner, model_folder, tmp_path):
    config = make_config(model_folder("qwen2"), dtype, **learner)
    with trained(config, tmp_path) as trainer:
        trained_model.write(trainer, tmp_path, 1.0, trainer.saved)
    assert saved_model(tmp_path) == PolicyVersion(1)
    assert files(tmp_path / "model") == files(converted(config, tmp_path))
    assert not list(tmp_path.glob(".model*"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert loaded.dtype == getattr(torch, dtype)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in weights.items())
    assert (tmp_path / "adapter").exists() == bool(learner)
    if learner:
        merged = load_file(model_folder("qwen2") / "model.safetensors")
        merge_adapter(merged, tmp_path / "adapter")
        assert all(torch.allclose(merged[name], weights[name], atol=1e-6) for name in weights)


def test_a_model_that_cannot_be_written_leaves_the_former_one_and_says_where_the_weights_are(model_folder, tmp_path):
    former = tmp_path / "model"
    former.mkdir()
    save_file({"a": torch.zeros(1)}, former / "model.safetensors", metadata={"version": "0.0"})
    (tmp_path / ".model.partial").write_text("a file where the draft would be")
    with trained(make_config(model_folder("qwen2")), tmp_path) as trainer:
        with pytest.raises(
            trained_model.ExportError, match=r"model cannot be written: .*checkpoint of step 1 is whole"
        ):
            trained_model.write(trainer, tmp_path, 1.0, trainer.saved)
        assert saved_model(tmp_path) == PolicyVersion(0)
        (tmp_path / ".model.partial").unlink()
        (tmp_path / ".model.old").mkdir()  # as of a learner that was killed between two renames
        trained_model.write(trainer, tmp_path, 1.0, trainer.saved)
    assert saved_model(tmp_path) == PolicyVersion(1)
    assert not list(tmp_path.glob(".model*"))


def test_a_read_only_model_folder_becomes_files_that_their_owner_may_write(model_folder, tmp_path):
    copy_description(model_folder("llama"), tmp_path / "model")
    for file in (tmp_path / "model").iterdir():
        file.chmod(0o444)
    copy_description(tmp_path / "model", tmp_path / "copy")
    assert all(file.stat().st_mode & 0o200 for file in (tmp_path / "copy").iterdir())


def test_the_configuration_of_the_model_names_the_dtype_that_its_weights_have(model_folder, tmp_path):
    with trained(make_config(model_folder("llama"), "bfloat16"), tmp_path) as trainer:
        trainer.export_model()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((model_folder("llama") / "config.json").read_text())["dtype"] == "float32"

"""What a model family must do: read a configuration, know every tensor's name, compute what transformers computes.

from streamrl.testing.families import ModelFamilyConformance

class TestRenamed(ModelFamilyConformance):
    name = "renamed.py:Renamed"
    model_class = "Qwen2ForCausalLM"

    def stored_name(self, name):
        return name.replace("mlp.down_proj", "mlp.down")

The tests make tiny random models, with megatron-core, in one process.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from streamrl.choices import FAMILIES
from streamrl.config import Config
from streamrl.learner.shape import ModelShape, UnsupportedModelError, read_shape
from streamrl.testing.declarations import Conformance, absolute

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.learner.model import PolicyModel

VOCABULARY = 131  # not a multiple of anything, so that the embedding is padded
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
WITHOUT = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
# Keys of a vision-language model's configuration that are not in its `text_config`.
BESIDE_TEXT = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "tie_word_embeddings",
)  # fmt: skip
BUFFERS = ("e_score_correction_bias",)  # of transformers' models, that a folder has
QUANTIZED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def random_model(model_class: str, **config: Any) -> Any:
    """A model of transformers with random weights, biases and norms. `config`: keys of its configuration."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, model_class)
    given = {**SIZES, **config}
    if "vision_config" in given:
        given = {key: given.pop(key) for key in BESIDE_TEXT if key in given} | {"text_config": given}
    model = made(made.config_class(**copy.deepcopy(given)))  # some write into `rope_parameters`
    with torch.no_grad():
        for weight in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith(BUFFERS))):
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


class ModelFamilyConformance(Conformance):
    """Give `name`, and what its models have otherwise than SIZES and transformers' class of the same name."""

    kind = FAMILIES
    model_class: ClassVar[str] = ""  # of transformers, which computes the same; empty: the family's first architecture
    config: ClassVar[dict[str, Any]] = {}  # of that class, beside SIZES
    ties: ClassVar[tuple[bool, ...]] = (False, True)  # whether embeddings are tied in its folders

    def stored_name(self, name: str) -> str:
        """What a folder of this family calls the tensor that transformers calls `name`."""
        return name

    def stored_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """How a folder of this family has the tensor that transformers saves as `name`."""
        return tensor

    def test_a_configuration_is_read_as_transformers_reads_it(self, tmp_path: Path) -> None:
        for tied in self.ties:
            folder, theirs = self._folder(tmp_path, tied)
            shape, config = self._shape(folder), theirs.config.get_text_config()
            assert shape.architecture in self.declaration.architectures
            assert shape.family is self.declaration
            assert (shape.layers, shape.hidden) == (config.num_hidden_layers, config.hidden_size)
            assert (shape.heads, shape.groups) == (config.num_attention_heads, config.num_key_value_heads)
            assert (shape.vocabulary, shape.tied) == (config.vocab_size, tied)
            # A scaled rotary embedding may hold up to the context of the first training alone.
            first = getattr(config, "original_max_position_embeddings", None)
            assert shape.max_length in (config.max_position_embeddings, first)

    def test_a_configuration_that_it_cannot_read_is_refused_in_one_line(self, tmp_path: Path) -> None:
        folder, _ = self._folder(tmp_path, False)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        sizes = config.get("text_config", config)
        broken = [{other: sizes[other] for other in sizes if other != key} for key in WITHOUT if key in sizes]
        if sizes is not config:
            broken = [config | {"text_config": each} for each in broken]
        for each in (*broken, config | {"quantization_config": QUANTIZED}):
            path.write_text(json.dumps(each))
            with pytest.raises(UnsupportedModelError) as refused:
                self._shape(folder)
            assert len(str(refused.value).splitlines()) == 1

    def test_its_names_are_those_of_the_folder(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        from streamrl.learner.mapping import tensor_names

        for tied in self.ties:
            folder, _ = self._folder(tmp_path, tied)
            assert sorted(tensor_names(self._shape(folder))) == sorted(load_file(folder / "model.safetensors"))

    def test_every_weight_comes_back_bit_by_bit(self, tmp_path: Path) -> None:
        import torch
        from safetensors.torch import load_file

        from streamrl.learner.huggingface import export_folder

        for tied in self.ties:
            folder, _ = self._folder(tmp_path, tied)
            with self._loaded(folder) as model:
                export_folder([model], folder, tmp_path / f"written-{tied}")
            ours, theirs = (load_file(each / "model.safetensors") for each in (tmp_path / f"written-{tied}", folder))
            assert ours.keys() == theirs.keys()
            changed = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
            assert not changed
            assert self._shape(tmp_path / f"written-{tied}") == self._shape(folder)

    def test_a_parameter_that_is_cut_over_ranks_becomes_whole(self, tmp_path: Path) -> None:
        import torch

        from streamrl.learner.mapping import named_weights, place

        folder, _ = self._folder(tmp_path, False)
        with self._loaded(folder) as model, torch.no_grad():
            for name, parameter in named_weights(model):
                cut = place(name, model.shape, range(model.shape.layers)).cut
                dim = getattr(parameter, "partition_dim", -1)  # -1: every rank has the whole
                assert dim in (-1, cut.along), f"Megatron cuts {name} along {dim}, the family along {cut.along}"
                parts: list[Tensor] = [parameter, parameter]
                if cut.dim is not None:
                    tensors = cut.split(model.shape, parameter)
                    pieces = [[cut.piece(one, rank, 2, i) for i, one in enumerate(tensors)] for rank in (0, 1)]
                    parts = [cut.join(model.shape, of_rank) for of_rank in pieces]
                wholes = zip(cut.whole(model.shape, parts), cut.whole(model.shape, [parameter]), strict=True)
                assert all(torch.equal(ours, theirs) for ours, theirs in wholes), f"{name}, cut over two ranks"

    def test_its_logits_are_those_of_transformers(self, tmp_path: Path) -> None:
        import torch

        for tied in self.ties:
            folder, theirs = self._folder(tmp_path, tied)
            ids = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
            with self._loaded(folder) as model, torch.no_grad():
                ids = ids.to(next(model.parameters()).device)
                positions = torch.arange(ids.size(1), device=ids.device).expand(2, -1)
                ours = model(ids, positions, None)[..., : model.shape.vocabulary]
                torch.testing.assert_close(ours, theirs.to(ids.device)(ids).logits, rtol=1e-4, atol=1e-4)

    def _folder(self, parent: Path, tied: bool) -> tuple[Path, Any]:
        """A folder of this family, and the model of transformers that is in it."""
        from safetensors.torch import load_file, save_file

        folder = parent / f"tied-{tied}"
        architecture = self.declaration.architectures[0]
        model = random_model(self.model_class or architecture, **{**self.config, "tie_word_embeddings": tied})
        model.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        renamed = {self.stored_name(name): self.stored_tensor(name, tensor) for name, tensor in weights.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        return folder, model.eval()

    def _shape(self, folder: Path) -> ModelShape:
        return read_shape(folder, family=self.name)

    @contextlib.contextmanager
    def _loaded(self, folder: Path) -> Iterator[PolicyModel]:
        """The model with the folder's weights, as a learner of one rank loads it."""
        from streamrl.learner.huggingface import load_weights
        from streamrl.learner.model import build
        from streamrl.learner.parallel import Ranks

        config = Config.model_validate({"model": {"path": folder, "dtype": "float32", "family": absolute(self.name)}})
        ranks = Ranks.start(config)
        try:
            (model,) = build(self._shape(folder), config, ranks.device)
            load_weights([model], folder)
            yield model
        finally:
            ranks.stop()

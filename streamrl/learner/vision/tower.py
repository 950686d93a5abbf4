"""The vision tower in front of a language model: transformers' module, whole on every rank of the first stage.

    pixels ──tower──▶ features ──▶ in the places of image tokens among the embeddings
                      levels   ──▶ added there behind each of the first layers (deepstack, arXiv 2406.04334)

With sequence parallelism a rank has a part of the row's tokens, and takes the features of those: gradients of the
tower are then parts, which Megatron sums over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from streamrl.learner.vision.shape import VisionShape

if TYPE_CHECKING:
    from streamrl.learner.shape import ModelShape


@dataclass(slots=True, eq=False)
class RowImages:
    """The images of a row, for the first stage; on other stages, and of a row without any, there is none."""

    pixels: Tensor  # float32 [patches, patch_dim]
    grids: Tensor  # int64 [images, 3]
    places: Tensor  # int64 [n], of image tokens in this rank's slice of the row
    features: Tensor  # int64 [n], which of the images' features is in each
    levels: list[Tensor] = field(default_factory=list)  # [n', hidden] for each of the first layers, when it has run
    own: Tensor | None = None  # int64 [n'], places among the tokens of this sequence-parallel rank


class VisionTower(nn.Module):
    """transformers' tower, with its frequencies in float32 whatever the dtype of its weights."""

    def __init__(self, shape: ModelShape, config: TransformerConfig, *, frozen: bool, recompute: bool) -> None:
        from transformers.initialization import no_init_weights

        super().__init__()
        assert shape.vision is not None
        self.vision: VisionShape = shape.vision
        with no_init_weights():
            self.tower = shape.family.tower(shape.vision)
        self.tower.to(config.params_dtype)
        if recompute:
            self.tower.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        for parameter in self.tower.parameters():
            parameter.requires_grad_(not frozen)
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, pixels: Tensor, grids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Features [tokens, hidden], and those of each level, of pixels [patches, patch_dim] and grids [images, 3]."""
        given: Any = self.tower(pixels, grid_thw=grids)
        return given.pooler_output, list(getattr(given, "deepstack_features", None) or [])

    def place(self, embedded: Tensor, images: RowImages | None, rank: int) -> Tensor:
        """The embeddings [s, 1, hidden] with features in the places of image tokens.

        rank: of sequence parallelism; s are its tokens. Where the tower is trained, a row without an image passes one
        of zeros, so that every rank has gradients of all parameters to reduce.
        """
        if images is None:
            trained = torch.is_grad_enabled() and any(each.requires_grad for each in self.tower.parameters())
            return embedded + self._nothing(embedded) if trained else embedded
        features, levels = self(images.pixels, images.grids)
        places = images.places - rank * embedded.size(0)
        mine = (places >= 0) & (places < embedded.size(0))
        chosen, images.own = images.features[mine], places[mine]
        features, *levels = (each.index_select(0, chosen).to(embedded.dtype) for each in (features, *levels))
        images.levels = [level.detach().requires_grad_(level.requires_grad) for level in levels]
        embedded = embedded.index_copy(0, images.own, features[:, None])
        return _Joined.apply(images.levels, embedded, *levels) if levels else embedded

    def _nothing(self, embedded: Tensor) -> Tensor:
        """0, of which every parameter of the tower has a gradient."""
        vision = self.vision
        pixels = torch.zeros(vision.unit, vision.patch_dim, device=embedded.device)
        grid = torch.tensor([[1, vision.merge, vision.merge]], device=embedded.device)
        features, levels = self(pixels, grid)
        total: Tensor = sum((each.sum() for each in levels), features.sum())
        return 0.0 * total.to(embedded.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> VisionTower:
        """Megatron casts a model with all of its buffers."""
        kept = [(module, name, buffer) for module in self.modules() for name, buffer in module._buffers.items()]
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            changed = module._buffers[name]
            if buffer is not None and changed is not None and buffer.dtype == torch.float32:
                module._buffers[name] = buffer.to(changed.device)
        return self


class _Joined(torch.autograd.Function):
    """The embeddings. Their gradient is the last one of the language model: that of the levels is then complete.

    Layers add the levels as leaves of their own, because a layer that is computed again in the backward pass would run
    through the tower's graph once for each.
    """

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[Tensor], embedded: Tensor, *levels: Tensor) -> Tensor:
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        levels = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        return None, gradients[0], *levels


def attach(model: Any, *, frozen: bool, recompute: bool) -> None:
    """Put the tower of its shape in front of a model chunk of the first stage, and its levels behind the layers."""
    model.vision = VisionTower(model.shape, model.config, frozen=frozen, recompute=recompute)
    for layer in model.decoder.layers:
        if layer.layer_number <= model.shape.vision.levels:
            layer.register_forward_hook(_add_level, with_kwargs=True)


def _add_level(layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hidden states [s, 1, hidden] with the features of the layer's level on image tokens."""
    images: RowImages | None = getattr(kwargs.get("packed_seq_params"), "images", None)
    if images is None or not images.levels:
        return output
    assert images.own is not None
    hidden, *rest = output
    return hidden.index_add(0, images.own, images.levels[layer.layer_number - 1][:, None]), *rest

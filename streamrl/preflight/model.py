"""Whether model.path is a model's folder, and models can be cut as the layout, adapters and servers say."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.generate import GenerateConfig
from streamrl.config.refused import Refusals
from streamrl.engine.block_fp8 import BLOCK
from streamrl.engine.image_decoding import reads_images
from streamrl.learner import megatron_fields
from streamrl.learner.critic_shape import critic_shape
from streamrl.learner.layout_fit import check_fit
from streamrl.learner.shape import ModelShape, check_adapters
from streamrl.learner.teacher_shape import teacher_shape

# Where transformers and SGLang find how images are read.
IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def check_folder(config: Config) -> None:
    """Refuse a model.path without a configuration. Raises ConfigError."""
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {config.model.path} is no model; allowed: a Hugging Face folder (config.json, safetensors, "
            f"tokenizer); `python -m streamrl.launch.tiny_model {config.model.path}` makes a tiny one"
        )


def check_images(config: Config, shape: ModelShape) -> None:
    """Refuse a vision-language model without the description of its image processor. Raises ConfigError."""
    if shape.vision is None or any((config.model.path / name).is_file() for name in IMAGE_PROCESSORS):
        return
    raise ConfigError(
        f"model.path: {config.model.path} has no {IMAGE_PROCESSORS[0]}, by which {shape.architecture} reads images; "
        "allowed: a complete folder"
    )


def attached_towers(config: Config) -> Iterator[str]:
    """A line where servers that are attached to may compute with features of images from older weights."""
    attached = any(pool.attach for pool in config.generate.each_pool)
    if attached and not config.learner.keeps_vision and reads_images(config.model.path):
        yield (
            "generate.attach: SGLang keeps what a vision tower made of an image over weight updates unless a server is "
            "started with SGLANG_VLM_CACHE_SIZE_MB=0, which is not seen here; learner.freeze_vision=true does without"
        )


def check_model(config: Config, shape: ModelShape) -> None:
    """Refuse a layout, adapters or servers that the model, its teacher or critic cannot be cut into, and fields that
    Megatron has not.

    Raises ConfigError.
    """
    refusals = Refusals()
    with refusals:
        megatron_fields.check(config)
    with refusals:
        check_fit(shape, config.learner.layout)
    with refusals:
        shape.family.check_run(config)
    with refusals:
        teacher_shape(config, shape)
    with refusals:
        critic_shape(config, shape)
    megatron = shape.family.by_megatron
    if config.learner.moe_permute_fusion and shape.moe is None and megatron:
        refusals.add(
            f"learner.moe_permute_fusion: true needs a mixture of experts, not {shape.architecture}; allowed: false"
        )
    if config.learner.freeze_vision and shape.vision is None and megatron:
        refusals.add(
            f"learner.freeze_vision: true needs a vision-language model, not {shape.architecture}; allowed: false"
        )
    lora = config.learner.lora
    if lora.rank and shape.moe is not None and {"linear_fc1", "linear_fc2"}.intersection(lora.targets):
        refusals.add(
            "learner.lora.targets: linear_fc1 and linear_fc2 are layers of experts in this model, which get no "
            "adapters; allowed: linear_qkv, linear_proj"
        )
    if lora.rank and megatron:
        with refusals:
            check_adapters(shape, lora.targets)
    if lora.by_adapter and megatron and not shape.family.served_adapters:
        refusals.add(
            f"learner.lora.publish: adapter is not supported for {shape.architecture}, for which SGLang takes none; "
            "allowed: merged"
        )
    for pool in config.generate.each_pool:
        with refusals:
            _check_server(pool, shape)
    refusals.tell()


def _check_server(pool: GenerateConfig, shape: ModelShape) -> None:
    if shape.heads % pool.tensor_parallel:
        raise ConfigError(
            f"generate.tensor_parallel: {pool.tensor_parallel} does not divide {shape.heads} attention heads; "
            f"allowed: a divisor of {shape.heads}"
        )
    if pool.quantization is not None:
        if not shape.family.by_megatron:
            return  # refused above
        if not shape.family.served_blocks:
            raise ConfigError(
                f"generate.quantization: {pool.quantization} is not supported for {shape.architecture}; allowed: null"
            )
        _check_blocks(pool, shape)


def _check_blocks(pool: GenerateConfig, shape: ModelShape) -> None:
    """Refuse servers whose ranks would get parts of quantised blocks, which SGLang does not serve. Raises ConfigError.

    Sizes as SGLang 0.5.23 cuts them: key and value heads that are fewer than the ranks are on several of them.
    """
    ranks = pool.tensor_parallel
    cut: dict[str, float] = {
        "query heads": shape.heads // ranks * shape.head_dim,
        "key heads": max(1, shape.groups // ranks) * shape.head_dim,
    }
    if shape.moe is None or shape.moe.dense_layers:
        cut["rows of an MLP"] = shape.ffn / ranks
    if shape.moe is not None:
        expert_ranks = int(pool.sglang_arguments.get("ep_size", 1))
        cut["rows of an expert"] = shape.moe.ffn * expert_ranks / ranks
    for what, size in cut.items():
        if size % BLOCK:
            raise ConfigError(
                f"generate.quantization: {pool.quantization} needs blocks of {BLOCK} rows, and a rank of "
                f"generate.tensor_parallel={ranks} has {size:g} {what}; allowed: null, or ranks that divide "
                f"the model into multiples of {BLOCK}"
            )

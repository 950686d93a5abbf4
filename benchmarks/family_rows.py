"""What `benchmarks.families` computes of one family: each function gives the figures of some columns."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.family_images import by_learner, by_transformers, of_answer
from benchmarks.family_server import FOLDER, Asked, answers_of
from benchmarks.parity import Layout, configure
from benchmarks.parity_ranks import Case, run_ranks
from benchmarks.random_models import VOCABULARY, largest_difference, load_model, worst, write_model
from launch.tiny_vl_model import turn_experts
from streamrl.config import Config
from streamrl.learner.attention import describe_row
from streamrl.learner.families.base import ModelFamily
from streamrl.learner.huggingface import export_folder, export_weights, load_weights
from streamrl.learner.logprobs import Targets
from streamrl.learner.model import PolicyModel, build
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import read_shape

LENGTH = 32  # tokens of a sequence
# A prompt of 5 with answers of 4 and 7 behind it, then a sequence of 6: (start, length, prefix start, prefix length).
SEGMENTS = np.array([[0, 5, 0, 0], [5, 4, 0, 5], [9, 7, 0, 5], [16, 6, 0, 0]])

_NOTHING = torch.zeros(0)  # log-probs of what a model without a tower does not see


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How a family is measured. Example: `Check(skipped={"sglang": "its kernels are for GPUs alone"})`."""

    # Two rows of the table of names, whose Hugging Face tensors change places for the column `changed`.
    crossed: tuple[str, str] = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    layers: int = 4
    tied: bool = False
    server: Mapping[str, Any] = field(default_factory=dict)  # `generate.server_args` that the family needs on a CPU
    skipped: Mapping[str, str] = field(default_factory=dict)  # column -> why it is not measured


def make_folder(folder: Path, family: str, check: Check) -> tuple[Path, Path]:
    """A tiny random model, and the same with other weights."""
    first = write_model(folder / "first", family, check.tied, check.layers)
    second = folder / "second"
    shutil.copytree(first, second)
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(first / "model.safetensors").items()
    }
    save_file(weights, second / "model.safetensors", metadata={"format": "pt"})
    return first, second


def against_transformers(folder: Path, check: Check, work: Path) -> dict[str, float]:
    """The columns `logits`, `gradient`, `packed`, `export`, `changed`."""
    theirs, sees = load_model(folder, attn_implementation="eager"), read_shape(folder).vision is not None
    ids = torch.randint(5, VOCABULARY - 5, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with _token_by_token(theirs):
        expected = theirs(ids).logits
        packed = _packed_by_transformers(theirs)
        seen = by_transformers(theirs, folder) if sees else _NOTHING
    (_weighted(_following(expected, ids)) + _weighted(seen)).backward()
    gradient = _gradient_by_transformers(theirs, work / "gradient")
    with loaded(folder) as model:
        given = _logits(model, ids)
        seen_here = by_learner(model, folder) if sees else _NOTHING
        (_weighted(_following(given, ids)) + _weighted(seen_here)).backward()
        with torch.no_grad():
            figures = {"logits": _difference(given, expected)}
            pairs = [(_packed(model), packed), *([(seen_here, seen)] if sees else [])]
            figures["packed"] = worst(_difference(*pair) for pair in pairs)
            export_folder([model], folder, work / "exported")
            figures["gradient"] = largest_difference(_gradient(model), gradient)
    figures["export"] = unlike(work / "exported", folder)
    with loaded(folder, check.crossed) as model, torch.no_grad():
        figures["changed"] = _difference(_logits(model, ids), expected)
    return figures


def against_one_process(folder: Path) -> dict[str, float]:
    """The column `ranks`: TP2 with sequence parallelism, and EP2 where there are experts, against one process."""
    experts = read_shape(folder).moe is not None
    layout = Layout("two", 2, {"tensor": 2, "expert": 2} if experts else {"tensor": 2})
    (one,) = run_ranks([Case("one", configure(folder, "float32", Layout("one", 1)))], 1).values()
    (two,) = run_ranks([Case("two", configure(folder, "float32", layout))], 2).values()
    return {"ranks": largest_difference(two.tensors, one.tensors)}


def against_server(first: Path, second: Path, check: Check, work: Path) -> dict[str, float]:
    """The columns `sglang`, by the server's folder, and `published`, the worst of all transports."""
    answers = answers_of(first, second, check.server, work)
    with loaded(first) as model:
        served = _against(model, first, answers.pop(FOLDER))
    with loaded(second) as model:
        published = worst(_against(model, second, asked) for asked in answers.values())
    return {"sglang": served, "published": published}


@contextlib.contextmanager
def loaded(folder: Path, crossed: tuple[str, str] | None = None) -> Iterator[PolicyModel]:
    """The model as a learner of one rank loads it; with two rows of its family's table crossed."""
    config = Config.model_validate({"model": {"path": folder, "dtype": "float32"}})
    shape = read_shape(folder)
    if crossed is not None:
        shape = dataclasses.replace(shape, family=_with_crossed(shape.family, *crossed))
    ranks = Ranks.start(config)
    try:
        (model,) = build(shape, config, ranks.device)
        load_weights([model], folder)
        yield model
    finally:
        ranks.stop()


def unlike(written: Path, original: Path) -> float:
    """How many tensors of two folders are not the same, bit by bit, name by name."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (written, original))
    equal = [name for name in ours.keys() & theirs.keys() if torch.equal(ours[name], theirs[name])]
    return len(ours.keys() | theirs.keys()) - len(equal)


def _with_crossed(family: type[ModelFamily], one: str, other: str) -> type[ModelFamily]:
    table = family.in_a_layer
    broken = {**table, one: (table[one][0], table[other][1]), other: (table[other][0], table[one][1])}
    return type("Crossed", (family,), {"in_a_layer": broken})


def _logits(model: PolicyModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, torch.arange(ids.size(1)).expand(len(ids), -1), None)
    return logits[..., : model.shape.vocabulary]


@contextlib.contextmanager
def _token_by_token(model: Any) -> Iterator[None]:
    """Delta nets of transformers by its rule for one token after another: the one for chunks takes decays from
    differences of long sums, in float32, and loses a digit of their gradient.
    """
    module = sys.modules[type(model).__module__]
    chunked, of_tokens = (f"torch_{kind}_gated_delta_rule" for kind in ("chunk", "recurrent"))
    if (former := getattr(module, chunked, None)) is None:
        yield
        return
    setattr(module, chunked, getattr(module, of_tokens))
    try:
        yield
    finally:
        setattr(module, chunked, former)


def _following(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probs [b * (s - 1)] of all tokens but the first of each sequence."""
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()


def _weighted(logprobs: Tensor) -> Tensor:
    """A loss whose gradient reaches every weight."""
    return (logprobs * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(4))).sum()


def _gradient(model: PolicyModel) -> dict[str, Tensor]:
    """Under Hugging Face names: it goes the way of the weights."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {name: tensor.clone() for name, tensor in export_weights([model])}


def _gradient_by_transformers(model: Any, folder: Path) -> dict[str, Tensor]:
    """The same, saved as a model: transformers undoes what it fused when it read the folder."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    turn_experts(folder)
    return load_file(folder / "model.safetensors")


def _row() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Tokens and positions of the packed row, [T], and for each segment the places of all that its last token sees."""
    ids = torch.randint(5, VOCABULARY - 5, (int(SEGMENTS[:, 1].sum()),), generator=torch.Generator().manual_seed(5))
    seen = [
        torch.cat([torch.arange(first, first + prefix), torch.arange(start, start + length)])
        for start, length, first, prefix in SEGMENTS.tolist()
    ]
    positions = torch.cat([torch.arange(len(each))[-length:] for each, length in zip(seen, _lengths(), strict=True)])
    return ids, positions, seen


def _lengths() -> Sequence[int]:
    return [int(length) for length in SEGMENTS[:, 1]]


def _packed(model: PolicyModel) -> Tensor:
    """Log-probs [T] of the row's own tokens in reverse order, whichever they are."""
    ids, positions, _ = _row()
    targets = Targets(torch.arange(len(ids)), ids.flip(0), temperature=1.0)
    packed = describe_row(SEGMENTS, torch.device("cpu"))
    logprobs, _ = model(ids[None], positions[None], None, labels=targets, packed_seq_params=packed)
    assert isinstance(logprobs, Tensor)
    return logprobs


@torch.no_grad()
def _packed_by_transformers(model: Any) -> Tensor:
    """The same from one forward pass for each segment."""
    ids, _, seen = _row()
    logits = [model(ids[each][None]).logits[0, -n:] for each, n in zip(seen, _lengths(), strict=True)]
    return torch.cat(logits).log_softmax(-1).gather(1, ids.flip(0)[:, None])[:, 0]


@torch.no_grad()
def _against(model: PolicyModel, folder: Path, asked: Sequence[Asked]) -> float:
    """The largest difference of the server's log-probs to the learner's on the same tokens and images."""
    differences = []
    for question, answer in asked:
        if question.images:
            ours = of_answer(model, folder, question.ids, question.images, answer.output_ids)
        else:
            ids = torch.tensor([[*question.ids, *answer.output_ids]])
            ours = _following(_logits(model, ids), ids)[len(question.ids) - 1 :]
        theirs = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        differences.append(_difference(ours, theirs))
    return worst(differences)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())

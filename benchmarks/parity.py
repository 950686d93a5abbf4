"""The gradient of every layout against that of one process: real ranks over gloo or NCCL, tiny random models.

    python -m benchmarks.parity [--quick] [--json PATH]

One batch of groups with stale and masked tokens and a placeholder is trained in every layout, from the same
weights, and the whole gradient is put together again under Hugging Face names. For each row:

    gradient   the largest difference to one process, relative to the largest entry of the same weight's gradient
    loss       the relative difference of the loss
    norm       the relative difference of the norm by which the optimizer clips
    scores     the largest difference, in nats, of `Passes.score` to the log-probs that the loss saw
    rounding   for bfloat16: the gradient of one process in bfloat16 against float32, by the same measure

`unpacked` is one process with one sequence a row, against the same with packed rows and shared prompts. The
loss has no clip here: a token at the edge of a clip falls to either side by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.parity_ranks import Case, Gradient, run_ranks
from benchmarks.random_models import largest_difference, write_model
from streamrl.config import Config
from streamrl.lab.output import output_file
from streamrl.learner.shape import read_shape

BAR = 5e-6  # largest difference of gradient, loss, norm and scores in a float32 row
ROUNDING_BAR = 2.0  # largest gradient difference of a bfloat16 row, over what one process loses by bfloat16
REFUSED = "qwen3_moe, TP2: refused, experts are cut over tensor-parallel ranks with learner.layout.sequence alone"
LAYERS = 4  # of the models: two pipeline stages of two chunks
BUDGET = 64  # tokens of a row: several rows on every rank


@dataclass(frozen=True, slots=True)
class Layout:
    """A number of ranks and the learner's settings that make a layout of them."""

    name: str
    ranks: int
    layout: dict[str, Any] = field(default_factory=dict)
    learner: dict[str, Any] = field(default_factory=dict)
    experts: bool | None = None  # True: mixtures of experts alone, False: dense models alone


# Every family, tied and untied, in both dtypes.
LAYOUTS = (
    Layout("DP2", 2),
    Layout("TP2", 2, {"tensor": 2, "sequence": False}, experts=False),  # experts are cut with sequence parallelism
    Layout("TP2+SP", 2, {"tensor": 2}),
    Layout("PP2", 2, {"pipeline": 2}),
    Layout("CP2", 2, {"context": 2}),
    Layout("EP2", 2, {"expert": 2}, experts=True),
    Layout("TP2xPP2", 4, {"tensor": 2, "pipeline": 2}),
    Layout("TP2xDP2", 4, {"tensor": 2}),
    Layout("TP2xCP2", 4, {"tensor": 2, "context": 2}),
    Layout("PP2xDP2", 4, {"pipeline": 2}),
)

# In float32, untied, for one dense family and for the mixture of experts.
FURTHER = (
    Layout("PP2, 2 chunks a stage", 2, {"pipeline": 2, "virtual": 2}),
    Layout("PP4", 4, {"pipeline": 4}),
    Layout("CP4", 4, {"context": 4}),
    Layout("CP2xPP2", 4, {"context": 2, "pipeline": 2}),
    Layout("DP2, distributed optimizer", 2, learner={"optimizer": {"distributed": True}}),
    Layout("DP2, distributed, overlap", 2, learner={"optimizer": {"distributed": True}, "overlap": True}),
    Layout(
        "PP2 2 chunks, distributed, overlap",
        2,
        {"pipeline": 2, "virtual": 2},
        {"optimizer": {"distributed": True}, "overlap": True},
    ),
    Layout("fully sharded", 2, {"sharding": "full"}),
    Layout("fully sharded, recompute full", 2, {"sharding": "full"}, {"recompute": "full"}),
    Layout("fully sharded, TP2", 4, {"sharding": "full", "tensor": 2}, experts=False),
    Layout("fully sharded, CP2", 4, {"sharding": "full", "context": 2}),
    Layout("recompute selective", 1, learner={"recompute": "selective"}),
    Layout("recompute full", 1, learner={"recompute": "full"}),
    Layout("TP2xPP2, recompute full", 4, {"tensor": 2, "pipeline": 2}, {"recompute": "full"}),
    Layout("TP2xEP2", 4, {"tensor": 2, "expert": 2}, experts=True),
    Layout("TP2, experts cut in 2", 2, {"tensor": 2, "expert_tensor": 2}, experts=True),
    Layout("EP2xPP2", 4, {"expert": 2, "pipeline": 2}, experts=True),
    Layout("EP2xCP2", 4, {"expert": 2, "context": 2}, experts=True),
)

DTYPES = ("float32", "bfloat16")
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; differences are relative, but for `scores`."""

    family: str
    tied: bool
    dtype: str
    layout: str
    gradient: float
    loss: float
    norm: float
    scores: float
    rounding: float | None  # None in float32

    @property
    def within(self) -> bool:
        """Under the bar of its dtype; what is not a number is not."""
        if self.rounding is not None:
            return self.gradient <= ROUNDING_BAR * self.rounding
        return all(value <= BAR for value in (self.gradient, self.loss, self.norm, self.scores))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Qwen2 and the mixture of experts, untied, float32")
    parser.add_argument("--json", type=output_file, help="write the rows here")
    options = parser.parse_args()
    rows = list(_rows(options.quick))
    Console(width=120).print(_table(rows))
    print(REFUSED)
    for line in summary(rows):
        print(line)
    broken = [row for row in rows if not row.within]
    print(f"{len(rows)} rows, {len(broken)} over the bar: {BAR:g} in float32, {ROUNDING_BAR:g} roundings in bfloat16")
    if options.json:
        content = {"bar": BAR, "rounding_bar": ROUNDING_BAR, "refused": REFUSED, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if broken else 0


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The largest differences of each layout over all models in float32, and of bfloat16 over its rounding."""
    exact = [row for row in rows if row.rounding is None]
    for layout in dict.fromkeys(row.layout for row in exact):
        chosen = [row for row in exact if row.layout == layout]
        gradient, loss = max(row.gradient for row in chosen), max(row.loss for row in chosen)
        yield f"float32 {layout}: {len(chosen)} rows, gradient at most {gradient:.1e}, loss {loss:.1e}"
    ratios = [row.gradient / row.rounding for row in rows if row.rounding]
    if ratios:
        yield f"bfloat16: gradient at most {max(ratios):.2f} of what one process loses by rounding"


def _rows(quick: bool) -> Iterator[Row]:
    families = ("qwen2", "qwen3_moe") if quick else FAMILIES
    for family in families:
        for tied in (False,) if quick else (False, True):
            yield from family_rows(family, tied, DTYPES[:1] if quick else DTYPES, further=not tied and not quick)


def family_rows(family: str, tied: bool, dtypes: Sequence[str], further: bool, **shape: Any) -> Iterator[Row]:
    """The rows of one model, whose configuration has `shape` besides: each group of ranks is started once."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", family, tied, LAYERS, **shape)
        wanted = [(dtype, layout) for dtype in dtypes for layout in LAYOUTS]
        if further and family in ("qwen2", "qwen3_moe"):
            wanted += [("float32", layout) for layout in FURTHER]
        read = read_shape(model)
        wanted = [(dtype, layout) for dtype, layout in wanted if layout.experts in (None, read.moe is not None)]
        if read.delta is not None or read.mamba is not None:  # refused: a state is not handed over ranks
            wanted = [(dtype, layout) for dtype, layout in wanted if "context" not in layout.layout]
        if read.delta is not None:  # refused: a norm inside sees the heads of one rank
            wanted = [(dtype, layout) for dtype, layout in wanted if layout.layout.get("sequence", True)]
        given = _gradients(model, dtypes, wanted)
    for dtype in dtypes:
        one = given[f"{dtype} one"]
        rounding = None if dtype == "float32" else largest_difference(one.tensors, given["float32 one"].tensors)
        names = ["unpacked", *(layout.name for of, layout in wanted if of == dtype)]
        for name in names:
            yield _row((family, tied, dtype, name), given[f"{dtype} {name}"], one, rounding)


def _gradients(model: Path, dtypes: Sequence[str], wanted: Sequence[tuple[str, Layout]]) -> dict[str, Gradient]:
    alone = Layout("one", 1)
    cases = {1: [Case(f"{dtype} one", configure(model, dtype, alone)) for dtype in dtypes]}
    cases[1] += [Case(f"{dtype} unpacked", configure(model, dtype, alone), packed=False) for dtype in dtypes]
    for dtype, layout in wanted:
        case = Case(f"{dtype} {layout.name}", configure(model, dtype, layout))
        cases.setdefault(layout.ranks, []).append(case)
    return {name: given for ranks, group in cases.items() for name, given in run_ranks(group, ranks).items()}


def configure(model: Path, dtype: str, layout: Layout) -> str:
    """The configuration of a case, as JSON."""
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": dtype},
            "generate": {"sampling": {"temperature": 0.8}},
            "algo": {"entropy": 0.01, "eps_low": 1.0, "eps_high": 1e3, "weight": "none"},
            "learner": {
                "ranks": layout.ranks,
                "layout": layout.layout,
                "tokens_per_micro_batch": BUDGET,
                **layout.learner,
            },
        }
    ).model_dump_json()


def _row(what: tuple[str, bool, str, str], given: Gradient, one: Gradient, rounding: float | None) -> Row:
    family, tied, dtype, layout = what
    return Row(
        family=family,
        tied=tied,
        dtype=dtype,
        layout=layout,
        gradient=largest_difference(given.tensors, one.tensors),
        loss=abs(given.loss - one.loss) / abs(one.loss),
        norm=abs(given.norm - one.norm) / one.norm,
        scores=given.scores,
        rounding=rounding,
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="largest difference to one process, relative")
    for name in ("family", "embedding", "dtype", "layout"):
        table.add_column(name)
    for name in ("gradient", "loss", "norm", "scores", "rounding"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = [f"{figure:.1e}" for figure in (row.gradient, row.loss, row.norm, row.scores)]
        rounding = "" if row.rounding is None else f"{row.rounding:.1e}"
        style = None if row.within else "bold red"
        embedding = "tied" if row.tied else "untied"
        table.add_row(row.family, embedding, row.dtype, row.layout, *figures, rounding, style=style)
    return table


if __name__ == "__main__":
    raise SystemExit(main())

"""Every model family against transformers, against SGLang, and over ranks: tiny random models, float32, on a CPU.

    python -m benchmarks.families [FAMILY ...] [--quick] [--without COLUMN ...] [--json PATH]

One row a family:

    logits     the largest difference to transformers' of two sequences
    gradient   of a weighted sum of log-probs to transformers', relative to the largest entry of the worst tensor
    packed     of log-probs of a packed row with shared prompts to transformers' of each sequence alone
    ranks      of the gradient of a step by TP2+SP, with experts and EP2, to one process', relative as above
    sglang     of log-probs of a real server, started with the folder, to the learner's on the same tokens
    published  the same after an update to other weights, the worst of all transports
    export     tensors that do not return bit by bit
    changed    of logits when two rows of the family's table of names change places: above the bar, or nobody would see

All but `logits` and `changed` are of prompts with images, too, where a family reads them.

A family is added to `benchmarks/random_models.py:FAMILIES`, and to CHECKS where it is measured otherwise. What is not
measured has its reason under the table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.family_rows import Check, against_one_process, against_server, against_transformers, make_folder
from benchmarks.random_models import FAMILIES
from streamrl.lab.output import output_file

BAR = 1e-5
BARS = {**dict.fromkeys(("logits", "gradient", "packed", "ranks", "sglang", "published"), BAR), "export": 0.0}
# A recurrence rounds at every token, each CPU in its own way: 6e-6 and 1.2e-5 were seen of one model.
DELTA_NETS = ("qwen3_next", "qwen3_5")
DELTA_BAR = 5e-5
CHANGED = "changed"
CHANGED_BAR = 1e-3  # at least
COLUMNS = (*BARS, CHANGED)

QUICK = ("qwen2", "glm4_moe")
NO_DELTA = (
    "SGLang 0.5.23 has delta nets on CPUs by sgl_kernel alone, of which no build for CPUs is published: "
    "chunk_gated_delta_rule_cpu, fused_sigmoid_gating_delta_rule_update_cpu, causal_conv1d_fwd_cpu"
)

VISION_ON_CPUS = {"mm_attention_backend": "sdpa", "disable_fast_image_processor": True}

CHECKS: Mapping[str, Check] = {
    "deepseek_v3": Check(crossed=("self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight")),
    **dict.fromkeys(DELTA_NETS, Check(skipped={"sglang": NO_DELTA, "published": NO_DELTA})),
    **dict.fromkeys(("nemotron_h", "nemotron_3"), Check(crossed=("self_attention.A_log", "self_attention.D"))),
    # SGLang loads no output layer of its own.
    "gemma3_text": Check(crossed=("self_attn_bda.norm.weight", "mlp_bda.norm.weight"), tied=True),
    "glm4": Check(crossed=("self_attn_bda.norm.weight", "mlp_bda.norm.weight")),
    "glm4_moe": Check(crossed=("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), Check(server=VISION_ON_CPUS)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    family: str
    figures: dict[str, float]
    skipped: dict[str, str] = field(default_factory=dict)  # column -> reason

    def within(self, column: str) -> bool:
        """On the right side of the column's bar; what is not a number is not, and not measured without reason."""
        if column in self.skipped:
            return True
        figure = self.figures.get(column, float("nan"))
        if column == CHANGED:
            return figure >= CHANGED_BAR
        return figure <= (DELTA_BAR if self.family in DELTA_NETS and BARS[column] else BARS[column])

    @property
    def over(self) -> list[str]:
        return [column for column in COLUMNS if not self.within(column)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; none: all")
    parser.add_argument("--quick", action="store_true", help=f"without FAMILY: {', '.join(QUICK)} alone")
    parser.add_argument("--without", nargs="*", default=[], choices=COLUMNS, help="columns that are not measured")
    parser.add_argument("--json", type=output_file, help="write the rows here")
    options = parser.parse_args()
    if unknown := [family for family in options.families if family not in FAMILIES]:
        parser.error(f"{unknown[0]} is no family; allowed: {', '.join(FAMILIES)}")
    rows = []
    for family in options.families or (QUICK if options.quick else FAMILIES):
        rows.append(row_of(family, options.without))
        print(line_of(rows[-1]), flush=True)
    Console(width=140).print(_table(rows))
    for reason in sorted({f"{row.family}, {column}: {why}" for row in rows for column, why in row.skipped.items()}):
        print(reason)
    broken = [row for row in rows if row.over]
    print(f"{len(rows)} families, {len(broken)} over the bar: {BAR:g}, delta nets {DELTA_BAR:g}")
    if options.json:
        content = {"bars": {**BARS, CHANGED: CHANGED_BAR}, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if broken else 0


def row_of(family: str, without: Sequence[str] = ()) -> Row:
    """Measure one family."""
    check = CHECKS.get(family, Check())
    skipped = {**dict.fromkeys(without, "left out on the command line"), **check.skipped}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        first, second = make_folder(work, family, check)
        parts: list[tuple[set[str], Callable[[], dict[str, float]]]] = [
            ({"logits", "gradient", "packed", "export", CHANGED}, lambda: against_transformers(first, check, work)),
            ({"ranks"}, lambda: against_one_process(first)),
            ({"sglang", "published"}, lambda: against_server(first, second, check, work / "server")),
        ]
        figures: dict[str, float] = {}
        for columns, measure in parts:
            if not columns <= skipped.keys():
                figures |= {column: value for column, value in measure().items() if column not in skipped}
    return Row(family, figures, skipped)


def line_of(row: Row) -> str:
    """Example: `glm4: logits 2.4e-06, gradient 1.1e-06, ...`."""
    text = ", ".join(f"{column} {_figure(row, column)}" for column in COLUMNS)
    return f"{row.family}: {text}" + (f"; OVER: {', '.join(row.over)}" if row.over else "")


def _figure(row: Row, column: str) -> str:
    if column in row.skipped:
        return "-"
    figure = row.figures.get(column, float("nan"))
    return f"{figure:.0f}" if column == "export" else f"{figure:.1e}"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="largest differences, float32")
    table.add_column("family")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.family, *(_figure(row, each) for each in COLUMNS), style="bold red" if row.over else None)
    return table


if __name__ == "__main__":
    raise SystemExit(main())

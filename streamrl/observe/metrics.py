"""The metrics of a run: their names, units and meanings, and `metrics.jsonl`, one object a learner step."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.observe.disk import RoomCheck, append, in_room
from streamrl.observe.sinks.base import Sink
from streamrl.types import FAILURES, Batch, PolicyVersion
from streamrl.whole_files import drafted

log = logging.getLogger(__name__)

FORMAT = 1  # of the rows: a name with another meaning makes another format, a new name does not

# The suffix of a metric over the tokens of one staleness bucket: /s0, /s3_4, /s9+.
_BUCKET = re.compile(r"/s\d+(_\d+|\+)?$")

# How the metrics of an evaluated task begin, which the table has once: eval/TASK/length, eval/TASK/pass@K.
_EVALUATED = re.compile(r"^eval/[\w.-]+/(?:(pass@)\d+$)?")

# The same of a trained task of a mix, and of a part of the reward.
_TRAINED = re.compile(r"^task/[\w.-]+/")
_PART = re.compile(r"^reward/part/[\w.-]+$")


@dataclass(frozen=True, slots=True)
class Metric:
    """One name of `metrics.jsonl`."""

    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("step", "steps", "learner steps in the weights after this one"),
    Metric("version", "", "policy version after this step"),
    Metric("time", "s", "end of the step, since the epoch"),
    Metric("reward/mean", "", "mean reward of the rollouts; here and below each counts once, at its first step"),
    Metric("reward/std", "", "standard deviation of the rollouts' rewards"),
    Metric("reward/failed", "samples", "answers on which the scorer raised: trained with the task's lowest reward"),
    Metric("reward/failed_share", "share", "samples whose scorer failed: those, and samples/failed_scorer"),
    Metric("reward/part/PART", "", "mean of a reward part over the samples that have it"),
    Metric("reward/parts_left_out", "", "parts of the step beyond the first 32 names of the run"),
    Metric("reward/kl", "nats/token", "divergence to the reference policy that algo.kl_reward takes off the reward"),
    Metric("reward/kl_weight", "", "what multiplies it where algo.kl_target makes that adaptive"),
    Metric("pass_rate", "share", "rollouts that are wholly right"),
    Metric("signal_rate", "share", "groups whose rewards differ"),
    Metric("tokens/generated", "tokens", "output tokens of the groups that arrived since the last batch"),
    Metric("tokens/trained", "tokens", "tokens that entered the loss"),
    Metric("tokens/dropped", "tokens", "trained tokens whose behaviour log-prob is not finite"),
    Metric("tokens/generated_per_s", "tokens/s", "tokens/generated over time/step"),
    Metric("tokens/trained_per_s", "tokens/s", "tokens/trained over time/step"),
    Metric("staleness/mean", "steps", "mean age of a trained token: step of the weights minus its version's step"),
    Metric("staleness/p95", "steps", "95th percentile of the age"),
    Metric("staleness/max", "steps", "largest age; up to ceil(replay.max_staleness), or a larger replay.reuse_max_age"),
    Metric("loss/total", "", "the loss that was minimised, all terms"),
    Metric("loss/held_out", "nats/token", "mean cross entropy of the held-out rows (`streamrl sft`), when measured"),
    Metric("loss/kl", "nats/token", "KL divergence to the reference policy; 0 without one"),
    Metric("loss/kl_weight", "", "what multiplies it where algo.kl_target makes that adaptive"),
    Metric("loss/ratio_penalty", "", "mean (log r)^2, which algo.ratio_penalty multiplies"),
    Metric("distillation/kl", "nats/token", "reverse KL of the policy to its teacher, by k1; only with one"),
    Metric("values/mean", "", "mean value that a critic gives a trained token, before its updates of the step"),
    Metric("returns/mean", "", "mean of what the critic is trained on: advantage before whitening, plus value"),
    Metric("critic/explained_variance", "share", "1 - Var(return - value) / Var(return), before the step's updates"),
    Metric("critic/loss", "", "the critic's loss that was minimised, mean over the updates"),
    Metric("critic/clip", "share", "tokens whose loss is that of the value as critic.value_clip cuts it"),
    Metric("critic/grad_norm", "", "the critic's gradient norm before clipping, of several updates the largest"),
    Metric("critic/lr", "", "the critic's learning rate of the step"),
    Metric("critic/skipped", "updates", "the critic's updates so far that were not made, as steps/skipped"),
    Metric("loss/entropy", "nats/token", "mean entropy of the policy"),
    Metric("loss/clip_low", "share", "tokens clipped at 1 - eps_low"),
    Metric("loss/clip_high", "share", "tokens clipped at 1 + eps_high"),
    Metric("loss/clip_dual", "share", "tokens at the bound of the dual clip, or at algo.ratio_cap of dppo"),
    Metric("loss/kl_cov", "share", "tokens with the penalty of covariance=kl_cov"),
    Metric("loss/own", "share", "tokens with the penalty of a regulariser of your own"),
    Metric(
        "offpolicy/ess", "share", "effective sample size of the policy over the behaviour policy, before any weight"
    ),
    Metric("offpolicy/kl", "nats/token", "KL of the behaviour policy to the policy, by k3"),
    Metric("offpolicy/kl_k1", "nats/token", "the same by k1"),
    Metric("offpolicy/log_ratio_mean", "nats", "mean |log ratio| of policy and behaviour policy"),
    Metric("offpolicy/log_ratio_max", "nats", "largest |log ratio|"),
    Metric("mismatch/step", "steps", "learner steps in the weights that publish.mismatch has compared"),
    Metric("mismatch/servers", "servers", "servers compared since the last batch; what follows is of the furthest one"),
    Metric("mismatch/mean", "nats", "mean |log ratio| of learner and server, with the same weights on the same tokens"),
    Metric("mismatch/max", "nats", "largest |log ratio| of those tokens"),
    Metric("mismatch/infinite", "share", "those of them with a finite log-prob on one side alone, in no other figure"),
    Metric("mismatch/equal", "share", "those of them whose log-probs are equal bit for bit"),
    Metric("mismatch/rounding", "nats", "mean |log ratio| of decode and prefill on the same server; bfloat16 only"),
    Metric("mismatch/limit", "nats", "what mismatch/mean should stay below, by that rounding"),
    Metric("mismatch/slope", "", "0: the server has the published weights, 1: those that were published before"),
    Metric("mismatch/slope_error", "", "standard error of the slope"),
    Metric("offpolicy/clipped", "share", "tokens that the clip stops before the first update of the step"),
    Metric("offpolicy/masked", "share", "tokens that a mask zeroes before the first update of the step"),
    Metric("weights/ess", "share", "effective sample size of the weights that were applied"),
    Metric("weights/masked", "share", "tokens with weight 0"),
    Metric("weights/masked_token", "share", "tokens that the token mask removed"),
    Metric("weights/masked_sequence", "share", "tokens that the sequence mask removed"),
    Metric("weights/masked_geometric", "share", "tokens that the geometric mask removed"),
    Metric("weights/masked_token_k2", "share", "tokens whose k2 is too large"),
    Metric("weights/masked_token_k3", "share", "tokens whose k3 is too large"),
    Metric("weights/masked_sequence_sum_k2", "share", "tokens of samples whose sum of k2 is too large"),
    Metric("weights/masked_sequence_sum_k3", "share", "tokens of samples whose sum of k3 is too large"),
    Metric("weights/masked_sequence_mean_k2", "share", "tokens of samples whose mean of k2 is too large"),
    Metric("weights/masked_sequence_mean_k3", "share", "tokens of samples whose mean of k3 is too large"),
    Metric("weights/masked_sequence_max_k2", "share", "tokens of samples whose largest k2 is too large"),
    Metric("weights/masked_sequence_max_k3", "share", "tokens of samples whose largest k3 is too large"),
    Metric("weights/masked_clip_cov", "share", "tokens that covariance=clip_cov removed"),
    Metric("weights/masked_own_mask", "share", "tokens that a mask of your own removed"),
    Metric("weights/masked_own", "share", "tokens that a regulariser of your own removed"),
    Metric("weights/masked_second_moment", "share", "tokens that the second-moment mask removed"),
    Metric("grad_norm", "", "gradient norm before clipping, of several updates the largest; null where not finite"),
    Metric(
        "gradient/signal",
        "",
        "squared norm of the expected gradient of the final norm, estimated; with learner.params_metrics, or where "
        "replay.adaptive asks for it",
    ),
    Metric("gradient/noise", "", "expected squared distance of its gradient from that; their ratio is signal to noise"),
    Metric("params_norm", "", "norm of the trained parameters after the step; only with learner.params_metrics"),
    Metric(
        "grad_zeros", "share", "gradient entries of the last update that are zero; only with learner.params_metrics"
    ),
    Metric("lr", "", "learning rate of the step"),
    Metric("steps/updates", "updates", "optimizer updates so far"),
    Metric(
        "steps/skipped",
        "updates",
        "updates so far that were not made: no trained token, loss or gradient not finite, or a spike",
    ),
    Metric("steps/spikes", "updates", "those of them whose gradient norm was a spike"),
    Metric("micro_batches", "", "packed micro batches of the step on rank 0"),
    Metric("straggler/rank", "", "the rank with the longest passes; all ranks' seconds are in the event learner.ranks"),
    Metric("straggler/max_over_median", "", "longest time of a rank's passes over the median of the ranks"),
    Metric(
        "learner/tflops",
        "TFLOP/s",
        "model FLOPs of forward and backward passes a rank, over time/forward_backward and time/optimizer; no pads, "
        "no activation computed again, a shared prompt once",
    ),
    Metric("learner/mfu", "share", "model FLOPs utilisation: learner/tflops over the peak of a rank's device"),
    Metric("length/mean", "tokens", "mean output length of a sample; each branch of a rollout is one"),
    Metric("length/p95", "tokens", "95th percentile of the output length"),
    Metric("length/cut", "share", "answers that ended at the length limit"),
    Metric("samples/masked", "samples", "answers without a token that the loss reads, though they did not fail"),
    Metric("samples/all", "samples", "rollouts of the step, the failed ones among them"),
    Metric("samples/branches", "samples", "mean number of branches of a rollout; absent where each is one sample"),
    Metric("samples/failed", "samples", "those that are not trained: placeholders in their place, by reason below"),
    *(Metric(f"samples/failed_{reason}", "samples", f"those {meaning}") for reason, meaning in FAILURES.items()),
    Metric("quarantined", "groups", "groups of the step that the learner could not train: placeholders in their place"),
    Metric("time/step", "s", "the whole step, from asking for the batch"),
    Metric("time/wait", "s", "waiting for the batch"),
    Metric("time/scores", "s", "log-probs before the first update: policy again, teacher, reference, step-wide rules"),
    Metric("time/critic", "s", "passes and updates of the critic"),
    Metric("time/forward_backward", "s", "loss and gradient: time/forward and time/backward"),
    Metric("time/forward", "s", "forward passes and the loss, on rank 0"),
    Metric("time/backward", "s", "backward passes, pipeline bubbles and the reduction of gradients, on rank 0"),
    Metric("time/optimizer", "s", "the update"),
    Metric("time/publish", "s", "training waited for a publish"),
    Metric("idle/learner", "share", "time/wait over time/step"),
    Metric(
        "idle/generator", "share", "part of the time in which a server had nothing to generate, mean of the workers"
    ),
    Metric(
        "speculation/accept_length",
        "tokens",
        "tokens of an answer that a pass of the policy over drafts gave, mean since the last batch; with them alone",
    ),
    Metric("memory/allocated", "bytes", "device memory in use on rank 0; CUDA only"),
    Metric("memory/peak", "bytes", "its largest value so far; CUDA only"),
    Metric("rows/epoch", "epochs", "how often the rows have been trained (`streamrl sft`)"),
    Metric("buffer/groups", "groups", "complete groups that wait for training"),
    Metric("buffer/bytes", "bytes", "their size"),
    Metric("staleness/admitted", "steps", "staleness that admission allows now; below replay.max_staleness if adapted"),
    Metric("release/held", "tickets", "tickets that the bound allows and replay.release holds back, at the batch"),
    Metric("release/lead", "s", "how long before a step needs its groups their tickets go out; none while all go out"),
    Metric("release/quantile", "s", "time of a group from its first ticket on, at the quantile of replay.release"),
    Metric("staleness/reason", "", "moves of the adaptive bound since the last batch, and why; absent without any"),
    *(
        Metric(f"selection/{which}/{name}", unit, f"{meaning} of the groups that were {which} since the last batch")
        for which in ("generated", "dropped", "trained")
        for name, unit, meaning in (
            ("groups", "groups", "number"),
            ("length", "tokens", "mean output length"),
            ("pass_rate", "share", "mean share of right answers"),
        )
    ),
    Metric("replay/reused", "groups", "groups of the batch that an earlier step had; absent without replay.reuse"),
    Metric("replay/reused_share", "share", "the same, of the step's groups"),
    Metric("selection/placeholders", "groups", "groups given up since the last batch: lost too often, or for too long"),
    Metric("selection/reissued", "groups", "tickets issued again since the last batch"),
    Metric("selection/late_duplicates", "groups", "answers since the last batch whose ticket was another's by then"),
    Metric("selection/over_age", "groups", "groups since the last batch that were too old to be trained"),
    Metric("task/TASK/reward/mean", "", "mean reward of the samples of one task of a mix"),
    Metric("task/TASK/pass_rate", "share", "those of them that are wholly right"),
    Metric("task/TASK/groups", "share", "its part of the step's groups"),
    Metric("eval/step", "steps", "learner steps in the weights that the evaluation of this row measured"),
    Metric("eval/seconds", "s", "time of that evaluation"),
    Metric("eval/publish_wait", "s", "a new version waited, since the last batch, for servers all being evaluated"),
    Metric("eval/TASK/pass@K", "share", "prompts that one of K answers solves at least, unbiased"),
    Metric("eval/TASK/greedy", "share", "prompts that the greedy answer solves"),
    Metric("eval/TASK/reward", "", "mean reward of the sampled answers"),
    Metric("eval/TASK/length", "tokens", "their mean length"),
    Metric("eval/TASK/unanswered", "share", "answers that failed or did not come in evaluate.timeout: left out"),
)

NAMES = frozenset(metric.name for metric in METRICS)


def describe() -> str:
    """The table of all metrics in Markdown, and which of them have variants by staleness."""
    lines = ["| name | unit | meaning |", "|---|---|---|"]
    for metric in METRICS:
        meaning = metric.meaning.replace("|", "\\|")  # a bare one would begin another cell
        lines.append(f"| `{metric.name}` | {metric.unit} | {meaning} |")
    variants = (
        "`loss/`, `offpolicy/`, `weights/`, `tokens/trained` and `tokens/dropped` have a variant for each staleness: "
        "`/s0`, `/s1`, `/s2`, `/s3_4`, `/s5_8`, `/s9+`. `eval/TASK/` is there for each evaluated task, by its label, "
        "and `pass@K` for each K of `evaluate.k`; `task/TASK/` for each trained task of a mix; `reward/part/PART` for "
        "each part of `Score.parts`, with `_` for what is no letter, digit, `-` or `.`."
    )
    return "\n".join([*lines, "", variants])


def is_known(name: str) -> bool:
    """Whether `name` is in the table, or is the variant of one that is, for one staleness bucket, task or part."""
    if name in NAMES or _PART.match(name):
        return True
    of_any = (_BUCKET.sub("", name), _EVALUATED.sub(_of_any_task, name), _TRAINED.sub("task/TASK/", name))
    return not NAMES.isdisjoint(of_any)


def _of_any_task(begin: re.Match[str]) -> str:
    """`eval/copy/pass@8` -> `eval/TASK/pass@K`, `eval/copy/` -> `eval/TASK/`."""
    return "eval/TASK/pass@K" if begin[1] else "eval/TASK/"


class MetricsWriter:
    """Appends to `RUN/metrics.jsonl`, one line and one `write` a step, and hands the same to the sinks.

    On a full disk a method with a `check` waits for room as `in_room` says: the next step must not be trained, and the
    next checkpoint not written, without the row of this one.
    """

    def __init__(self, run_folder: Path, sinks: Sequence[Sink] = ()) -> None:
        self.path = run_folder / "metrics.jsonl"
        self._sinks = tuple(sinks)
        run_folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def truncate_after(self, step: int, check: RoomCheck | None = None) -> None:
        """Cut every row beyond `step`, and a row that a crash has torn: what a resume at `step` begins with.

        The rows that stay are kept byte for byte.
        """
        with self.path.open("rb") as rows:
            kept = [row for row in rows if (read := parse_row(row)) is not None and read["step"] <= step]
        self._replace(b"".join(kept), check)
        for sink in self._sinks:
            sink.truncate_after(step)

    def write(self, row: Mapping[str, Any], check: RoomCheck | None = None) -> None:
        """Append the metrics of one step; a number that is not finite is written as null.

        Raises ValueError for a row without `step` and for names that the table does not know.
        """
        unknown = sorted(name for name in row if not is_known(name))
        if unknown or "step" not in row:
            raise ValueError(f"metrics row with unknown names {unknown}" if unknown else "metrics row without a step")
        finite = {name: value if _is_finite(value) else None for name, value in row.items()}
        lost = [name for name, value in finite.items() if value is None]
        if lost:
            log.warning("step %s: not finite: %s", row["step"], ", ".join(lost))
        line = json.dumps(finite, default=_plain, allow_nan=False).encode() + b"\n"
        in_room(self.path, lambda: append(self._file, line), check)
        for sink in self._sinks:
            sink.write(int(row["step"]), finite)

    @property
    def places(self) -> dict[str, str]:
        """Where the sinks show what they were given, by the names of their classes; those that say so."""
        return {type(sink).__name__: where for sink in self._sinks if (where := sink.where) is not None}

    def write_batch(self, step: int, batch: Batch) -> None:
        """Hand the batch that was trained in `step` to the sinks, before the row of that step."""
        for sink in self._sinks:
            sink.write_batch(step, batch)

    def amend(self, step: int, late: Mapping[str, Any], check: RoomCheck | None = None) -> None:
        """Add what was known only later to the row of `step`, or to the next to it that tells nothing of the kind.

        The file is replaced as a whole.
        """
        lines = self.path.read_bytes().splitlines(keepends=True)
        known = {name: value for name, value in late.items() if is_known(name) and _is_finite(value)}
        rows = {place: row for place, line in enumerate(lines) if (row := parse_row(line)) is not None}
        free = [place for place, row in rows.items() if row.keys().isdisjoint(known)] or list(rows)
        if free:
            place = min(free, key=lambda place: (abs(rows[place]["step"] - step), -place))
            lines[place] = json.dumps({**rows[place], **known}, default=_plain, allow_nan=False).encode() + b"\n"
        self._replace(b"".join(lines), check)
        for sink in self._sinks:
            sink.write(step, known)

    def close(self) -> None:
        """Close the file and the sinks. May be called twice."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        for sink in self._sinks:
            sink.close()

    def _replace(self, rows: bytes, check: RoomCheck | None) -> None:
        """Put another file in place of the present one, whole or not at all."""
        with drafted(self.path) as draft:
            in_room(self.path, lambda: draft.write_bytes(rows), check)
        os.close(self._file)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)


def read_metrics(run_folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run in the order of its steps; none before its first step. A torn last row is passed over."""
    path = run_folder / "metrics.jsonl"
    if not path.exists():
        return
    with path.open("rb") as rows:
        for row in rows:
            read = parse_row(row)
            if read is not None:
                yield read


def incarnation(row: Mapping[str, Any]) -> int:
    """Of the learner that has written a row: 0, and more with each start; 0 where the row has no version."""
    return PolicyVersion.parse(row["version"]).incarnation if "version" in row else 0


def parse_row(row: bytes) -> dict[str, Any] | None:
    """One line of `metrics.jsonl` with its end; None when it is torn."""
    if not row.endswith(b"\n"):
        return None
    try:
        read = json.loads(row)
    except ValueError:
        return None
    return read if isinstance(read, dict) and "step" in read else None


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, anything else as its text."""
    return value.item() if hasattr(value, "item") else str(value)

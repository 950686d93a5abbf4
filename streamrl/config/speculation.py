"""`generate.speculation`: several tokens of an answer in one pass of the policy, which verifies what a draft proposes.

    draft ─t1 t2 t3─▶ one pass of the policy: p(t1), p(t2 | t1), ... ─▶ the first ones are kept, and one more is drawn

With acceptance thresholds of 1 a token that is kept has the policy's own probability (read in SGLang 0.5.23:
`sampling.cuh`, `eagle_utils.eagle_sample`), and its log-prob is that of the policy at the request's temperature
(`logprob_processor.compute_spec_logprobs`): drafts change how fast answers come, and not what is trained. What would
change it is refused here. Nothing is published to a draft: it stays as it is, and fewer of its tokens are kept the
further the policy moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from streamrl.choices import TRANSPORTS
from streamrl.config.section import Section, rule

if TYPE_CHECKING:
    from streamrl.config.generate import GenerateConfig
    from streamrl.config.tree import Config

AlgorithmName = Literal["ngram", "standalone", "eagle", "eagle3", "nextn"]

# Answers that a speculating server draws at once, unless `server_args.max_running_requests` says another number:
# SGLang's own default with drafts.
AT_ONCE = 48

# Tokens that a draft model proposes by default: SGLang's own numbers for most models, a chain of three.
STEPS, TOP_K = 3, 1

NGRAM_TOKENS, NGRAM_TOP_K = 12, 10  # SGLang's own, of the tree that is looked up

# SGLang's arguments that the keys of the section set, its short names among them, and the key of each.
ARGUMENTS = {
    "speculative_algorithm": "algorithm",
    "speculative_algo": "algorithm",
    "speculative_draft_model_path": "draft_model",
    "speculative_draft_model": "draft_model",
    "speculative_num_steps": "steps",
    "speculative_eagle_topk": "top_k",
    "speculative_num_draft_tokens": "draft_tokens",
    "speculative_ngram_max_bfs_breadth": "top_k",
}

# SGLang's arguments by which a draft is kept that the policy would not have drawn.
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What drafts."""

    has_model: bool  # a model, and no table of what was drawn before
    own_folder: bool = False  # that is in a folder of its own
    beside_adapters: bool = True  # SGLang takes it where the policy has adapters
    dp_attention: bool = True  # and where its ranks have data-parallel attention


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "ngram": Algorithm(has_model=False, dp_attention=False),
    "standalone": Algorithm(has_model=True, own_folder=True, beside_adapters=False, dp_attention=False),
    "eagle": Algorithm(has_model=True, own_folder=True),
    "eagle3": Algorithm(has_model=True, own_folder=True),
    "nextn": Algorithm(has_model=True),
}


class SpeculationConfig(Section):
    """Drafts of the servers, by SGLang's algorithms."""

    algorithm: AlgorithmName | None = Field(
        None,
        description="what drafts: ngram, a table of what the server drew before; standalone, a smaller model; eagle, "
        "eagle3, a model that reads the policy's states; nextn, the model's own layers of multi-token prediction; "
        "null: nothing",
    )
    draft_model: Path | None = Field(
        None, description="Hugging Face folder of the draft, for standalone, eagle and eagle3; never trained"
    )
    steps: int | None = Field(
        None, ge=1, description=f"tokens that a draft model proposes one after another; null: {STEPS}"
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description=f"branches of a tree of drafts at each token; null: {TOP_K}, a chain; of ngram {NGRAM_TOP_K}",
    )
    draft_tokens: int | None = Field(
        None,
        ge=2,
        description="tokens that one pass of the policy reads for an answer: the last one drawn, and drafts; null: "
        f"steps + 1; of ngram {NGRAM_TOKENS}",
    )

    @property
    def uses(self) -> Algorithm | None:
        """What the chosen algorithm is; None: nothing drafts."""
        return None if self.algorithm is None else ALGORITHMS[self.algorithm]

    @property
    def has_model(self) -> bool:
        """Does a model draft, beside the policy?"""
        return self.uses is not None and self.uses.has_model

    @property
    def breadth(self) -> int:
        """Branches of a tree of drafts."""
        return self.top_k or (TOP_K if self.has_model else NGRAM_TOP_K)

    @property
    def arguments(self) -> dict[str, Any]:
        """SGLang's, by their names; none where nothing drafts."""
        if self.algorithm is None:
            return {}
        chosen: dict[str, Any] = {
            "speculative_algorithm": self.algorithm.upper(),
            "max_running_requests": AT_ONCE,
        }
        if not self.has_model:
            breadth = {"speculative_ngram_max_bfs_breadth": self.breadth}
            return chosen | breadth | {"speculative_num_draft_tokens": self.draft_tokens or NGRAM_TOKENS}
        steps = self.steps or STEPS
        if self.draft_model is not None:
            chosen["speculative_draft_model_path"] = str(self.draft_model)
        return chosen | {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": self.breadth,
            "speculative_num_draft_tokens": self.draft_tokens or steps + 1,
        }

    @rule
    def _its_draft_has_a_folder(self) -> None:
        if self.uses is None:
            return
        if self.uses.own_folder and self.draft_model is None:
            raise ValueError(
                f"draft_model: null is no draft for algorithm={self.algorithm}; allowed: a Hugging Face folder"
            )
        if not self.uses.own_folder and self.draft_model is not None:
            others = ", ".join(name for name, each in ALGORITHMS.items() if each.own_folder)
            raise ValueError(
                f"draft_model: {self.draft_model} is not used by algorithm={self.algorithm}; allowed: null, or "
                f"algorithm={others}"
            )

    @rule
    def _its_tree_can_be_built(self) -> None:
        if self.uses is None:
            return
        if not self.has_model:
            if self.steps is not None:
                raise ValueError(
                    f"steps: {self.steps} is not used by algorithm={self.algorithm}, whose table gives all drafts at "
                    "once; allowed: null"
                )
            return
        steps = self.steps or STEPS
        most = 1 + self.breadth + (steps - 1) * self.breadth**2
        least = most if self.breadth == 1 else 2
        if self.draft_tokens is not None and not least <= self.draft_tokens <= most:
            raise ValueError(
                f"draft_tokens: {self.draft_tokens} cannot be had with steps={steps} and top_k={self.breadth}; "
                f"allowed: {most if least == most else f'{least} to {most}'}, or null"
            )


def check_pool(pool: GenerateConfig) -> None:
    """Raise ValueError where the servers' other keys do not go with drafts, or decide on them."""
    given = pool.sglang_arguments
    for name, value in given.items():
        if name in ARGUMENTS:
            raise ValueError(
                f"server_args: {name}={value} is not allowed; allowed: generate.speculation.{ARGUMENTS[name]}"
            )
        if name in THRESHOLDS and value != 1:
            raise ValueError(
                f"server_args: {name}={value} keeps drafts that the policy would not have drawn, whose log-probs would "
                "be those of another policy; allowed: 1"
            )
    drafts = pool.speculation
    if drafts.uses is None:
        return
    name = f"speculation.algorithm: {drafts.algorithm}"
    if not drafts.has_model and pool.attach:
        raise ValueError(
            f"{name} is corrected in servers that a worker starts (SGLang 0.5.23 draws token 0 too often by it), and "
            "attach has running ones; allowed: a draft model, or attach=[]"
        )
    if pool.sampling.truncates:
        raise ValueError(
            f"{name} returns no kept sets (SGLang 0.5.23), which sampling.top_p, top_k and min_p need in training; "
            "allowed: null, or top_p=1, top_k=-1 and min_p=0"
        )
    if given.get("enable_deterministic_inference"):
        raise ValueError(
            f"{name} makes what a seed gives depend on the drafts, and server_args has enable_deterministic_inference; "
            "allowed: null"
        )
    if given.get("enable_dp_attention") and not drafts.uses.dp_attention:
        able = ", ".join(each for each, algorithm in ALGORITHMS.items() if algorithm.dp_attention)
        raise ValueError(
            f"{name} is not possible with enable_dp_attention in server_args (SGLang 0.5.23); allowed: {able}, null"
        )
    if drafts.has_model and pool.quantization is not None:
        raise ValueError(
            f"{name} has a model that quantization={pool.quantization} would be said of as well; allowed: ngram, or "
            "quantization=null"
        )


def check_run(config: Config) -> None:
    """Raise ValueError where what else is configured does not go with drafts."""
    drafts, routed = config.generate.speculation, config.learner.router_replay
    if drafts.uses is None:
        return
    name = f"generate.speculation.algorithm: {drafts.algorithm}"
    if drafts.has_model and not config.learner.lora.by_adapter:
        transport = config.publish.chosen("transport")
        if not transport.spares_drafts:
            able = ", ".join(each for each in TRANSPORTS.names if TRANSPORTS.load(each).spares_drafts)
            raise ValueError(
                f"publish.transport: {config.publish.transport} loads each version into the draft as well, which "
                f"generate.speculation.algorithm={drafts.algorithm} has; allowed: {able}, or algorithm=ngram"
            )
    if config.learner.lora.by_adapter and not drafts.uses.beside_adapters:
        able = ", ".join(each for each, algorithm in ALGORITHMS.items() if algorithm.beside_adapters)
        raise ValueError(
            f"{name} is not possible with learner.lora.publish=adapter (SGLang 0.5.23); allowed: {able}, or "
            "learner.lora.publish=merged"
        )
    if routed and not drafts.has_model:
        raise ValueError(
            f"{name} returns no experts (SGLang 0.5.23), which learner.router_replay needs; allowed: null, or a draft "
            "model"
        )
    if routed and drafts.breadth > 1:
        raise ValueError(
            f"generate.speculation.top_k: {drafts.breadth} moves the tokens that are kept, and not their experts, "
            "which learner.router_replay needs; allowed: 1"
        )
    if least := config.evaluate.sampling(config.generate.sampling).min_p:
        raise ValueError(
            f"evaluate.min_p: {least:g} is nothing that drafts are verified by, with "
            f"generate.speculation.algorithm={drafts.algorithm}; allowed: 0"
        )

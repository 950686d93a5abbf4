"""How the tokens of one request are drawn: what the run says, what its agent chose instead, and what may be trained.

    generate.sampling ─┐
    the agent's own ───┴─▶ Drawing: SGLang's parameters, and what the samples must carry of them

Of an answer that is trained the behaviour policy must be known: its temperature above 0 is recorded, and of top-p,
top-k and min-p the set that they kept of each token, which the server returns (`return_sampling_mask`). Answers of an
evaluation are drawn as one likes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.config.generate import LARGEST_TOP_K, LEAST_TEMPERATURE, GenerateConfig
from streamrl.generate.stop_strings import StopStrings
from streamrl.generate.tokenizer import Tokenizer

# What a task may choose for itself.
OVERRIDES = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed"),
        *("max_new_tokens", "most_new_tokens", "stop", "stop_token_ids"),
    }
)
SHAPE = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})  # what is not the greedy answers'

# top_k of a request that is truncated otherwise alone: SGLang asks for one, and for room under its limit for tokens
# that are as probable as the last one.
IMPLIED_TOP_K = LARGEST_TOP_K - 64

LARGEST_SEED = 2**62  # of an answer beyond the first it is so much more, and SGLang takes up to 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How one request is drawn.

    Example: `Drawing(parameters={"temperature": 1.0, "top_p": 0.95, ...}, kept_sets=True)`.
    """

    parameters: dict[str, Any]  # SGLang's sampling_params
    kept_sets: bool = False  # the server must return the set from which each token was drawn
    temperature: float | None = None  # that the samples must carry; None: it is the run's
    stop: StopStrings | None = None
    seed: int | None = None

    @property
    def apart(self) -> bool:
        """Each answer is a request of its own: SGLang 0.5.23 fails to return the kept sets of several, draws several
        alike by one seed, and ends all of a request together."""
        return self.kept_sets or self.stop is not None or self.seed is not None

    def of_answer(self, number: int) -> dict[str, Any]:
        """The parameters of answer 0, 1, ... of a request."""
        return self.parameters if self.seed is None else {**self.parameters, "sampling_seed": self.seed + number}


class Sampling:
    """The sampling of a pool's requests.

    Usage:
        sampling = Sampling(config.generate, tokenizer, greedy=False, trained=True)
        sampling.drawing({"temperature": 0.7, "top_p": 0.95}).kept_sets  # True
    """

    def __init__(self, config: GenerateConfig, tokenizer: Tokenizer, *, greedy: bool, trained: bool) -> None:
        """`greedy`: every answer is, whatever a task chooses. `trained`: what shapes a draw must be known."""
        self._config = config
        self._tokenizer = tokenizer
        self._greedy = greedy
        self._trained = trained and not greedy
        given = config.sglang_arguments
        self._deterministic = bool(given.get("enable_deterministic_inference")) and not config.attach

    def drawing(self, chosen: Mapping[str, Any]) -> Drawing:
        """What a request that chose these is drawn by. Raises ValueError in one line for what is not possible."""
        if unknown := chosen.keys() - OVERRIDES:
            raise ValueError(f"sampling override {min(unknown)!r}; allowed: {', '.join(sorted(OVERRIDES))}")
        own = {name: value for name, value in chosen.items() if value is not None}
        if self._greedy:
            own = {name: value for name, value in own.items() if name not in SHAPE}
        run = self._config.sampling
        parameters: dict[str, Any] = {
            "temperature": 0.0 if self._greedy else _number(own, "temperature", run.temperature),
            "top_p": _number(own, "top_p", run.top_p),
            "top_k": _whole(own, "top_k", run.top_k) or -1,
            "min_p": _number(own, "min_p", run.min_p),
            "max_new_tokens": _whole(own, "max_new_tokens", run.max_new_tokens),
        }
        if (most := own.get("most_new_tokens")) is not None:
            parameters["max_new_tokens"] = min(most, parameters["max_new_tokens"])
        _check_ranges(parameters)
        drafts = self._config.speculation.algorithm
        if parameters["min_p"] and drafts is not None:
            raise ValueError(
                f"min_p: {parameters['min_p']:g} is nothing that generate.speculation.algorithm={drafts} verifies "
                "drafts by; allowed: 0"
            )
        if not parameters["min_p"]:
            del parameters["min_p"]
        truncated = parameters["top_p"] < 1 or parameters["top_k"] != -1 or "min_p" in parameters
        if self._trained:
            self._check_trained(parameters, truncated)
        kept_sets = self._trained and truncated
        if kept_sets and parameters["top_k"] == -1:
            parameters["top_k"] = IMPLIED_TOP_K
        strings, stop_ids = self._stop(own)
        parameters["stop_token_ids"] = stop_ids
        temperature = parameters["temperature"]
        return Drawing(
            parameters=parameters,
            kept_sets=kept_sets,
            temperature=temperature if self._trained and temperature != run.temperature else None,
            stop=StopStrings(strings, self._tokenizer) if strings else None,
            seed=self._seed(own),
        )

    def _check_trained(self, parameters: dict[str, Any], truncated: bool) -> None:
        if parameters["temperature"] < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature: {parameters['temperature']:g} draws greedily, which is no policy that could be trained; "
                f"allowed: {LEAST_TEMPERATURE:g} and above"
            )
        if parameters["top_k"] != -1 and not 2 <= parameters["top_k"] <= LARGEST_TOP_K:
            raise ValueError(
                f"top_k: {parameters['top_k']} is not allowed in training, whose servers return the kept set of each "
                f"token; allowed: -1, 2 to {LARGEST_TOP_K}"
            )
        if truncated and (drafts := self._config.speculation.algorithm) is not None:
            raise ValueError(
                f"top_p, top_k, min_p: servers with generate.speculation.algorithm={drafts} return no kept sets; "
                "allowed: 1, -1, 0, or generate.speculation.algorithm=null"
            )
        if truncated and self._config.router is not None:
            raise ValueError(
                f"top_p, top_k, min_p: generate.router={self._config.router} does not pass on that the kept sets are "
                "asked for; allowed: 1, -1, 0, or generate.router=null"
            )
        if "min_p" in parameters and self._deterministic:
            raise ValueError("min_p: servers with enable_deterministic_inference do not draw by it; allowed: 0")

    def _stop(self, own: dict[str, Any]) -> tuple[list[str], list[int]]:
        """The stop strings that are searched in the text, and the ids of all stop tokens."""
        given = own.get("stop") or []
        strings = [given] if isinstance(given, str) else list(given)
        if not all(isinstance(each, str) and each for each in strings):
            raise ValueError(f"stop: {given!r:.100} is not allowed; allowed: strings that are not empty")
        tokens = own.get("stop_token_ids", self._tokenizer.end_ids)
        if not all(isinstance(each, int) and each >= 0 for each in tokens):
            raise ValueError(f"stop_token_ids: {tokens!r:.100} is not allowed; allowed: ids of tokens")
        special = self._tokenizer.special if strings else {}
        ends = self._tokenizer.end_ids if tokens else ()  # no token at all, where a task says so
        ids = {*ends, *tokens, *(special[each] for each in strings if each in special)}
        return [each for each in strings if each not in special], sorted(ids)

    def _seed(self, own: dict[str, Any]) -> int | None:
        if "seed" not in own:
            return None
        seed = _whole(own, "seed", 0)
        if not self._deterministic:
            raise ValueError(
                f"seed: {seed} would not be kept to: SGLang draws by a request's seed in its deterministic mode alone, "
                "generate.server_args.enable_deterministic_inference=true on servers of the run's own, which the "
                "torch_native attention of a CPU does not have; allowed: null"
            )
        if not 0 <= seed <= LARGEST_SEED:
            raise ValueError(f"seed: {seed} is not allowed; allowed: 0 to {LARGEST_SEED}")
        return seed


def _check_ranges(parameters: dict[str, Any]) -> None:
    for name, fits, allowed in (
        ("temperature", parameters["temperature"] >= 0, "0 and above"),
        ("top_p", 0 < parameters["top_p"] <= 1, "above 0, up to 1"),
        ("top_k", parameters["top_k"] >= 1 or parameters["top_k"] == -1, "-1, 1 and above"),
        ("min_p", 0 <= parameters["min_p"] < 1, "0 and above, below 1"),
        ("max_new_tokens", parameters["max_new_tokens"] >= 1, "1 and above"),
    ):
        if not fits:
            raise ValueError(f"{name}: {parameters[name]:g} is not allowed; allowed: {allowed}")


def _number(own: dict[str, Any], name: str, default: float) -> float:
    value = own.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}: {value!r:.100} is not allowed; allowed: a finite number")
    return float(value)


def _whole(own: dict[str, Any], name: str, default: int) -> int:
    value = own.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: {value!r:.100} is not allowed; allowed: a whole number")
    return value

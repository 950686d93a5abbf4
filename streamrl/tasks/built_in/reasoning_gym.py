"""The task `reasoning_gym`: procedural puzzles with exact answers, behind scorers that behave.

One-digit sums: `dataset: chain_sum`, `params: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}`,
`suffix: " Answer with just the number."`, `extract: last_number`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import Field

from streamrl.config.words import unknown_key
from streamrl.tasks.answers import last_number
from streamrl.tasks.arguments import ARGUMENTS, TaskArguments, not_among
from streamrl.tasks.environment import EXACT, Completion, Environment, Message, Prompt, Score
from streamrl.tasks.order import digest, is_held_out
from streamrl.tasks.starter import Starter

# fmt: off
BEHAVED = (
    "ab", "advanced_geometry", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "bf", "binary_alternation",
    "bitwise_arithmetic", "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic", "color_cube_rotation",
    "complex_arithmetic", "count_bits", "count_primes", "course_schedule", "cryptarithm", "decimal_arithmetic",
    "decimal_chain_sum", "dice", "emoji_mystery", "family_relationships", "fraction_simplification", "gcd",
    "group_anagrams", "isomorphic_strings", "jugs", "kakurasu", "knights_knaves", "largest_island", "lcm",
    "leg_counting", "letter_counting", "letter_jumble", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid",
    "needle_haystack", "number_filtering", "number_format", "number_sequence", "palindrome_generation",
    "palindrome_partitioning", "polynomial_equations", "power_function", "products", "quantum_lock", "ransom_note",
    "rotate_matrix", "rotten_oranges", "sentence_reordering", "shortest_path", "simple_equations", "simple_geometry",
    "sokoban", "spell_backward", "string_manipulation", "string_splitting", "string_synthesis", "sudoku", "survo",
    "syllogism", "time_intervals", "tower_of_hanoi", "word_sequence_reversal", "word_sorting",
)
# fmt: on
# The data sets that pass the test of their scorers: the right answer scores 1, junk never does and never
# raises, item i is the same whatever the size, and no scorer evaluates the model's text as code, which
# those of countdown, puzzle24, n_queens, binary_matrix, spiral_matrix and others do.

# Distance between the candidates for one prompt: further than any run counts.
_STRIDE = 1 << 40

# Candidates after which a split is called empty: a share of 0.01 is missed with probability 1e-44.
_CANDIDATES = 10_000


# One-digit sums.
SUMS = {
    "dataset": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "suffix": " Answer with just the number.",
    "extract": "last_number",
}


class ReasoningGymArguments(TaskArguments):
    """Arguments of `reasoning_gym`."""

    dataset: str = Field("chain_sum", description="name of the data set")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of the data set's own configuration")
    suffix: str = Field("", description="text put behind every question")
    system: str | None = Field(None, description="system message of the chat; null: none")
    chat: bool = Field(True, description="ask through the model's chat template; false: plain text")
    extract: Literal["whole", "last_number"] = Field("whole", description="which part of an answer is scored")


class ReasoningGym(Environment):
    """Endless prompts of one data set. Reward 1 where its scorer gives exactly 1, else 0: no partial credit."""

    Arguments = ReasoningGymArguments
    starter = Starter(args=SUMS)

    def __init__(self, arguments: ReasoningGymArguments, seed: int, split: str) -> None:
        self._arguments = arguments
        self._held_out = split == "probe"
        self._first = digest(f"reasoning_gym/{seed}") & 0xFFFF_FFFF  # seeds far apart: item i is drawn from seed + i
        self._dataset = _create(arguments)

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`: the first candidate that belongs to this split, whose texts are disjoint."""
        entry = self._entry(index)
        question = entry["question"] + self._arguments.suffix
        messages = [Message(role="system", content=self._arguments.system)] if self._arguments.system else []
        messages.append(Message(role="user", content=question))
        return Prompt(
            index=index,
            text=None if self._arguments.chat else question,
            messages=tuple(messages) if self._arguments.chat else None,
            answer=entry["answer"],
            metadata={"entry": entry},
        )

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        answer = extract(completion.text, self._arguments.extract)
        right = float(self._dataset.score_answer(answer, prompt.metadata["entry"]) == 1.0)
        return Score(reward=right, parts={EXACT: right})

    def _entry(self, index: int) -> dict[str, Any]:
        for candidate in range(_CANDIDATES):
            entry = self._dataset[self._first + index + candidate * _STRIDE]
            if is_held_out(entry["question"], self._arguments.held_out) == self._held_out:
                return entry
        raise ValueError(
            f"{ARGUMENTS}.held_out: {self._arguments.held_out} leaves one split of {self._arguments.dataset} without "
            f"prompts; allowed: a share that leaves both some; nearest known key: {ARGUMENTS}.held_out"
        )


def extract(text: str, rule: Literal["whole", "last_number"]) -> str:
    """The part of an answer that is scored; empty where there is none.

    >>> extract("4 + 3 = 7.", "last_number")
    '7'
    """
    return text.strip() if rule == "whole" else last_number(text)


def _create(arguments: ReasoningGymArguments) -> Any:
    """The data set, once its name and its parameters have been checked."""
    if arguments.dataset not in BEHAVED:
        raise ValueError(not_among(f"{ARGUMENTS}.dataset", arguments.dataset, BEHAVED))
    from reasoning_gym.factory import DATASETS, create_dataset  # takes a second

    configuration = DATASETS[arguments.dataset][1]
    known = [field.name for field in dataclasses.fields(configuration) if field.name not in ("seed", "size")]
    for key, value in arguments.params.items():
        if key not in known:
            raise ValueError(unknown_key(f"{ARGUMENTS}.params.{key}", value, known))
    try:
        return create_dataset(arguments.dataset, seed=0, size=1, **arguments.params)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{ARGUMENTS}.params: {arguments.params} is not allowed ({error}); allowed: what "
            f"{configuration.__name__} accepts; nearest known key: {ARGUMENTS}.params"
        ) from None

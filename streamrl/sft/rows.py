"""The rows of `sft.data` as files of tokens: read, tokenised, those that are too long left out or cut, and told.

data set ──Rows──▶ split ──RowTokens──▶ (ids, trained) ──max_row_tokens──▶ FOLDER/trained, FOLDER/held_out
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.sft import SftConfig, SftDataConfig
from streamrl.config.words import checked
from streamrl.generate.tokenizer import Tokenizer
from streamrl.learner.shape import ModelShape
from streamrl.learner.token_rows import HELD_OUT, TRAINED, write
from streamrl.observe.bars import Bar
from streamrl.sft.tokens import KEY, RowTokens
from streamrl.tasks.arguments import ARGUMENTS
from streamrl.tasks.rows import Rows, RowsArguments

# Keys of the data that the rows of tasks have, too.
_SHARED = tuple(set(RowsArguments.model_fields) & set(SftDataConfig.model_fields))


def limit_of(config: Config, shape: ModelShape) -> int:
    """Tokens that a row may have. Raises ConfigError for more than the model has positions."""
    if config.sft.max_row_tokens is None:
        return min(config.learner.tokens_per_micro_batch, shape.max_length)
    if config.sft.max_row_tokens > shape.max_length:
        raise ConfigError(
            f"sft.max_row_tokens: {config.sft.max_row_tokens} is above the model's max_position_embeddings="
            f"{shape.max_length}; allowed: up to {shape.max_length}"
        )
    return config.sft.max_row_tokens


def tokenise(config: Config, tokenizer: Tokenizer, limit: int, folder: Path) -> list[str]:
    """Write the rows of the run into `folder`. Returns a line for each split of which rows are left out or cut.

    Raises ConfigError for a data set that cannot be had, a row that cannot be trained, and a split without a row.
    """
    lines: list[str] = []
    for split in (TRAINED, HELD_OUT) if config.sft.evaluate_every else (TRAINED,):
        rows = _rows(config.sft, split)
        made = _Made(config.sft, RowTokens(tokenizer, config.sft), rows, limit, split)
        write(folder / split, made)
        if not made.kept:
            raise ConfigError(
                f"sft.max_row_tokens: {limit} leaves out all {len(rows):,} rows{_of(split)}, the longest of "
                f"{made.longest:,} tokens; allowed: a larger one, or sft.long_rows=cut"
            )
        lines += made.lines()
    return lines


def _rows(settings: SftConfig, split: str) -> Rows:
    """Raises ConfigError, in the words of `sft.data`."""
    data = settings.data
    given = {key: value for key in _SHARED if (value := getattr(data, key)) is not None}
    given = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    columns = {"messages": data.messages} if data.messages else {"prompt": data.prompt, "answer": data.answer}
    try:
        arguments = checked(RowsArguments, given, KEY)
        held_out = split == HELD_OUT if settings.evaluate_every else None
        asked = [data.messages or data.prompt]
        return Rows(arguments, columns, asked, held_out=held_out, needed=list(columns.values()))
    except ValueError as error:
        raise ConfigError(str(error).replace(f"{ARGUMENTS}.", f"{KEY}.")) from None


@dataclass(slots=True)
class _Made:
    """The rows of one split, made while they are written."""

    settings: SftConfig
    tokens: RowTokens
    rows: Rows
    limit: int
    split: str
    kept: int = 0
    long: int = 0  # of all
    longest: int = 0  # tokens

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with Bar("tokenise", "rows", len(self.rows)) as bar:
            for place in bar.over(range(len(self.rows))):
                ids, trained = self._tokens(place)
                self.longest = max(self.longest, len(ids))
                if len(ids) > self.limit:
                    self.long += 1
                    ids, trained = ids[: self.limit], trained[: self.limit]
                    if self.settings.long_rows == "leave_out" or not trained.any():
                        continue
                self.kept += 1
                yield ids, trained

    def lines(self) -> Iterator[str]:
        """What the user reads of long rows."""
        if not self.long:
            return
        left_out = len(self.rows) - self.kept
        done = "left out" if left_out == self.long else f"cut, {left_out:,} of them left out, cut before an answer"
        yield (
            f"sft.max_row_tokens: {self.long:,} of {len(self.rows):,} rows{_of(self.split)} are {done}: "
            f"above {self.limit:,} tokens, the longest has {self.longest:,}"
        )

    def _tokens(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self.tokens.of(self.rows[place])
        except (ValueError, TypeError, KeyError) as error:
            where = f"row {self.rows.number(place)} of {self.settings.data.path}{_of(self.split)}"
            raise ConfigError(f"{KEY}: {where}: {error}; allowed: rows of prompts and answers in text") from None


def _of(split: str) -> str:
    return " that are held out" if split == HELD_OUT else ""

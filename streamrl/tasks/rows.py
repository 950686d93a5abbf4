"""The rows of a data set, from a file or the hub, parted into those that train and those that are held out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from streamrl.tasks.arguments import (
    ARGUMENTS,
    DATA_FORMATS,
    OF_THE_HUB,
    OnDisk,
    TaskArguments,
    is_data_file,
    not_among,
)
from streamrl.tasks.broken_lines import LINES, broken, broken_lines
from streamrl.tasks.data_sets import load_split
from streamrl.tasks.order import digest

if TYPE_CHECKING:
    import datasets  # it takes a second: only the process that reads rows imports it

# Rows that are read at a time where all of them are looked at.
_BATCH = 1000


class RowsArguments(TaskArguments):
    """Where the rows come from, and which of them are held out."""

    path: Annotated[str, OnDisk("data")] = Field(
        description="file or pattern of files (.jsonl, .json, .parquet, .csv, .arrow), or a data set's hub name"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub data set; null: its main branch")
    subset: str | None = Field(None, description="configuration of a hub data set; null: its default")
    split: str = Field("train", description="split of a hub data set")
    test_path: Annotated[str | None, OnDisk("data")] = Field(
        None, description="file whose rows are held out, instead of a part of the others"
    )
    test_split: str | None = Field(None, description="split of a hub data set that is held out, instead of a part")
    held_out_count: int | None = Field(None, ge=1, description="different prompts that are held out; null: held_out")
    train_count: int | None = Field(
        None,
        description="rows that are trained, the first ones; held out are the held_out_count rows behind them; below 0: "
        "all but so many; null: every prompt decides for itself",
    )
    evaluation_only: bool = Field(False, description="all rows are held out: for evaluation, never trained")
    distinct: bool = Field(False, description="each question once, however often the data set repeats it")
    cache: Annotated[str | None, OnDisk("folder")] = Field(
        None, description="folder for the converted data; null: that of the datasets library"
    )

    @property
    def images_folder(self) -> Path:
        """Where images that a data set holds as bytes are written."""
        import datasets

        return Path(self.cache or datasets.config.HF_DATASETS_CACHE) / "images"

    @property
    def is_file(self) -> bool:
        """Whether `path` is a file, or several, and no data set with splits of its own."""
        return is_data_file(self.path)

    @model_validator(mode="after")
    def _a_file_has_no_splits(self) -> RowsArguments:
        for key in OF_THE_HUB if self.is_file else ():
            if (given := getattr(self, key)) != RowsArguments.model_fields[key].default:
                raise ValueError(
                    f"{key}: {given!r} is of a data set of the hub, and path is a file; allowed: without it "
                    "(test_path: a file that is held out)"
                )
        return self

    @model_validator(mode="after")
    def _places_are_of_one_source(self) -> RowsArguments:
        for key in ("test_path", "test_split", "distinct") if self.train_count is not None else ():
            if (given := getattr(self, key)) != RowsArguments.model_fields[key].default:
                raise ValueError(
                    f"{key}: {given!r} has no effect where train_count parts the rows by their place; allowed: one of "
                    f"the two ({key}: {json.dumps(RowsArguments.model_fields[key].default)})"
                )
        return self


class Rows:
    """The rows of one split: a sequence of dictionaries. Rows of the same question are always in the same split."""

    def __init__(
        self,
        arguments: RowsArguments,
        columns: dict[str, str],
        asked: list[str],
        *,
        held_out: bool | None,
        also: Sequence[str] = (),
        needed: Sequence[str] = (),
    ) -> None:
        """`columns`: those that must be there, by the argument's key; a dot leads into a mapping (`a.b`).

        asked: the columns that make a question what it is; `also`: those that tell the questions of one data set
        apart besides, where it has them. held_out: the split that only evaluation and probes see; None: every row.
        needed: columns that no line of a .jsonl file may lack.
        Raises ValueError, with lines that name the argument.
        """
        if arguments.evaluation_only and held_out is False:
            raise ValueError(
                f"{ARGUMENTS}.evaluation_only: {arguments.path} is for evaluation and is never trained; "
                f"allowed: the task in a list for evaluation; nearest known key: {ARGUMENTS}.evaluation_only"
            )
        texts = tuple(columns.values())
        whole = load_split(arguments, "path", arguments.path, arguments.split, texts)
        self._data = _leading(whole, arguments)
        test = None if held_out is None else _test_rows(arguments, texts)
        _check(self._data, "path", arguments.path, columns, needed)
        if test is not None:
            _check(test, "test_path", arguments.test_path or arguments.path, columns, needed)
        asked = list(dict.fromkeys(column.partition(".")[0] for column in asked))
        asked += [column for column in also if column in self._data.column_names]
        if held_out is None:
            self._numbers = np.arange(len(self._data))
        elif arguments.train_count is not None:
            self._numbers = _by_place(_digests(self._data, asked), arguments, held_out)
        elif test is None:
            self._numbers = _parted(_digests(self._data, asked), arguments, held_out)
        elif held_out:
            asked = [column for column in asked if column in test.column_names]
            self._data, self._numbers = test, _once(_digests(test, asked), arguments)
        else:
            known = _digests(self._data, asked)
            numbers, shown = _once(known, arguments), [name for name in self._data.column_names if name not in also]
            if not set(also) & set(asked):
                self._numbers = _without(numbers, known, _digests(test, asked))
            elif set(shown) <= set(test.column_names):
                self._numbers = _less(numbers, _digests(self._data, shown), _digests(test, shown))
            else:  # nothing says which row of the one is a row of the other
                self._numbers = numbers
        if not len(self._numbers):
            raise ValueError(_too_few(arguments, 0))

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, place: int) -> int:
        """The number in the data set of the row at `place`."""
        return int(self._numbers[place])

    def __getitem__(self, place: int) -> dict[str, Any]:
        row: dict[str, Any] = self._data[self.number(place)]
        return row


def value_at(row: dict[str, Any], column: str) -> Any:
    """The value of a column; a dot leads into a mapping.

    >>> value_at({"reward_model": {"ground_truth": "34"}}, "reward_model.ground_truth")
    '34'
    """
    value: Any = row
    for name in column.split("."):
        value = value[name]
    return value


def text_of(value: Any) -> str:
    """Of a whole number without a fraction: a column of which one row has a fraction is one of such numbers.

    >>> text_of(5.0), text_of(0.5)
    ('5', '0.5')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _test_rows(arguments: RowsArguments, texts: Sequence[str]) -> datasets.Dataset | None:
    """The rows that are held out from another source than the others; None where there is none."""
    if arguments.test_path is not None:
        return load_split(arguments, "test_path", arguments.test_path, "train", texts)
    if arguments.test_split is not None and not arguments.is_file:
        return load_split(arguments, "path", arguments.path, arguments.test_split)
    return None


def _check(data: datasets.Dataset, key: str, path: str, columns: dict[str, str], needed: Sequence[str]) -> None:
    """Refuse rows without one of the columns, and rows of a file that have nothing in one that is `needed`."""
    _check_columns(data, columns)
    if Path(path).suffix not in DATA_FORMATS:
        return
    missing = {column: rows for column in needed if len(rows := _without_value(data, column))}
    if Path(path).suffix == LINES and (missing or not _is_text(data)) and (lines := broken_lines(path, needed)):
        raise ValueError(broken(f"{ARGUMENTS}.{key}", lines))
    told = (
        f"{ARGUMENTS}.{key}: {path}: row {rows[0]}: {column!r} is missing; allowed: a value in each row"
        for column, rows in missing.items()
    )
    if missing:
        raise ValueError("\n".join(told))


def _without_value(data: datasets.Dataset, column: str) -> np.ndarray:
    """The numbers of the rows, int64 [N], that have null there; a dot leads into a mapping."""
    import pyarrow.compute

    top, *inner = column.split(".")
    values = data.data.column(top)
    values = pyarrow.compute.struct_field(values, inner) if inner else values
    return np.flatnonzero(values.is_null()) if values.null_count else np.empty(0, np.int64)


def _check_columns(data: datasets.Dataset, columns: dict[str, str]) -> None:
    for key, column in columns.items():
        known: Any = data.features
        for name in column.split("."):
            if not isinstance(known, dict) or name not in known:
                raise ValueError(not_among(f"{ARGUMENTS}.{key}", column, data.column_names))
            known = known[name]


def _is_text(data: datasets.Dataset) -> bool:
    """Arrow takes bytes that are no UTF-8 as they are, and only who reads a value would stumble."""
    import pyarrow

    try:
        data.data.table.validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return True


def _digests(data: datasets.Dataset, asked: list[str]) -> np.ndarray:
    """uint64 [N]: a number for each row's question."""
    found: list[int] = []
    for batch in data.select_columns(asked).iter(_BATCH):
        found += [digest(_canonical(*values)) for values in zip(*(batch[name] for name in asked), strict=True)]
    return np.array(found, np.uint64)


def _canonical(*values: Any) -> str:
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(values[0] if len(values) == 1 else values, sort_keys=True, default=_named)


def _named(content: Any) -> str:
    """The text that represents what JSON has not: the bytes of an image, or a date."""
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else str(content)


def _once(digests: np.ndarray, arguments: RowsArguments) -> np.ndarray:
    """The row numbers, int64 [N]: of each question the first, where only that is wanted."""
    if not arguments.distinct:
        return np.arange(len(digests))
    return np.sort(np.unique(digests, return_index=True)[1])


def _without(numbers: np.ndarray, digests: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The rows whose question is in no row of `others`."""
    return numbers[~np.isin(digests[numbers], others)]


def _less(numbers: np.ndarray, digests: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The rows without as many of each content as `others` have: what tells rows of one data set apart, as their
    numbers, says nothing of those of another.
    """
    left, kept = Counter(others.tolist()), []
    for number in numbers.tolist():
        content = int(digests[number])
        if left[content]:
            left[content] -= 1
        else:
            kept.append(number)
    return np.array(kept, np.int64)


def _parted(digests: np.ndarray, arguments: RowsArguments, held_out: bool) -> np.ndarray:
    """The row numbers of one split, int64 [N]: the questions with the lowest digests are held out."""
    numbers = _once(digests, arguments)
    if arguments.evaluation_only:
        return numbers
    distinct = np.unique(digests)
    if len(distinct) < 2:
        raise ValueError(_too_few(arguments, len(distinct)))
    count = arguments.held_out_count
    if count is not None and count >= len(distinct):
        raise ValueError(
            f"{ARGUMENTS}.held_out_count: {count} is not allowed where there are {len(distinct)} different prompts; "
            f"allowed: up to {len(distinct) - 1}; nearest known key: {ARGUMENTS}.held_out_count"
        )
    probes = count or min(max(1, round(arguments.held_out * len(distinct))), len(distinct) - 1)
    return numbers[(digests[numbers] < distinct[probes]) == held_out]


def _leading(data: datasets.Dataset, arguments: RowsArguments) -> datasets.Dataset:
    """The rows of both splits, where their places decide: no other is looked at."""
    if arguments.train_count is None or arguments.train_count < 0 or arguments.held_out_count is None:
        return data
    return data.select(range(min(len(data), arguments.train_count + arguments.held_out_count)))


def _by_place(digests: np.ndarray, arguments: RowsArguments, held_out: bool) -> np.ndarray:
    """The row numbers of one split, int64 [N]: the first rows, or those behind them. No question is in both.

    Raises ValueError where there are not so many rows.
    """
    assert arguments.train_count is not None
    count = len(digests)
    end = arguments.train_count + (count if arguments.train_count < 0 else 0)
    if not 0 < end < count:
        raise ValueError(
            f"{ARGUMENTS}.train_count: {arguments.train_count} is not allowed where there are {count} rows; allowed: "
            f"1 to {count - 1}, or below 0; nearest known key: {ARGUMENTS}.train_count"
        )
    probes = np.arange(end, min(count, end + (arguments.held_out_count or count)))
    return probes if held_out else _without(np.arange(end), digests, digests[probes])


def _too_few(arguments: RowsArguments, prompts: int) -> str:
    return (
        f"{ARGUMENTS}.path: {arguments.path!r} holds {prompts} different prompts; allowed: at least 2, one "
        f"to train and one to probe; nearest known key: {ARGUMENTS}.path"
    )

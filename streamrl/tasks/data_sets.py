"""One split of a data set, from a file or from the hub, and one line for what cannot be had.

a file                                           ─▶ read
a name of the hub, which can be asked            ─▶ fetched, where the datasets library has not converted it before
HF_HUB_OFFLINE, and the snapshot is in the cache ─▶ read from there: where `hf download` puts it
HF_HUB_OFFLINE, and it is not                    ─▶ what the library has converted before, or one line
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.hub.deadlines import bound_requests
from streamrl.hub.repository import Repository, is_name, is_offline
from streamrl.tasks.arguments import ARGUMENTS, DATA_FORMATS, not_among
from streamrl.tasks.broken_lines import LINES, broken, broken_lines

if TYPE_CHECKING:
    import datasets  # it takes a second: only the process that reads rows imports it

    from streamrl.tasks.rows import RowsArguments


def load_split(
    arguments: RowsArguments, key: str, path: str, split: str, texts: Iterable[str] = ()
) -> datasets.Dataset:
    """One split of the data set that the argument `key` names by `path`, memory-mapped.

    texts: columns of which a .csv file has the text, whatever it looks like.
    Raises ValueError, with one line that names the argument.
    """
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what it logs is in what it raises
    suffix = Path(path).suffix
    try:
        if suffix in DATA_FORMATS:
            data = _of_file(DATA_FORMATS[suffix], path, arguments.cache, texts)
        else:
            source = _source(arguments, path)
            data = datasets.load_dataset(**source, name=arguments.subset, split=split, cache_dir=arguments.cache)
        return _undecoded(data)
    except Exception as error:  # absent, gated, broken, or out of reach: the library raises whatever it met
        if suffix == LINES and (lines := broken_lines(path)):
            raise ValueError(broken(f"{ARGUMENTS}.{key}", lines)) from None
        raise ValueError(_refusal(arguments, key, path, split, error)) from None


def _of_file(form: str, path: str, cache: str | None, texts: Iterable[str]) -> datasets.Dataset:
    """The rows of a file, or several: no text is taken for a number, a date or nothing."""
    import datasets

    # An empty cell is null, and no other one is: neither `NA` nor `None`.
    as_text = {"keep_default_na": False, "na_values": [""], "converters": dict.fromkeys(texts, str)}
    options: dict[str, Any] = as_text if form == "csv" else {}
    load = partial(datasets.load_dataset, form, data_files=path, split="train", cache_dir=cache, **options)
    data = load()
    if form == "json" and (features := _without_dates(data.features)) != data.features:
        return load(features=features)  # JSON has no dates: they are texts that look so
    return data


def _without_dates(feature: Any) -> Any:
    """The types of columns, with what a file says in place of each date."""
    import datasets

    match feature:
        case dict():
            return type(feature)({name: _without_dates(inner) for name, inner in feature.items()})
        case datasets.List():
            return datasets.List(_without_dates(feature.feature), length=feature.length)
        case datasets.Value(dtype=dtype) if dtype.startswith("timestamp"):
            return datasets.Json()
    return feature


def _source(arguments: RowsArguments, path: str) -> dict[str, str | None]:
    """Where the library is to read a data set that is no file: the snapshot in the hub's cache, or its own source."""
    repository = _repository(arguments, path)
    if repository is None:
        return {"path": path}
    if is_offline() and (snapshot := repository.snapshot()) is not None:
        return {"path": str(snapshot)}
    bound_requests()
    return {"path": path, "revision": arguments.revision}


def _repository(arguments: RowsArguments, path: str) -> Repository | None:
    """What `path` is on the hub; None for what is on this disk, or can be nowhere else."""
    if Path(path).suffix in DATA_FORMATS or Path(path).exists() or not is_name(path):
        return None
    return Repository(name=path, kind="dataset", revision=arguments.revision)


def _refusal(arguments: RowsArguments, key: str, path: str, split: str, error: Exception) -> str:
    """The line for what was not loaded."""
    from huggingface_hub.errors import RevisionNotFoundError

    if isinstance(error, ValueError) and (line := _not_there(arguments, path, split)):
        return line
    repository = _repository(arguments, path)
    if repository is not None and isinstance(error.__cause__, RevisionNotFoundError):
        return (
            f"{ARGUMENTS}.revision: {repository.at} is no branch, tag or commit of {path!r}; allowed: one of the "
            "hub's, or null for its main branch"
        )
    if repository is not None and (is_offline() or isinstance(error, (ConnectionError, TimeoutError))):
        why = "HF_HUB_OFFLINE is set" if is_offline() else "the hub cannot be reached"
        broken = f" ({_reason(error)})" if repository.snapshot() is not None or not is_offline() else ""
        return (
            f"{ARGUMENTS}.{key}: revision {repository.at} of {path!r} is not whole in {repository.root}{broken}, and "
            f"{why}; allowed: after `{repository.command()}`, or a file of type {', '.join(DATA_FORMATS)}"
        )
    return (
        f"{ARGUMENTS}.{key}: {path!r} cannot be loaded ({_reason(error)}); allowed: a file of type "
        f"{', '.join(DATA_FORMATS)} or a data set's hub name; nearest known key: {ARGUMENTS}.{key}"
    )


def _reason(error: Exception) -> str:
    from datasets.exceptions import DatasetNotFoundError

    own = isinstance(error, DatasetNotFoundError)  # it says more than what it comes from
    reason = "it holds no rows" if isinstance(error, StopIteration) else str(error if own else error.__cause__ or error)
    return " ".join(reason.split())[:200]


def _not_there(arguments: RowsArguments, path: str, split: str) -> str:
    """The line for a configuration or a split that a data set has not; empty where it has both, or cannot be asked."""
    import datasets

    if Path(path).suffix in DATA_FORMATS:
        return ""
    source = _source(arguments, path)
    try:
        subsets = datasets.get_dataset_config_names(**source)
        if arguments.subset not in (None, *subsets) or (arguments.subset is None and _must_choose(subsets)):
            return not_among(f"{ARGUMENTS}.subset", str(arguments.subset or "null"), subsets)
        subset = arguments.subset or ("default" if "default" in subsets else subsets[0])
        splits = [str(name) for name in datasets.get_dataset_split_names(**source, config_name=subset)]
    except Exception:  # it is broken, or out of reach, which the first error says
        return ""
    if split in splits or re.fullmatch(r"\w+", split) is None:  # a part of a split, `train[:10%]`
        return ""
    return not_among(f"{ARGUMENTS}.{'test_split' if split == arguments.test_split else 'split'}", split, splits)


def _must_choose(subsets: list[str]) -> bool:
    return len(subsets) > 1 and "default" not in subsets


def _undecoded(data: datasets.Dataset) -> datasets.Dataset:
    """Images as the bytes and paths that they are: only servers look at them."""
    import datasets

    for name, feature in data.features.items():
        if isinstance(feature, datasets.Image):
            data = data.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            data = data.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return data

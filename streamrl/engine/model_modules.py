"""Which of SGLang's model modules a server needs. It loads each that it has, nearly 300, to find one class."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path

from streamrl.engine import ngram_drafts
from streamrl.engine.model_config import architectures

# Arguments of a server, by their beginnings, for which the folder's own architecture is not all that is looked for.
_OF_OTHER_MODELS = ("--speculative", "--model-impl", "--config")

_OVERRIDE = "--json-model-override-args"


def unneeded(arguments: Sequence[str], model: Path, modules: Path) -> tuple[str, ...]:
    """Names of `modules`' files that register no class for the `architectures` of the model's config.json.

    None where that cannot be said: the model is no folder, its config.json names no class that one of the files has,
    or one of SGLang's `arguments` may ask for another class.
    """
    drafts_alone = ngram_drafts.drafts(arguments)  # by no other model
    words = [word for word in arguments if not (drafts_alone and word.startswith("--speculative"))]
    if any(word.startswith(_OF_OTHER_MODELS) for word in words) or _overrides(words):
        return ()
    names = architectures(model)
    registers = re.compile(rf"^EntryClass\b.*\b({'|'.join(map(re.escape, names))})\b", re.MULTILINE | re.DOTALL)
    files = sorted(modules.glob("*.py"))
    without = tuple(file.stem for file in files if not (names and registers.search(file.read_text())))
    return without if len(without) < len(files) else ()


def _overrides(arguments: Sequence[str]) -> bool:
    """Whether config.json is overridden in more than the format of the weights."""
    for word, value in pairwise([*arguments, ""]):
        if word.startswith(_OVERRIDE):
            try:
                return word != _OVERRIDE or json.loads(value).keys() != {"quantization_config"}
            except (ValueError, AttributeError):  # SGLang says what is wrong with it
                return True
    return False


def of_sglang() -> Path:
    """Where the installed SGLang has its model modules; it is not imported for it."""
    spec = PathFinder.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "srt" / "models"

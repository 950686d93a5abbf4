"""Every key of the configuration tree by its dotted path."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamrl.config.tree import Config
from streamrl.config.words import section_in


def fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the tree with its dotted path, in the order of the tree; sections themselves are left out."""
    for name, field in section.model_fields.items():
        if nested := section_in(field.annotation):
            yield from fields(nested, f"{prefix}{name}.")
        else:
            yield prefix + name, field

"""What every part of the configuration tree is: frozen, typed, and strict about its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from streamrl.choices import Kind, kind_in
from streamrl.config.words import checked


class Section(BaseModel):
    """A frozen part of the tree that knows its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def choices(self) -> Iterator[tuple[str, Kind]]:
        """The keys of this section that hold a choice, whose options are beside it."""
        for key, field in type(self).model_fields.items():
            kind = kind_in(field.metadata)
            if kind is not None and not kind.hosted and getattr(self, key) is not None:
                yield key, kind

    def chosen(self, key: str) -> Any:
        """The declaration that a key of this section names, a class."""
        return dict(self.choices())[key].load(getattr(self, key))

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        for key, kind in self.choices():
            declaration = self.chosen(key)
            options = f"{key}_options"
            try:
                checked(declaration.Options, getattr(self, options), f"{kind.key}_options")
            except ValueError as error:
                raise PydanticCustomError("choice", "{line}", {"line": str(error)}) from error
            declaration.check(self)
        return self

"""What every part of the configuration tree is: frozen, typed, and strict about its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from streamrl.choices import Kind, kind_in
from streamrl.config.words import checked

Check = TypeVar("Check", bound=Callable[[Any], None])

_RULE = "is_rule"  # the mark of a rule


def rule(check: Check) -> Check:
    """Marks a method of a section as a rule between its keys: ValueError with lines that begin with a key of it.

    Every rule of a section is asked, once each of its keys holds by itself: what several refuse is told at once.
    """
    setattr(check, _RULE, True)
    return check


class Section(BaseModel):
    """A frozen part of the tree that knows its keys."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

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
    def _choices_and_rules_hold(self) -> Self:
        errors = [*self._refused_choices(), *self._refused_by_rules()]
        if errors:
            details = [InitErrorDetails(type=error, input=self) for error in errors]
            raise ValidationError.from_exception_data(type(self).__name__, details)
        return self

    def _refused_choices(self) -> Iterator[PydanticCustomError]:
        for key, kind in self.choices():
            declaration = self.chosen(key)
            options = f"{key}_options"
            try:
                checked(declaration.Options, getattr(self, options), f"{kind.key}_options")
            except ValueError as error:
                yield from _errors("choice", error)
                continue
            try:
                declaration.check(self)
            except ValueError as error:
                yield from _errors("rule", error)

    def _refused_by_rules(self) -> Iterator[PydanticCustomError]:
        for check in list(vars(type(self)).values()):
            if not getattr(check, _RULE, False):
                continue
            try:
                check(self)
            except ValueError as error:
                yield from _errors("rule", error)


def _errors(kind: str, error: ValueError) -> Iterator[PydanticCustomError]:
    """One for each line."""
    for line in str(error).splitlines():
        yield PydanticCustomError(kind, "{line}", {"line": line})

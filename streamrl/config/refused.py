"""A refusal of what the user has written: one line for each mistake, each complete by itself."""

from __future__ import annotations

from types import TracebackType


class ConfigError(ValueError):
    """A configuration or a command that is refused; each line of its text is a mistake, as the user reads it."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Its mistakes, in a stable order.

        >>> ConfigError("run.steps: 0 is not allowed\\nrun.seed: -1 is not allowed").lines
        ('run.steps: 0 is not allowed', 'run.seed: -1 is not allowed')
        """
        return tuple(line for line in str(self).splitlines() if line)


class Refusals:
    """Gathers what several checks refuse, so that all of it is told at once.

    Example: `with refusals: check_model(config)`, for each check that does not depend on another one, and at the end
    `refusals.tell()`.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> Refusals:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.add(*error.lines)
        return True

    def add(self, *lines: str) -> None:
        """What is said twice is told once."""
        self.lines += [line for line in dict.fromkeys(lines) if line not in self.lines]

    def tell(self) -> None:
        """Raise ConfigError where something was refused."""
        if self.lines:
            raise ConfigError("\n".join(self.lines))

"""What holds for a choice of any kind: every process can load it, quickly, and its options say what they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from streamrl import choices
from streamrl.choices import Kind


class Conformance:
    """The tests of every kind. A subclass gives the kind; the user's own, the name."""

    kind: ClassVar[Kind]
    name: ClassVar[str]  # as the configuration has it: built in, `package.module:Class` or `path/file.py:Class`

    @property
    def declaration(self) -> Any:
        return self.kind.load(self.name)

    def test_every_process_can_load_it_without_torch(self) -> None:
        code = (
            f"import sys; from streamrl import choices\n"
            f"kind = next(kind for kind in choices.KINDS if kind.key == {self.kind.key!r})\n"
            f"kind.load({absolute(self.name)!r})\n"
            f"assert 'torch' not in sys.modules, 'the declaration imports torch: import it inside a method'"
        )
        environment = {"PYTHONPATH": ":".join(path or "." for path in sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr

    def test_it_says_in_a_line_what_it_is(self) -> None:
        assert (self.declaration.__doc__ or "").strip(), (
            "the class has no docstring: the reference shows its first line"
        )

    @property
    def options(self) -> type[BaseModel]:
        assert issubclass(self.declaration.Options, choices.Options)
        return self.declaration.Options

    def test_its_options_say_what_they_are(self) -> None:
        for option, field in self.options.model_fields.items():
            assert field.description, f"option {option} has no description"


def absolute(name: str) -> str:
    """The name of a choice, with an absolute path where it names a class in a file."""
    where, _, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else name

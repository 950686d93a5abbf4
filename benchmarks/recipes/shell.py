"""What a launch script would run, without running it: its variables and commands, each character with its line.

A small part of bash: assignments, arrays, `${NAME:-default}`, arithmetic, quotes, `if`, `source`. What a loop does is
left out, and what else a command would print is empty. A value keeps the line on which it was written:

>>> script = read('LR=${LR:-1e-6}\\npython train.py \\\\\\n  --lr $LR\\n', "run.sh")
>>> [(plain(word), word[0].line) for word in script.commands[0]]
[('python', 2), ('train.py', 2), ('--lr', 3), ('1e-6', 1)]
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from bisect import bisect_right
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.recipes.words import ASSIGNMENT, NAME, Token, piece_end, tokens


class Glyph(NamedTuple):
    """One character and where it was written."""

    char: str
    path: str
    line: int


Text = list[Glyph]
Value = Text | list[Text]  # of a variable, or of an array

SEPARATORS = {"\n", ";", "&"}
PARAMETER = re.compile(rf"({NAME}|[@*#]|\d+)(\[[@*\d]+\])?")
COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": lambda left, right: int(left) == int(right),
    "-ne": lambda left, right: int(left) != int(right),
}
ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class ShellError(ValueError):
    """A script says something that is not read here; the message begins with path:line."""


@dataclass
class Script:
    """What a script leaves: the values of its variables, and the words of its commands in their order."""

    variables: dict[str, Value] = field(default_factory=dict)
    commands: list[list[Text]] = field(default_factory=list)


def plain(text: Text) -> str:
    """The characters alone."""
    return "".join(glyph.char for glyph in text)


def one_text(value: Value) -> Text:
    """The text of a variable; nothing for an array."""
    return [glyph for glyph in value if isinstance(glyph, Glyph)]


def written(text: str, path: str = "", line: int = 0) -> Text:
    """`text` as if it were written on one line."""
    return [Glyph(char, path, line) for char in text]


def read(
    source: str,
    path: str,
    variables: dict[str, Value] | None = None,
    *,
    fixed: Container[str] = (),
    files: Callable[[str], str | None] = lambda path: None,
) -> Script:
    """Follow the script `source` of the file `path`, beginning with `variables`.

    Assignments to the names of `fixed` are skipped. `files` gives the text of a file that is sourced, or None.
    Raises ShellError for what is not read.
    """
    script = Script(dict(variables or {}))
    _Reader(source, path, script, fixed, files).run()
    return script


class _Fields:
    """The words that one word of a script becomes."""

    def __init__(self) -> None:
        self.words: list[Text] = []
        self.open = False

    def add(self, text: Text) -> None:
        if not self.open:
            self.words.append([])
            self.open = True
        self.words[-1].extend(text)

    def add_split(self, text: Text) -> None:
        for glyph in text:
            if glyph.char.isspace():
                self.open = False
            else:
                self.add([glyph])

    def add_value(self, value: Value, add: Callable[[Text], None]) -> None:
        """Add a text by `add`, or each text of an array as a word of its own."""
        texts = [each for each in value if isinstance(each, list)]
        if not texts:
            add(one_text(value))
        for place, text in enumerate(texts):
            self.open = self.open and place == 0
            self.add(text)


class _Reader:
    def __init__(
        self, text: str, path: str, script: Script, fixed: Container[str], files: Callable[[str], str | None]
    ) -> None:
        self.text, self.path, self.script, self.fixed, self.files = text, path, script, fixed, files
        self.line_starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self.tokens = list(tokens(text, 0, len(text)))
        self.at = 0
        self.status = True  # of the last command
        script.variables["BASH_SOURCE"] = written(path)

    def run(self) -> None:
        self._block((), live=True)

    # statements

    def _block(self, stop: tuple[str, ...], *, live: bool) -> str:
        """Follow statements up to a keyword of `stop`, which is given back; without `live` they are passed over."""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            word = self.text[token.start : token.end]
            if token.operator in SEPARATORS:
                self.at += 1
            elif word in stop:
                self.at += 1
                return word
            elif word == "if":
                self.at += 1
                self._if(live)
            elif word in ("for", "while", "until"):
                self.at += 1
                self._block(("done",), live=False)
            elif word in ("case", "function", "select") or token.operator:
                raise self._error(token.start, f"`{word}` is not read")
            else:
                self._pipeline(live)
        if stop:
            raise self._error(len(self.text) - 1, f"`{stop[-1]}` is missing")
        return ""

    def _if(self, live: bool) -> None:
        taken, word = False, "elif"
        while word == "elif":
            self._block(("then",), live=live and not taken)
            chosen = live and not taken and self.status
            word = self._block(("elif", "else", "fi"), live=chosen)
            taken = taken or chosen
        if word == "else":
            self._block(("fi",), live=live and not taken)

    def _pipeline(self, live: bool) -> None:
        self._command(live)
        while self.at < len(self.tokens) and (joint := self.tokens[self.at].operator) in ("&&", "||", "|"):
            self.at += 1
            self._command(live and self.status is (joint == "&&") and joint != "|")

    def _command(self, live: bool) -> None:
        begin = self.at
        while self.at < len(self.tokens) and not self.tokens[self.at].operator:
            self.at += 1
        if begin == self.at:
            raise self._error(self.tokens[min(begin, len(self.tokens) - 1)].start, "a command is missing")
        if not live:
            return
        words = self.tokens[begin : self.at]
        if self.text[words[0].start : words[0].end] in ("export", "local", "readonly", "declare"):
            words = words[1:]
        while words and (found := ASSIGNMENT.match(self.text, words[0].start, words[0].end)):
            self._assign(found, words.pop(0))
        self.status = True
        if command := [text for word in words for text in self._expand(word.start, word.end).words]:
            self._call(command, words[0].start)

    def _call(self, command: list[Text], start: int) -> None:
        name, *arguments = map(plain, command)
        if name in ("[", "[[", "test"):
            self.status = self._test([word for word in arguments if word not in ("]", "]]")], start)
        elif name in ("true", "false", ":"):
            self.status = name != "false"
        elif name in ("source", "."):
            path = posixpath.normpath(arguments[0])
            if (text := self.files(path)) is None:
                raise self._error(start, f"{path} is sourced and not there")
            _Reader(text, path, self.script, self.fixed, self.files).run()
            self.script.variables["BASH_SOURCE"] = written(self.path)
        else:
            self.script.commands.append(command)

    def _test(self, words: list[str], start: int) -> bool:
        match words:
            case [left, sign, right] if sign in COMPARISONS:
                return COMPARISONS[sign](left, right)
            case ["-f" | "-d" | "-e", path]:
                return self.files(posixpath.normpath(path)) is not None
            case ["-n" | "-z" as sign, *rest]:
                return any(rest) is (sign == "-n")
        raise self._error(start, f"the test `{' '.join(words)}` is not read")

    def _assign(self, found: re.Match[str], word: Token) -> None:
        name, at, variables = found[1], found.end(), self.script.variables
        value: Value
        if self.text.startswith("(", at):
            inner = tokens(self.text, at + 1, word.end - 1)
            value = [each for item in inner if not item.operator for each in self._expand(item.start, item.end).words]
        else:
            value = self._joined(at, word.end)
        if name not in self.fixed:
            variables[name] = [*variables.get(name, []), *value] if found[2] else value

    # expansions

    def _joined(self, start: int, end: int) -> Text:
        """What is written from `start` to `end`, as one text that is not split."""
        return [glyph for word in self._expand(start, end, quoted=False, split=False).words for glyph in word]

    def _expand(self, at: int, end: int, *, quoted: bool = False, split: bool = True) -> _Fields:
        fields = _Fields()
        self._expand_into(fields, at, end, quoted=quoted, split=split)
        return fields

    def _expand_into(self, fields: _Fields, at: int, end: int, *, quoted: bool, split: bool) -> None:
        while at < end:
            stop = min(piece_end(self.text, at), end) if self.text[at] in "\\$" or not quoted else at + 1
            if self.text[at] == "$":
                stop = self._expand_variable(fields, at, split=split and not quoted)
            elif self.text.startswith("\\\n", at):
                pass
            elif self.text[at] == "\\" and (not quoted or self.text[at + 1] in '$`"\\'):
                fields.add(self._literal(at + 1, stop))
            elif self.text[at] == "'" and not quoted:
                fields.add(self._literal(at + 1, stop - 1))
            elif self.text[at] == '"' and not quoted:
                fields.add([])
                self._expand_into(fields, at + 1, stop - 1, quoted=True, split=split)
            else:
                fields.add(self._literal(at, stop))
            at = stop

    def _expand_variable(self, fields: _Fields, at: int, *, split: bool) -> int:
        """Add the expansion of the `$` at `at`. Returns where it ends."""
        add = fields.add_split if split else fields.add
        end = piece_end(self.text, at)
        if self.text.startswith("$((", at):
            add(written(str(self._arithmetic(at + 3, end - 2)), self.path, self._line(at)))
        elif self.text.startswith("$(", at):
            add(self._output(at + 2, end - 1))
        elif self.text.startswith("${", at):
            fields.add_value(self._parameter(at + 2, end - 1), add)
        elif (found := PARAMETER.match(self.text, at + 1)) is None:
            fields.add(self._literal(at, end))
        else:
            end = at + 1 + len(found[1])
            fields.add_value(self._value(found[1]), add)
        return end

    def _parameter(self, at: int, end: int) -> Value:
        found = PARAMETER.match(self.text, at, end)
        if found is None:
            raise self._error(at, f"`${{{self.text[at:end]}}}` is not read")
        value, rest, at = self._value(found[1]), self.text[found.end() : end], found.end()
        if not rest or found[1] in ("@", "*"):
            return value
        default, alternative = re.match(r":?-", rest), re.match(r":?\+", rest)
        if default:
            return value or self._joined(at + default.end(), end)
        if alternative:
            return self._joined(at + alternative.end(), end) if value else []
        raise self._error(at, f"`${{{self.text[found.start() : end]}}}` is not read")

    def _value(self, name: str) -> Value:
        return self.script.variables.get(name, [])

    def _output(self, start: int, end: int) -> Text:
        """What a command prints, as far as it is about the names of files."""
        words = [each for item in tokens(self.text, start, end) for each in self._expand(item.start, item.end).words]
        functions = {"basename": posixpath.basename, "dirname": posixpath.dirname}
        if len(words) == 2 and (function := functions.get(plain(words[0]))):
            return written(function(plain(words[1])), self.path, self._line(start))
        return []

    def _arithmetic(self, start: int, end: int) -> int:
        expression = re.sub(rf"\$\{{?({NAME})\}}?", r"\1", self.text[start:end]).strip()

        def value(node: ast.expr) -> int:
            match node:
                case ast.Constant(int(number)):
                    return number
                case ast.Name(name):
                    return int(plain(one_text(self._value(name))) or 0)
                case ast.BinOp(left, sign, right) if type(sign) in ARITHMETIC:
                    return ARITHMETIC[type(sign)](value(left), value(right))
            raise self._error(start, f"`{expression}` is not read")

        try:
            return value(ast.parse(expression, mode="eval").body)
        except SyntaxError:
            raise self._error(start, f"`{expression}` is not read") from None

    # places

    def _literal(self, start: int, end: int) -> Text:
        return [Glyph(self.text[at], self.path, self._line(at)) for at in range(start, min(end, len(self.text)))]

    def _line(self, at: int) -> int:
        return bisect_right(self.line_starts, at)

    def _error(self, at: int, message: str) -> ShellError:
        return ShellError(f"{self.path}:{self._line(at)}: {message}")

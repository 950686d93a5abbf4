"""Where the words of a shell script begin and end: quotes, expansions and lists are one piece."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
OPERATOR = re.compile(r"\n|;;|;|&&|\|\||\||\d*<<|\d*[<>]{1,2}&?\d*|&|\(|\)")


class Token(NamedTuple):
    """A word or an operator, from `start` to before `end`."""

    operator: str  # empty: a word
    start: int
    end: int


def tokens(text: str, at: int, end: int) -> Iterator[Token]:
    """The words and operators from `at` to `end`; comments, redirections and here-documents are left out."""
    heredoc = ""
    while at < end:
        if text[at] in " \t\r" or text.startswith("\\\n", at):
            at += 1 if text[at] != "\\" else 2
        elif text[at] == "#":
            at = _find(text, "\n", at)
        elif (found := OPERATOR.match(text, at)) is None:
            start, at = at, _word_end(text, at)
            yield Token("", start, at)
        else:
            at = found.end()
            if found[0].endswith("<<"):
                word = re.compile(r"\s*['\"]?(\w+)['\"]?").match(text, at)
                heredoc, at = (word[1], word.end()) if word else ("", at)
            elif "<" in found[0] or ">" in found[0]:
                at = at if found[0][-1].isdigit() else _word_end(text, at + len(text[at:]) - len(text[at:].lstrip(" ")))
            else:
                yield Token(found[0], found.start(), at)
            if found[0] == "\n" and heredoc:
                closing = re.compile(rf"^{heredoc}$", re.MULTILINE).search(text, at)
                at, heredoc = (closing.end() if closing else end), ""


def _find(text: str, char: str, at: int) -> int:
    found = text.find(char, at)
    return len(text) if found < 0 else found


def _word_end(text: str, start: int) -> int:
    at = start
    while at < len(text):
        if text[at] == "(" and ASSIGNMENT.fullmatch(text, start, at):
            at = _list_end(text, at + 1)
        elif text[at] in " \t\n;&|<>()":
            break
        else:
            at = piece_end(text, at)
    return at


def piece_end(text: str, at: int) -> int:
    """The end of one character, or of what is quoted or expanded there."""
    if text[at] == "\\":
        return at + 2
    if text[at] == "'":
        return _find(text, "'", at + 1) + 1
    if text[at] == '"':
        return _enclosed(text, at + 1, '"', quotes="")
    if text.startswith("$(", at):
        return _enclosed(text, at + 2, ")", quotes="'\"")
    if text.startswith("${", at):
        return _enclosed(text, at + 2, "}", quotes="'\"")
    return at + 1


def _enclosed(text: str, at: int, closer: str, quotes: str) -> int:
    """The end of what began before `at` and goes to `closer`."""
    while at < len(text) and text[at] != closer:
        if text[at] == "(" and closer == ")":
            at = _enclosed(text, at + 1, ")", quotes)
        elif text[at] in "\\$" or text[at] in quotes:
            at = piece_end(text, at)
        else:
            at += 1
    return at + 1


def _list_end(text: str, at: int) -> int:
    for token in tokens(text, at, len(text)):
        if token.operator == ")":
            return token.end
    return len(text)

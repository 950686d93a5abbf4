"""Images of prompts: they travel by reference, as a path or a URL, and have their place in the question's text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streamrl.images import write_named
from streamrl.tasks.environment import Message

# What marks the place of an image in the question's text.
PLACE = "<image>"


def image_references(value: Any, *, beside: Path, folder: Path) -> tuple[str, ...]:
    """The paths and URLs of a row's images: one or a list of paths, URLs, or mappings of `bytes` and `path`.

    beside: the folder that relative paths start from. folder: where images that are bytes are written, each once,
    named by its content; servers read them there.
    Raises ValueError for what is no image.
    """
    entries = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(_reference(entry, beside, folder) for entry in entries)


def with_images(messages: Sequence[Message], count: int) -> tuple[Message, ...]:
    """The messages with `count` images at the places that their texts mark by `<image>`, in order.

    Without any mark they come before the text of the last message. Raises ValueError where the marks are not as
    many as the images.
    """
    texts = [marked_text(message) for message in messages]
    marks = sum(text.count(PLACE) for text in texts)
    if not marks and count:
        texts[-1] = PLACE * count + texts[-1]
    elif marks != count:
        raise ValueError(f"{marks} marks {PLACE} for {count} images; allowed: as many, or none")
    return tuple(
        {**message, "content": _parts(text)} if PLACE in text else message
        for message, text in zip(messages, texts, strict=True)
    )


def marked_text(message: Message) -> str:
    """The text of a message, with a mark where its content has an image among its parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(PLACE if part.get("type") == "image" else part.get("text") or "" for part in content)


def _parts(text: str) -> list[dict[str, Any]]:
    """As chat templates of vision-language models take them."""
    parts: list[dict[str, Any]] = []
    for place, piece in enumerate(text.split(PLACE)):
        parts += [{"type": "image"}] if place else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _reference(entry: Any, beside: Path, folder: Path) -> str:
    if isinstance(entry, dict) and entry.get("bytes"):
        return str(write_named(entry["bytes"], folder))
    if isinstance(entry, dict):
        entry = entry.get("path")
    if not isinstance(entry, str) or not entry:
        raise ValueError(f"{entry!r:.80} is no image; allowed: a path, a URL, or a mapping with its bytes")
    if urlsplit(entry).scheme in ("http", "https"):
        return entry
    path = (beside / entry).resolve()
    if not path.is_file():
        raise ValueError(f"image {path} does not exist; allowed: a path beside the data, or a URL")
    return str(path)

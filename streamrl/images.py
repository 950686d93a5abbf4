"""Encoded images: of which kind they are, how large, by which name their files are known, how a small one is drawn."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import zlib
from pathlib import Path

import numpy as np

from streamrl.whole_files import write_whole

# First bytes and endings of the formats that servers read; they know them by their endings.
_KINDS = {b"\x89PNG": ".png", b"\xff\xd8": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}
_MEDIA = {".png": "image/png", ".jpg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}


def kind_of(file: bytes) -> str:
    """The ending of an encoded image: .png, .jpg, .gif or .webp. Raises ValueError for any other file."""
    kind = next((kind for start, kind in _KINDS.items() if file.startswith(start)), None)
    if kind is None:
        raise ValueError(f"image bytes begin with {file[:4]!r}; allowed: PNG, JPEG, GIF, WebP")
    return kind


def digest(file: bytes) -> str:
    """The name of a content: the first 32 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(file).hexdigest()[:32]


def file_name(file: bytes) -> str:
    """By the content. Raises ValueError as `kind_of`."""
    return f"{digest(file)}{kind_of(file)}"


def data_url(file: bytes) -> str:
    """The file itself as a URL (RFC 2397). Raises ValueError as `kind_of`."""
    return f"data:{_MEDIA[kind_of(file)]};base64,{base64.b64encode(file).decode()}"


def write_named(file: bytes, folder: Path) -> Path:
    """The file of an image in `folder`: whole or not there, also if others write it. Raises ValueError for no image."""
    path = folder.resolve() / file_name(file)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, file)
    return path


def content_of(url: str) -> bytes:
    """The file that a data URL is. Raises ValueError for one that is none."""
    head, _, content = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise ValueError(f"{head[:40]!r} is no file in base64; allowed: data:image/png;base64,...")
    return base64.b64decode(content, validate=True)


def size_of(file: bytes) -> tuple[int, int]:
    """Width and height in pixels, by the file's first bytes alone. Raises ValueError for what is no image."""
    from PIL import Image, UnidentifiedImageError

    kind_of(file)
    try:
        with Image.open(io.BytesIO(file)) as image:
            return image.size
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"an image of {len(file)} bytes cannot be read: {error}") from None


def png(pixels: np.ndarray) -> bytes:
    """The PNG of pixels uint8 [height, width, 3], without filters (W3C PNG).

    >>> size_of(png(np.zeros((2, 3, 3), np.uint8)))
    (3, 2)
    """
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a row names its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red green blue
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

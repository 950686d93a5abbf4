"""The images of prompts as a worker has them: read once, counted in tokens, and the same for server and learner.

    reference ─▶ file ─▶ tokens, by the image processor of the model's folder ─▶ prompt ids with a token for each
                   ├▶ server, as it is and not by its reference
                   └▶ learner, with the group

A chat template writes one token where an image is; the model has as many there as the image has merged patches. What a
task, the learner and all limits see are the latter; a server is asked with the former, and makes the same of them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from streamrl.images import content_of, data_url, digest, size_of

# Seconds that the download of one image may take.
FETCH_TIMEOUT = 30.0

# Bytes of files that a worker keeps, those that were asked for last, and references whose content it remembers.
KEPT_BYTES, REMEMBERED = 1 << 28, 1 << 16


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image. Example: a PNG of 56 x 56 pixels is 4 tokens of Qwen2.5-VL."""

    file: bytes  # as it is encoded
    tokens: int
    url: str  # the file itself, as a server takes it


@dataclass(slots=True)
class PromptImages:
    """The images of one model's prompts.

    Usage:
        images = PromptImages.of(folder, limit=1 << 24)
        found = await images.load(("a.png",))
        images.expanded(ids, found)
    """

    counter: ImageTokens
    limit: int  # bytes of the images of one prompt
    _kept: OrderedDict[str, PromptImage] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _seen: OrderedDict[str, str] = field(default_factory=OrderedDict)  # reference -> digest

    @classmethod
    def of(cls, model: Path, limit: int) -> PromptImages | None:
        """Those of a folder with a vision-language model whose images are grids of patches; None for any other."""
        counter = ImageTokens.of(model)
        return None if counter is None else cls(counter, limit)

    async def load(self, references: Sequence[str]) -> tuple[PromptImage, ...]:
        """The images of one prompt.

        Raises ValueError, in one line, for what cannot be read, is no image, or has changed since it was read before.
        """
        found = tuple([await self._load(reference) for reference in references])
        total = sum(len(image.file) for image in found)
        if total > self.limit:
            raise ValueError(f"its images have {total:,} bytes; allowed: up to task.max_image_bytes={self.limit}")
        return found

    def has_places(self, ids: np.ndarray) -> bool:
        return bool((ids == self.counter.token).any())

    def expanded(self, ids: np.ndarray, images: Sequence[PromptImage]) -> np.ndarray:
        """int32 [P]: with as many tokens in each image's place as it has.

        Raises ValueError unless there are as many places as images.
        """
        places = np.flatnonzero(ids == self.counter.token)
        if len(places) != len(images):
            raise ValueError(f"the prompt has {len(places)} places for {len(images)} images")
        counts = np.ones(len(ids), np.int64)
        counts[places] = [image.tokens for image in images]
        return np.repeat(ids, counts)

    def collapsed(self, ids: np.ndarray, images: Sequence[PromptImage]) -> np.ndarray:
        """int32: what `expanded` was given; what follows the prompt, as any answer, stays as it is.

        Raises ValueError where the images' tokens are not there.
        """
        places = np.flatnonzero(ids == self.counter.token)
        kept, first = np.ones(len(ids), np.bool_), 0
        for number, image in enumerate(images):
            own = places[first : first + image.tokens]
            if len(own) < image.tokens or own[-1] - own[0] != image.tokens - 1:
                raise ValueError(f"image {number} has {image.tokens} tokens, and these ids not so many in a row there")
            kept[own[1:]] = False
            first += image.tokens
        return ids[kept]

    def wrong(self, ids: np.ndarray, images: Sequence[PromptImage]) -> str | None:
        """Why prompt ids [P] are not those of a prompt with these images; None where they are."""
        there, needed = np.count_nonzero(ids == self.counter.token), sum(image.tokens for image in images)
        if there == needed:
            return None
        return f"a prompt with {there} image tokens, and its {len(images)} images have {needed}"

    async def _load(self, reference: str) -> PromptImage:
        if (image := self._kept.get(reference)) is not None:
            self._kept.move_to_end(reference)
            return image
        try:
            file = await self._file(reference)
            # The first count loads the image processor.
            tokens = await asyncio.to_thread(self.counter.count, file)
            image = PromptImage(file, tokens, data_url(file))
        except (OSError, ValueError, aiohttp.ClientError, TimeoutError) as error:
            told = str(error) or f"not there in {FETCH_TIMEOUT:g} seconds"
            raise ValueError(f"image {reference:.80}: {told}") from error
        self._check_content(reference, file)
        self._keep(reference, image)
        return image

    async def _file(self, reference: str) -> bytes:
        scheme = urlsplit(reference).scheme
        if scheme == "data":
            return self._small(content_of(reference))
        if scheme in ("http", "https"):
            return await self._fetched(reference)
        return await asyncio.to_thread(self._read, reference)

    def _check_content(self, reference: str, file: bytes) -> None:
        if reference.startswith("data:"):  # it is the content, which is not worth remembering
            return
        content = digest(file)
        before = self._seen.setdefault(reference, content)
        if before != content:
            raise ValueError(f"image {reference:.80}: it has changed, from {before} to {content} (SHA-256)")
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def _keep(self, reference: str, image: PromptImage) -> None:
        if reference not in self._kept:
            self._kept[reference] = image
            self._bytes += _held(reference, image)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= _held(*self._kept.popitem(last=False))

    def _read(self, path: str) -> bytes:
        with Path(path).open("rb") as file:
            return self._small(file.read(self.limit + 1))

    async def _fetched(self, url: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            response.raise_for_status()
            content = b""
            while len(content) <= self.limit and (some := await response.content.read(1 << 16)):
                content += some
        return self._small(content)

    def _small(self, file: bytes) -> bytes:
        if len(file) > self.limit:
            raise ValueError(f"more bytes than task.max_image_bytes={self.limit}")
        return file


@dataclass
class ImageTokens:
    """How many tokens an image is: its patches, merged in squares."""

    model: Path
    token: int  # id of each of them
    merge: int  # side of a square of patches that become one token
    _lock: threading.Lock = field(default_factory=threading.Lock)  # the processor is loaded once

    @classmethod
    def of(cls, model: Path) -> ImageTokens | None:
        """As the folder's config.json says; None where it does not."""
        config = model / "config.json"
        told: dict[str, Any] = json.loads(config.read_text()) if config.exists() else {}
        token, merge = told.get("image_token_id"), (told.get("vision_config") or {}).get("spatial_merge_size")
        return cls(model, token, merge) if isinstance(token, int) and isinstance(merge, int) else None

    def count(self, file: bytes) -> int:
        """Raises ValueError for what is no image, and OSError where the folder has no image processor."""
        width, height = size_of(file)
        with self._lock:
            processor = self._processor
        patches: int = processor.get_number_of_image_patches(height, width, {})
        return patches // self.merge**2

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self.model)


def _held(reference: str, image: PromptImage) -> int:
    return len(reference) + len(image.file) + len(image.url)

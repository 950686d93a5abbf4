"""Pieces of a streamed answer that an adapter gives: its version is on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from streamrl.engine.answers import Answer, FinishReason, Piece, PieceMeta
from streamrl.generate.adapters import AdapterPolicy, Adapters
from streamrl.types import PolicyVersion

V1 = PolicyVersion(1)


class Server:
    """One that streams two pieces, and stamps them with the version of its base weights."""

    async def generate(
        self, *request: Any, adapter: str | None, pieces: Callable[[Piece], None], **options: Any
    ) -> list[Answer]:
        for tokens, end in ((2, None), (3, FinishReason("stop"))):
            meta = PieceMeta(id="a", finish_reason=end, completion_tokens=tokens, weight_version="0.0")
            pieces(Piece(output_ids=[7] * tokens, meta_info=meta))
        return []


def test_the_pieces_of_an_adapter_have_its_version():
    adapters = Adapters(PolicyVersion(0))
    adapters.loaded(V1)
    told: list[Piece] = []
    asyncio.run(AdapterPolicy(Server(), adapters).generate([1], {}, 1, pieces=told.append))
    assert [piece.meta_info.weight_version for piece in told] == ["1.0", "1.0"]
    spans = [[(span.version, span.start, span.end) for span in piece.meta_info.weight_versions] for piece in told]
    assert spans == [[], [("1.0", 0, 3)]]

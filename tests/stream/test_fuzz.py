"""A short fuzz run of the decoders, so that the long one (`benchmarks/fuzz_decoder.py`) starts from green."""

from __future__ import annotations

import pytest

from benchmarks import fuzz_decoder


def test_damaged_messages_are_read_or_refused_and_memory_stays_flat() -> None:
    outcomes, resident = fuzz_decoder.fuzz(20_000, seed=1)
    assert outcomes.total() == 20_000
    assert min(outcomes[kind] for kind in ("message", "group", "batch")) > 100  # good ones came through
    assert outcomes["refused"] > 10_000
    assert resident[-1] - resident[0] < fuzz_decoder.GROWTH


def test_a_crash_of_the_decoder_is_told_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frames: object) -> str:
        raise IndexError

    monkeypatch.setattr(fuzz_decoder, "feed", broken)
    with pytest.raises(RuntimeError, match="message 0 of --seed 1"):
        fuzz_decoder.fuzz(10, seed=1)

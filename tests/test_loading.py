"""What is loaded without garbage collections, and what is collected afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from streamrl.loading import without_collections


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The phases of all collections from now on."""
    found: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        found.append(phase)

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.unfreeze()


def cycles(count: int) -> None:
    for _ in range(count):
        link: list[object] = []
        link.append(link)


def test_nothing_is_collected_while_modules_are_loaded_and_all_is_afterwards(collections):
    before = gc.get_freeze_count()
    with without_collections():
        collections.clear()
        cycles(20_000)
        assert collections == []
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
    cycles(20_000)
    assert collections


def test_what_is_there_is_never_collected_again_where_that_is_said(collections):
    before = gc.get_freeze_count()
    with without_collections(for_good=True):
        cycles(1)
    assert gc.get_freeze_count() > before
    assert gc.isenabled()


def test_collections_that_were_off_stay_off_and_an_import_that_fails_leaves_them_on(collections):
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

"""No token is masked."""

from __future__ import annotations

from streamrl.algo.masks.base import Mask


class NoMask(Mask):
    """No token is masked."""

    acts = False

"""Tiles so small that a few tokens are many of them."""

from __future__ import annotations

import pytest

from normattn.kernels import tiled


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 8)
    monkeypatch.setattr(tiled, "TILE_BYTES", 20000)

"""Tiles cover every query of every head once, see what they must, and keep to their size."""

from __future__ import annotations

import itertools

import pytest
import torch

from normattn import attention
from normattn.kernels import Visibility, tiles
from score.cases import tensors


def _visibility(queries: int, keys: int, causal: bool, aligned: bool) -> Visibility:
    key = torch.arange(keys)
    return Visibility(causal, key[keys - queries :], key, aligned)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("budget", [1, 300, 700, 5000])
def test_every_pair_is_in_one_tile(
    window: int | None, aligned: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "ROWS", 3)
    monkeypatch.setattr(tiles, "TILE_BYTES", budget)
    for batch, heads, queries, more in itertools.product((1, 3), (1, 4), (1, 3, 7), (0, 2)):
        keys = queries + more
        q = torch.zeros(batch, heads, queries, 2)
        seen = torch.zeros(batch, heads, queries, keys, dtype=torch.int64)
        for tile in tiles.tiles(q, keys, window, _visibility(queries, keys, True, aligned)):
            part = seen[tile.queries]
            near, far = part[..., tile.near_start : tile.end], part[..., : tile.far_end]
            assert part[..., 0].numel() <= 3 * batch * heads
            size = part[..., : tile.end].numel() * q.element_size()
            assert size <= budget or part.shape[:2] == (1, 1)
            rows = torch.arange(queries)[tile.rows, None] + more
            distance = rows - torch.arange(keys)
            limit = keys if window is None else window
            near += (distance < limit)[:, tile.near_start : tile.end]
            far += (distance >= limit)[:, : tile.far_end]
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(more)
        assert (seen[..., visible] == 1).all()


def test_a_device_is_filled_and_half_precision_gets_more_rows() -> None:
    def rows(q: torch.Tensor) -> set[int]:
        where = _visibility(1024, 1024, True, True)
        return {tile.rows.stop - tile.rows.start for tile in tiles.tiles(q, 1024, None, where)}

    assert rows(torch.zeros(1, 1, 1024, 2)) == {tiles.ROWS}
    assert rows(torch.zeros(1, 1, 1024, 2, dtype=torch.bfloat16)) == {tiles.HALF_ROWS}
    assert rows(torch.zeros(1, 1, 1024, 2, device="meta")) == {tiles.DEVICE_ROWS}


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (0, 0), (3, 0)])
def test_nothing_to_attend_to(backend: str, queries: int, keys: int) -> None:
    q, k, v = tensors((1, 2, queries, 4), (1, 2, keys, 4), (1, 2, keys, 4))
    out = attention(q, k, v, "KNA", causal=False, backend=backend)
    assert out.shape == (1, 2, queries, 4)
    assert (out == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all((grad == 0).all() for grad in grads)

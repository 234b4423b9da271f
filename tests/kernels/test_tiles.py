"""Tiles cover every query of every head once, see what they must, and keep to their size."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from normattn import attention
from normattn.kernels import AttentionInputs, AttentionMask, tiled
from normattn.kernels.tiled import Plan
from score.cases import tensors


def _problem(
    q: torch.Tensor,
    keys: int,
    causal: bool = True,
    aligned: bool = True,
    window: int | None = None,
    heads: int | None = None,
) -> AttentionInputs:
    key = torch.arange(keys)
    k = q.new_zeros(q.shape[0], heads or q.shape[1], keys, q.shape[3])
    far = None if window is None else k
    seen = AttentionMask(causal, key[keys - q.shape[2] :], key, aligned)
    return AttentionInputs(q, k, k, seen, None if window is None else q, far, window)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sliding", [(None, 0), (2, 0), (3, 1), (5, 2), (2, 9)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_pair_is_in_one_span(
    window: int | None,
    sliding: tuple[int | None, int],
    causal: bool,
    aligned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A visible pair is in exactly one span of its regime within the span's bounds."""
    monkeypatch.setattr(tiled, "ROWS", 3)
    for queries, more in itertools.product((1, 3, 7), (0, 2, 9)):
        keys = queries + more
        problem = _problem(torch.zeros(1, 1, queries, 2), keys, causal, aligned, window)
        seen = replace(problem.visibility, window=sliding[0], kept=sliding[1])
        plan = Plan.of(replace(problem, visibility=seen))
        distance = torch.arange(more, keys)[:, None] - torch.arange(keys)
        found = torch.zeros(2, queries, keys, dtype=torch.int64)
        for tile in plan.tiles:
            for span in tile.spans:
                part = distance[tile.rows, span.columns]
                inside = torch.ones_like(part, dtype=torch.bool)
                if span.lowest is not None:
                    inside &= part >= span.lowest
                if span.highest is not None:
                    inside &= part <= span.highest
                found[int(span.far), tile.rows, span.columns] += inside
        hidden = seen.hidden(slice(None), slice(None))
        visible = ~hidden if hidden is not None else torch.ones_like(distance, dtype=torch.bool)
        far = distance >= window if window is not None else torch.zeros_like(visible)
        assert (found[0][visible & ~far] == 1).all()
        assert (found[1][visible & far] == 1).all()
        if aligned:
            assert (found[0][~visible | far] == 0).all()
            assert (found[1][~visible | ~far] == 0).all()


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("budget", [1, 300, 700, 5000])
def test_groups_hold_every_head_once_within_the_budget(
    budget: int, repeat: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(tiled, "TILE_BYTES", budget)
    for batch, heads, queries, more in itertools.product((1, 3), (1, 4), (1, 3, 7), (0, 2)):
        q = torch.zeros(batch, heads * repeat, queries, 2)
        plan = Plan.of(_problem(q, queries + more, heads=heads))
        found = torch.zeros(batch, heads)
        for group in plan.groups(q):
            part = found[group.batch, group.heads]
            part += 1
            for tile in plan.tiles:
                rows = (tile.rows.stop - tile.rows.start) * repeat
                size = part.numel() * rows * tile.width * q.element_size()
                assert rows <= 4
                assert size <= budget or part.numel() == 1
        assert (found == 1).all()


def test_a_sliding_window_costs_its_width() -> None:
    q = torch.zeros(1, 1, 4096, 2)
    problem = _problem(q, 4096)
    seen = replace(problem.visibility, window=100, kept=4)
    plan = Plan.of(replace(problem, visibility=seen))
    assert all(tile.width <= 4 + 100 + tiled.ROWS for tile in plan.tiles)


def test_a_decoding_step_touches_each_key_once() -> None:
    q, k, v = tensors((1, 2, 1, 4), (1, 2, 8, 4), (1, 2, 100, 4))
    key = torch.arange(100)
    seen = AttentionMask(True, key[99:], key, aligned=True)
    far_q, far_k = tensors((1, 2, 1, 4), (1, 2, 100, 4))
    (tile,) = Plan.of(AttentionInputs(q, k, v, seen, far_q, far_k, 8, near_start=92)).tiles
    assert {(span.far, span.start, span.stop) for span in tile.spans} == {
        (True, 0, 92),
        (False, 92, 100),
    }


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (0, 0), (3, 0)])
def test_nothing_to_attend_to(backend: str, queries: int, keys: int) -> None:
    q, k, v = tensors((1, 2, queries, 4), (1, 2, keys, 4), (1, 2, keys, 4))
    out = attention(q, k, v, "KNA", causal=False, backend=backend)
    assert out.shape == (1, 2, queries, 4)
    assert (out == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all((grad == 0).all() for grad in grads)

"""Which kernel serves what; refusals by name; the memory that the chunked kernel promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from normattn import InputError, attention
from normattn.kernels import BACKENDS, AttentionInputs, AttentionMask, attend, choose, tiled
from score.cases import tensors

from .memory import largest


def problem(
    queries: int = 5, keys: int = 5, size: int = 4, causal: bool = True, **changes: Any
) -> AttentionInputs:
    q, k, v = tensors((1, 2, queries, 4), (1, 2, keys, 4), (1, 2, keys, size))
    key = torch.arange(keys)
    visibility = AttentionMask(causal, key[keys - queries :], key, aligned=True)
    seen = {name: changes.pop(name) for name in ("padding", "mask", "aligned") if name in changes}
    return replace(AttentionInputs(q, k, v, replace(visibility, **seen)), **changes)


def _step(dtype: torch.dtype, groups: int, keys: int) -> AttentionInputs:
    """One query over many keys."""
    q, k = torch.zeros(1, 2, 1, 4, dtype=dtype), torch.zeros(1, groups, keys, 4, dtype=dtype)
    key = torch.arange(keys)
    return AttentionInputs(q, k, k, AttentionMask(True, key[-1:], key, aligned=True))


PADDING = torch.zeros(1, 5, dtype=torch.bool)
MASK = torch.ones(5, 5, dtype=torch.bool)


def test_the_fastest_that_can() -> None:
    assert choose(problem()).name == "fused"
    assert choose(problem(queries=1)).name == "fused"
    assert choose(_step(torch.float32, 2, 300)).name == "fused"
    assert choose(_step(torch.bfloat16, 2, 300)).name == "fused"
    assert choose(_step(torch.float32, 1, 3000)).name == "chunked"
    assert choose(problem(queries=3, causal=False)).name == "fused"
    assert choose(problem(aligned=False, causal=False)).name == "fused"
    assert choose(problem(queries=3)).name == "chunked"
    assert choose(problem(size=6)).name == "chunked"
    assert choose(problem(padding=PADDING)).name == "chunked"
    assert choose(problem(mask=MASK)).name == "chunked"
    assert choose(problem(aligned=False)).name == "chunked"
    far: dict[str, Any] = {"far_q": problem().q, "far_k": problem().k}
    assert choose(problem(window=2, **far)).name == "two-regime"
    assert (
        choose(problem(window=2, queries=3, far_q=problem(queries=3).q, far_k=problem().k)).name
        == "chunked"
    )
    assert choose(problem(window=2, cap=1.0, **far)).name == "chunked"
    bias = torch.zeros(2, 5, dtype=torch.float64)
    assert choose(problem(bias=bias)).name == "chunked"
    assert choose(problem(bias=bias, cap=1.0)).name == "chunked"
    learning = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    assert choose(problem(mask=learning)).name == "strips"


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown backend 'flash'; expected one of auto, fused"):
        attend(problem(), "flash")
    assert BACKENDS[0] == "auto"
    others = {"residual", "concatenated"}
    named = {"fused", "two-regime", "flex", "chunked", "strips", "reference"}
    assert named | others == {*BACKENDS[1:]}


@pytest.mark.parametrize("name", ["KNA", "KNA-ReRoPE(window=20)"])
@pytest.mark.parametrize("positions", [False, True])
def test_chunks_never_make_the_whole_matrix(
    name: str, positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "ROWS", 8)
    q, k, v = tensors((1, 1, 128, 4), (1, 1, 128, 4), (1, 1, 128, 6))
    where = torch.arange(128) if positions else None
    with largest() as record:
        out = attention(q, k, v, name, backend="chunked", q_positions=where, k_positions=where)
        torch.autograd.grad(out.sum(), (q, k, v))
    # With two regimes the columns where both are near the window are there twice.
    assert record.numel <= 8 * 128 * (2 if positions else 1) + 8 * 8
    with largest() as record:
        attention(q, k, v, name, backend="reference")
    assert record.numel == 128 * 128


def test_two_regimes_touch_the_pairs_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The multiplications of near and far together are about those of one causal attention."""
    monkeypatch.setattr(tiled, "ROWS", 8)
    q, k, v = tensors((1, 1, 256, 4), (1, 1, 256, 4), (1, 1, 256, 4))

    def flops(name: str) -> int:
        with FlopCounterMode(display=False) as counter:
            total = attention(q, k, v, name, backend="chunked").sum()
            total.backward()  # type: ignore[no-untyped-call]
        return int(counter.get_total_flops())

    assert flops("KNA-ReRoPE(window=64)") <= 1.1 * flops("KNA")

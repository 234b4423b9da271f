"""The table of capabilities is what the kernels do: every kernel over a grid of problems."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from normattn import InputError
from normattn.kernels import AttentionInputs, AttentionMask, attend, reasons
from normattn.kernels.dispatch import FEATURES, KERNELS, TABLE
from normattn.kernels.inputs import Selection
from normattn.kernels.reference import reference


class _Places:
    """b(h, i, j) = (i + 1)·sin(j), the same for every head."""

    width = 1

    def part(self, rows: slice) -> _Places:
        return self

    def values(self, score: torch.Tensor, seen: AttentionMask) -> torch.Tensor:
        return (seen.query[:, None] + 1) * seen.key.float().sin()


class _Share:
    """Each score by itself."""

    def weights(self, score: torch.Tensor, seen: AttentionMask) -> torch.Tensor:
        return score.sigmoid()


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": torch.randn(4, 9)},
    "learned bias": {"bias": torch.randn(4, 9, requires_grad=True)},
    "pairs": {"pairs": _Places()},
    "normaliser": {"normaliser": _Share()},
    "selection": {"selection": Selection(torch.zeros(2, 7))},
    "sink": {"sink": torch.randn(4)},
    "cap": {"cap": 2.0},
    "dropout": {"dropout": 0.5},
    "sliding": {"seen": {"window": 2}},
    "kept": {"seen": {"window": 2, "kept": 1}},
    "padding": {"seen": {"padding": torch.tensor([[True] + [False] * 6] * 2)}},
    "mask": {"seen": {"mask": torch.ones(7, 7, dtype=torch.bool)}},
    "learned mask": {"seen": {"mask": torch.zeros(7, 7, requires_grad=True)}},
    "documents": {
        "seen": {
            "query_documents": torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2),
            "key_documents": torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2),
        }
    },
    "irregular": {"seen": {"aligned": False}},
}
SHAPES = {"": (7, 4), "values": (7, 6), "last rows": (3, 4), "one row": (1, 4)}


def _problem(
    change: str, shape: str, two: bool, causal: bool, dtype: torch.dtype = torch.float32
) -> AttentionInputs:
    rows, size = SHAPES[shape]
    seed = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed).to(dtype).requires_grad_()

    key = torch.arange(7)
    changes = dict(CHANGES[change])
    seen = dict(changes.pop("seen", {}))
    if rows < 7:
        for name in ("query_documents", "mask"):
            if name in seen:
                seen[name] = seen[name][..., 7 - rows :] if name != "mask" else seen[name][:rows]
    far = (leaf(2, 4, rows, 4), leaf(2, 2, 7, 4), 3) if two else (None, None, None)
    visibility = replace(AttentionMask(causal, key[7 - rows :], key, True), **seen)
    q, k, v = leaf(2, 4, rows, 4), leaf(2, 2, 7, 4), leaf(2, 2, 7, size)
    return replace(AttentionInputs(q, k, v, visibility, *far), **changes)


GRID = list(itertools.product(CHANGES, SHAPES, (False, True), (False, True)))


def _features_of(problem: AttentionInputs) -> set[str]:
    return {name for name, shown in FEATURES.items() if shown(problem)}


def _served_by(kernel: str, problem: AttentionInputs) -> bool:
    return _features_of(problem) <= TABLE[kernel].serves


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_kernel_serves_what_its_row_says(kernel: Any) -> None:
    """Served problems are computed rightly, with every gradient; the others are refused."""
    for case in GRID:
        problem = _problem(*case)
        reason = kernel.why_not(problem)
        assert (reason is None) == _served_by(kernel.name, problem), (case, reason)
        if reason is not None:
            with pytest.raises(InputError, match=f"the {kernel.name} kernel cannot serve this"):
                attend(problem, kernel.name)
            continue
        out = attend(problem, kernel.name)
        inputs = [x for x in problem.tensors if x is not None and x.requires_grad]
        mine = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
        if problem.dropout:
            continue
        expected = reference(problem)
        hand = torch.autograd.grad(expected.square().sum(), inputs, allow_unused=True)
        torch.testing.assert_close(out, expected, msg=str(case))
        for one, two in zip(mine, hand, strict=True):
            torch.testing.assert_close(one, two, atol=2e-5, rtol=2e-4, msg=str(case))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    for kernel in KERNELS:
        for two in (False, True):
            problem = _problem("plain", "", two, True, dtype)
            if kernel.why_not(problem) is None:
                assert attend(problem, kernel.name).dtype == dtype
            else:
                assert not _served_by(kernel.name, problem)


def test_a_second_derivative_is_given_or_refused_in_words() -> None:
    """Never silently 0. The stock operator's own refusal is a RuntimeError."""
    for kernel in KERNELS:
        for change, two in (("plain", False), ("plain", True), ("bias", False)):
            problem = _problem(change, "", two, True, torch.float64)
            if kernel.why_not(problem) is not None:
                continue
            out = attend(problem, kernel.name).square().sum()

            def twice(out: torch.Tensor = out, q: torch.Tensor = problem.q) -> torch.Tensor:
                (first,) = torch.autograd.grad(out, q, create_graph=True)
                return torch.autograd.grad(first.square().sum(), q)[0]

            if "second derivative" in kernel.gives:
                assert twice().abs().max() > 0
                continue
            with pytest.raises((InputError, RuntimeError), match=r"second deriv|not implemented"):
                twice()


def test_every_feature_is_in_the_grid_or_tested_elsewhere() -> None:
    met = set().union(*(_features_of(_problem(*case)) for case in GRID))
    assert set(FEATURES) - met == {
        *("more queries than keys", "zero queries", "float64", "CUDA", "residual scores"),
        "torch.func",
    }


def test_reasons_name_the_kernel_that_runs_and_refuse_the_others() -> None:
    for case in GRID:
        decision = reasons(_problem(*case))
        assert set(decision.refused) == set(TABLE) - {decision.kernel}
        assert decision.why
        assert all(decision.refused.values())
    asked = reasons(_problem("plain", "", False, True), "reference")
    assert asked.kernel == "reference"
    assert asked.refused["fused"] == "it could, but reference was asked for"
    with pytest.raises(InputError, match="cannot serve"):
        reasons(_problem("cap", "", False, True), "fused")

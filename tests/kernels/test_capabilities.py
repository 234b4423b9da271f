"""The table of capabilities is what the kernels do, and the choice follows its rule; `explain`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, attention, explain
from normattn.kernels import AttentionInputs, AttentionMask, attend, choose, dispatch, reasons
from normattn.kernels.dispatch import FEATURES, KERNELS, TABLE
from normattn.kernels.inputs import PairBias, Selection
from normattn.kernels.reference import reference
from normattn.kernels.sdpa import sdpa
from normattn.layers import folded

from .problems import leaves_of, make_inputs


def _places(score: Tensor, mask: AttentionMask, table: None) -> Tensor:
    """b(h, i, j) = (i + 1)·sin(j), the same for every head."""
    return (mask.query[:, None] + 1) * mask.key.float().sin()


NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": torch.randn(4, 9)},
    "learned bias": {"bias": torch.randn(4, 9, requires_grad=True)},
    "pairs": {"pairs": PairBias(_places, 1)},
    "normaliser": {"normaliser": lambda score, mask: score.sigmoid()},
    "selection": {"selection": Selection(torch.zeros(2, 7))},
    "sink": {"sink": torch.randn(4)},
    "cap": {"cap": 2.0},
    "dropout": {"dropout": 0.5},
    "sliding": {"mask": {"window": 2}},
    "kept": {"mask": {"window": 2, "sink_tokens": 1}},
    "padding": {"mask": {"padding": torch.tensor([[True] + [False] * 6] * 2)}},
    "mask": {"mask": {"attn_mask": torch.ones(7, 7, dtype=torch.bool)}},
    "learned mask": {"mask": {"attn_mask": torch.zeros(7, 7, requires_grad=True)}},
    "documents": {"mask": {"query_documents": NUMBERS, "key_documents": NUMBERS}},
    "irregular": {"mask": {"aligned": False}},
}
SHAPES = {"": (7, 4), "values": (7, 6), "last rows": (3, 4), "one row": (1, 4)}
GRID = list(itertools.product(CHANGES, SHAPES, (False, True), (False, True)))


def _inputs(
    change: str, shape: str, two: bool, causal: bool, dtype: torch.dtype = torch.float32
) -> AttentionInputs:
    rows, values = SHAPES[shape]
    changes = dict(CHANGES[change])
    mask = dict(changes.pop("mask", {}))
    if "query_documents" in mask:
        mask["query_documents"] = mask["query_documents"][:, 7 - rows :]
    if "attn_mask" in mask:
        mask["attn_mask"] = mask["attn_mask"][:rows]
    kind, options = "two regimes" if two else "plain", {"causal": causal, "dtype": dtype, **mask}
    inputs = make_inputs(rows, 7, kind, size=4, values=values, far_from=3, **options)
    return replace(inputs, **changes)


def _features_of(inputs: AttentionInputs) -> set[str]:
    return {name for name, shown in FEATURES.items() if shown(inputs)}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_kernel_serves_what_its_row_says(kernel: Any) -> None:
    """Inputs that it serves are computed rightly, with every gradient; others are refused.

    Each third is computed, which is each pair of values.
    """
    for number, case in enumerate(GRID):
        inputs = _inputs(*case)
        reason = kernel.why_not(inputs)
        assert (reason is None) == (_features_of(inputs) <= kernel.supported), (case, reason)
        if number % 3:
            continue
        if reason is not None:
            with pytest.raises(InputError, match=f"the {kernel.name} kernel cannot serve this"):
                attend(inputs, kernel.name)
            continue
        out = attend(inputs, kernel.name)
        mine = torch.autograd.grad(out.square().sum(), leaves_of(inputs), allow_unused=True)
        if inputs.dropout:
            continue
        expected = reference(inputs)
        hand = torch.autograd.grad(expected.square().sum(), leaves_of(inputs), allow_unused=True)
        torch.testing.assert_close(out, expected, msg=str(case))
        torch.testing.assert_close(mine, hand, atol=2e-5, rtol=2e-4, msg=str(case))


def test_a_second_derivative_is_given_or_refused_in_words() -> None:
    """Never silently 0. The stock operator's own refusal is a RuntimeError."""
    for kernel in KERNELS:
        for change, two in (("plain", False), ("plain", True), ("bias", False)):
            inputs = _inputs(change, "", two, True, torch.float64)
            if kernel.why_not(inputs) is not None:
                continue
            out = attend(inputs, kernel.name).square().sum()

            def twice(out: Tensor = out, q: Tensor = inputs.q) -> Tensor:
                (first,) = torch.autograd.grad(out, q, create_graph=True)
                return torch.autograd.grad(first.square().sum(), q)[0]

            if kernel.name in ("strips", "reference"):
                assert twice().abs().max() > 0
                continue
            with pytest.raises((InputError, RuntimeError), match=r"second deriv|not implemented"):
                twice()


def test_every_feature_is_in_the_grid_or_tested_elsewhere() -> None:
    met = set().union(*(_features_of(_inputs(*case)) for case in GRID))
    assert set(FEATURES) - met == {
        *("more queries than keys", "zero queries", "float64", "CUDA", "residual scores"),
        *("torch.func", "values of both positions"),
    }


def test_reasons_name_the_kernel_that_runs_and_refuse_the_others() -> None:
    for case in GRID:
        chosen, why, refused = reasons(_inputs(*case))
        assert set(refused) == set(TABLE) - {chosen}
        assert why
        assert all(refused.values())
    named, _, refused = reasons(_inputs("plain", "", False, True), "reference")
    assert named == "reference"
    assert refused["fused"] == "possible, but reference was asked for"
    with pytest.raises(InputError, match="cannot serve"):
        reasons(_inputs("cap", "", False, True), "fused")


def _step(dtype: torch.dtype, groups: int, keys: int) -> AttentionInputs:
    """One query of two heads over many keys."""
    return make_inputs(1, keys, batch=1, heads=2, groups=groups, dtype=dtype)


CHOICES: list[tuple[str, AttentionInputs]] = [
    *[("fused", _inputs("plain", shape, False, True)) for shape in ("", "one row")],
    *[("fused", _inputs(change, "", False, False)) for change in ("plain", "irregular")],
    *[("fused", _step(dtype, 2, 300)) for dtype in (torch.float32, torch.bfloat16)],
    *[("fused", _step(dtype, 1, 3000)) for dtype in (torch.float32, torch.bfloat16)],
    *[("chunked", _inputs("plain", shape, False, True)) for shape in ("last rows", "values")],
    *[("chunked", _inputs(change, "", False, True)) for change in ("padding", "mask", "cap")],
    *[("chunked", _inputs(change, "", False, True)) for change in ("irregular", "learned bias")],
    ("two-regime", _inputs("plain", "", True, True)),
    *[("chunked", _inputs(*at, True, True)) for at in (("plain", "last rows"), ("cap", ""))],
    *[("strips", _inputs(change, "", False, True)) for change in ("learned mask", "normaliser")],
]


@pytest.mark.parametrize(("kernel", "inputs"), CHOICES, ids=[name for name, _ in CHOICES])
def test_the_first_that_can(kernel: str, inputs: AttentionInputs) -> None:
    assert choose(inputs).name == kernel


SPECS = [
    *("KNA", "CosA-logn-YaRN(factor=8)@16", "KNA-ReRoPE(window=4)@16", "Baseline-ALiBi"),
    *("KNA-StreamingLLM(window=4)@16", "Baseline-KERPLELog", "Baseline-SoftCap-Sink"),
    *("Baseline-SlidingWindow(window=3)", "Baseline-Packed", "KNA-PoPE", "KNA-FoX"),
    *("KNA-Chunked(size=4)", "Baseline-Sigmoid@16", "Baseline-CoPE", "KNA-DualChunk@16"),
    "Baseline-FIRE@16",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("queries", "dtype"),
    [(1, torch.float32), (1, torch.bfloat16), (5, torch.float32), (9, torch.bfloat16)],
)
def test_it_names_the_kernel_that_runs(
    spec: str, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    choose = dispatch.choose

    def spy(problem: AttentionInputs, *given: Any) -> dispatch.Kernel:
        kernel = choose(problem, *given)
        taken.append(kernel.name)
        return kernel

    def direct(*given: Any) -> Tensor:
        taken.append("fused")
        return sdpa(*given)

    shapes = (1, 4, queries, 8), (1, 2, 9, 8), (1, 2, 9, 8)
    found = explain(spec, *shapes, dtype=dtype)
    monkeypatch.setattr(dispatch, "choose", spy)
    monkeypatch.setattr(folded, "sdpa", direct)
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    documents = torch.zeros(1, 9, dtype=torch.int64) if "Packed" in spec else None
    forget = torch.zeros(1, 9, 4) if "FoX" in spec else None
    attention(q, k, v, Score(spec, 4, 8, 2).to(dtype), documents=documents, forget=forget)
    assert taken == [found.kernel]
    assert f"kernel: {found.kernel} (" in str(found)
    assert set(found.refused) == {k.name for k in KERNELS} - {found.kernel}


def test_a_device_that_is_not_there_is_explained_too() -> None:
    arguments: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    two = explain("KNA-ReRoPE(window=8)@32", (1, 4, 512, 64), **arguments)
    assert "CUDA" in two.refused["two-regime"]


def test_residual_scores_are_explained() -> None:
    """Scores are left to a kernel of their own; queries and keys are folded, for any kernel."""
    scores = explain("KNA-RealFormer", (1, 4, 512, 64))
    assert scores.kernel == "residual"
    assert any(line.startswith("RealFormer") for line in scores.left)
    assert "residual scores" in scores.refused["fused"]
    features = explain("KNA-ResidualQK", (1, 4, 512, 64))
    assert any(line.startswith("ResidualQK") for line in features.folded)
    assert features.kernel == explain("KNA", (1, 4, 512, 64)).kernel

"""CUDA's kernel on a CPU: what its mask and score functions say, and the choice on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, explain
from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.flex import mask_function, score_function
from normattn.kernels.reference import reference

B, H, G, T, S, D = 2, 4, 2, 21, 34, 16
FLEX_WARNING = "ignore:flex_attention called without torch.compile"
pytestmark = pytest.mark.filterwarnings(FLEX_WARNING)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=torch.is_grad_enabled())


def _of_documents(count: int) -> Tensor:
    return torch.arange(S)[S - count :].div(9, rounding_mode="floor").expand(B, -1)


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 5},
    "window both ways": {"window": 5, "causal": False},
    "window and first keys": {"window": 5, "kept": 3},
    "padding": {"padding": torch.arange(S).expand(B, -1) < torch.tensor([[2], [20]])},
    "documents": {"query_documents": _of_documents(T), "key_documents": _of_documents(S)},
    "mask of every pair": {"mask": torch.arange(B * T * S).view(B, 1, T, S) % 3 > 0},
    "mask of every head": {"mask": torch.arange(H * S).view(1, H, 1, S) % 5 > 1},
    "added": {"mask": torch.linspace(-2, 2, T * S).view(T, S)},
    "added minus infinity": {
        "mask": torch.linspace(-2, 2, T * S).view(T, S).masked_fill(torch.arange(S) > 3, -torch.inf)
    },
}


def _inputs(name: str, change: str) -> AttentionInputs:
    torch.manual_seed(0)
    at = torch.arange(S)
    seen = AttentionMask(**{"causal": True, **MASKS[name]}, query=at[S - T :], key=at, aligned=True)
    inputs = AttentionInputs(_drawn(B, H, T, D), _drawn(B, G, S, D), _drawn(B, G, S, 24), seen)
    if change in ("two regimes", "all"):
        start = S - T - 7 + 1
        inputs = replace(inputs, k=_drawn(B, G, S - start, D), near_start=start, window=7)
        inputs = replace(inputs, far_q=_drawn(B, H, T, D), far_k=_drawn(B, G, S, D))
    if change in ("bias", "all"):
        inputs = replace(inputs, bias=_drawn(H, S))
    if change in ("sink", "all"):
        inputs = replace(inputs, sink=_drawn(H))
    return replace(inputs, cap=2.0) if change in ("cap", "all") else inputs


CHANGES = ("plain", "bias", "sink", "cap", "two regimes", "all")
GRID = [(name, change) for name in MASKS for change in (*CHANGES[:1], "all")]
GRID += [("causal", change) for change in CHANGES[1:-1]]


@torch.no_grad()
@pytest.mark.parametrize(("name", "change"), GRID)
def test_forward_is_the_reference(name: str, change: str) -> None:
    inputs = _inputs(name, change)
    torch.testing.assert_close(attend(inputs, "flex"), reference(inputs))


@torch.no_grad()
def test_positions_of_each_text() -> None:
    inputs = _inputs("causal", "all")
    at = torch.stack((torch.arange(S), torch.arange(S).flip(0)))
    seen = AttentionMask(True, at[:, S - T :], at, aligned=False, window=9)
    inputs = replace(inputs, visibility=seen, k=_drawn(B, G, S, D), near_start=0)
    torch.testing.assert_close(attend(inputs, "flex"), reference(inputs))


def _by_functions(inputs: AttentionInputs) -> Tensor:
    """Attention of one regime by the two functions alone, known to autograd."""
    expanded = inputs.expanded()
    at = torch.meshgrid(*(torch.arange(n) for n in (B, H, T, S)), indexing="ij")
    score = expanded.q @ expanded.k.mT
    changed = score_function(inputs, 0)
    score = score if changed is None else changed(score, *at)
    score = score.masked_fill(~mask_function(inputs, 0, None)(*at), -torch.inf)
    unseen = (score == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(score.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0) @ expanded.v


@pytest.mark.parametrize("change", ["plain", "bias", "cap"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_through_the_functions(name: str, change: str) -> None:
    """Of queries, keys, values and the bias; flex_attention itself has no backward on a CPU."""
    inputs = _inputs(name, change)
    leaves = [x for x in inputs.tensors if x is not None]
    mine = torch.autograd.grad(_by_functions(inputs).square().sum(), leaves)
    hand = torch.autograd.grad(reference(inputs).square().sum(), leaves)
    for one, two in zip(mine, hand, strict=True):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=2e-4)


def test_a_gradient_on_a_cpu_is_refused() -> None:
    with pytest.raises(InputError, match="gradients on a CPU"):
        attend(_inputs("causal", "plain"), "flex")


SHAPE = (1, 4, 4096, 64)


@pytest.mark.parametrize(
    ("score", "kernel"),
    [
        *[(score, "fused") for score in ("Baseline", "KNA-logn@512", "CosA-YaRN(factor=8)@512")],
        *[(score, "flex") for score in ("Baseline-ALiBi", "Baseline-KERPLELog", "KNA-FoX")],
        *[(score, "flex") for score in ("Baseline-SlidingWindow(window=64)", "Baseline-Sink")],
        *[(score, "flex") for score in ("Baseline-Chunked(size=64)", "KNA-ReRoPE(window=64)")],
        *[(score, "flex") for score in ("Baseline-StreamingLLM(window=64)", "Baseline-SoftCap")],
        *[(score, "strips") for score in ("Baseline-CoPE", "Baseline-StickBreaking")],
        ("Baseline-RealFormer", "concatenated"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_on_cuda(score: str, kernel: str, dtype: torch.dtype) -> None:
    """torch's kernel where everything is absorbed into q and k, else flex_attention; no tiles."""
    decision = explain(score, SHAPE, dtype=dtype, device="cuda")
    assert decision.kernel == kernel

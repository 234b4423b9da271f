"""`explain` says what `attention` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import normattn.kernels.dispatch as dispatch
import normattn.layers.folded as folded
from normattn import InputError, Score, attention, explain
from normattn.kernels import AttentionInputs
from normattn.kernels.sdpa import sdpa

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
    assert set(found.refused) == {k.name for k in dispatch.KERNELS} - {found.kernel}


def test_a_device_that_is_not_there_is_explained_too() -> None:
    arguments: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    found = explain("KNA", (1, 4, 512, 64), **arguments)
    assert found.kernel == "fused"
    two = explain("KNA-ReRoPE(window=8)@32", (1, 4, 512, 64), **arguments)
    assert "CUDA" in two.refused["two-regime"]
    # More features than values have: the stock kernel is for as many.
    assert explain("KNA-FoX", (1, 4, 512, 64), **arguments).kernel == "flex"


def test_residual_scores_are_explained() -> None:
    """Scores are left to a kernel of their own; queries and keys are folded, for any kernel."""
    scores = explain("KNA-RealFormer", (1, 4, 512, 64))
    assert scores.kernel == "residual"
    assert any(line.startswith("RealFormer") for line in scores.left)
    assert "residual scores" in scores.refused["fused"]
    features = explain("KNA-ResidualQK", (1, 4, 512, 64))
    assert any(line.startswith("ResidualQK") for line in features.folded)
    assert features.kernel == explain("KNA", (1, 4, 512, 64)).kernel


@pytest.mark.parametrize(
    ("spec", "arguments", "said"),
    [
        ("KNA-HWFA(window=4)@16", {}, "differs from layer to layer"),
        ("KNA-ReRoPE(window=4)", {"causal": False}, "causal attention only"),
        ("QKInstanceNorm", {}, "leaks the future"),
        ("KNA", {"device": "mps"}, "CPU or a CUDA device"),
        ("KNA", {"k_shape": (1, 4, 5, 8)}, "needs q_positions"),
        ("KNA", {"k_shape": (1, 3, 9, 8)}, "multiple of the key heads"),
        ("KNA-SoftCap", {"backend": "fused"}, "a cap"),
    ],
)
def test_what_attention_refuses(spec: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        explain(spec, (1, 4, 9, 8), **arguments)

"""CUDA's kernel on a CPU: its mask and score functions, and the choice on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import normattn.kernels.flex as flex_file
from normattn import InputError, explain
from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.flex import mask_function, score_function
from normattn.kernels.reference import reference
from thorough import few

from .problems import CHANGES, MASKS, S, T, assert_all_close, make_inputs, outputs_and_gradients

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def _inputs(name: str, change: str, learned: bool = False) -> AttentionInputs:
    """In float32; with two regimes only the keys that some query sees as near."""
    options = {"dtype": torch.float32, "learned": learned, **MASKS[name]}
    if name == "added":
        options["attn_mask"] = options["attn_mask"].float()
    inputs = make_inputs(T, S, change, far_from=5, **options)
    start = 0 if inputs.far_from is None else S - T - inputs.far_from + 1
    return replace(inputs, k=inputs.k[:, :, start:], near_start=start)


GRID = [(name, change) for name in MASKS for change in ("plain", "all")]
GRID += [("causal", change) for change in CHANGES[1:-1]]
# One case for each branch, as each is traced again; the functions alone are tested below.
ALWAYS = (
    *(("not causal", "plain"), ("causal", "bias"), ("causal", "two regimes"), ("causal", "all")),
    *((name, "all") for name in ("window both ways", "padding", "documents")),
    *((name, "all") for name in ("mask of every head", "added")),
)
TRIED = few(GRID, ALWAYS.__contains__)


@pytest.mark.parametrize(("name", "change"), TRIED)
def test_forward_is_the_reference(name: str, change: str) -> None:
    inputs = _inputs(name, change)
    torch.testing.assert_close(attend(inputs, "flex"), reference(inputs))


def test_positions_of_each_text() -> None:
    at = torch.stack((torch.arange(S), torch.arange(S).flip(0)))
    inputs = make_inputs(T, S, "all", far_from=5, dtype=torch.float32, learned=False)
    mask = AttentionMask(True, at[:, S - T :], at, aligned=False, window=9)
    inputs = replace(inputs, mask=mask)
    torch.testing.assert_close(attend(inputs, "flex"), reference(inputs))


def test_another_mask_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend_plainly(q: Tensor, *_: Tensor, **__: object) -> tuple[Tensor, Tensor]:
        return 2 * q, q.sum(-1)

    functions = attend_plainly, lambda *_, **__: None
    monkeypatch.setattr(flex_file, "_functions", lambda compiled: functions)
    at, q, count = torch.arange(8), torch.ones(1, 1, 8, 4), CompileCounter()

    @torch.compile(fullgraph=True, backend=count)
    def run(padding: Tensor) -> Tensor:
        return flex_file.flex(AttentionInputs(q, q, q, AttentionMask(True, at, at, True, padding)))[
            0
        ]

    paddings = [at[None] < first for first in range(3)]
    assert all(torch.equal(run(padding), 2 * q) for padding in paddings)
    assert count.frame_count == 1


def _by_functions(inputs: AttentionInputs) -> Tensor:
    """Attention of one regime by the two functions alone, known to autograd."""
    expanded = inputs.repeat_kv()
    at = torch.meshgrid(*(torch.arange(n) for n in (2, 4, T, S)), indexing="ij")
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
    inputs = _inputs(name, change, learned=True)
    expected = outputs_and_gradients(reference, inputs)
    assert_all_close(outputs_and_gradients(_by_functions, inputs), expected, 1e-4)


def test_a_gradient_on_a_cpu_is_refused() -> None:
    with pytest.raises(InputError, match="gradients on a CPU"):
        attend(_inputs("causal", "plain", learned=True), "flex")


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
    decision = explain(score, (1, 4, 4096, 64), dtype=dtype, device="cuda")
    assert decision.kernel == kernel

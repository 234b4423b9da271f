"""Plans: what is prepared once for a score and its shapes serves those, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layers.written_out import of_program
from normattn import InputError, Score, attention
from normattn.layers.folded import zero_or_nan
from score.cases import tensors

SCORES = [
    *("Baseline", "KNA-logn@8", "QKNorm2020@8", "QKRMSNorm-RoPE(layout=interleaved)"),
    *("CosA-YaRN(factor=4)-logn+@8", "Baseline-NoPE", "KNA-NoPE-logn@8", "QKLayerNorm-XPos"),
    *("KNA-SSMax(bias=true)@8", "Baseline-PartialRoPE(fraction=0.5)", "KNA-Chunked(size=4)"),
    "KNA-SlidingWindow(window=4)",
]


def _qkv(queries: int, keys: int, seed: int = 0, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensors((2, 4, queries, 8), (2, groups, keys, 8), (2, groups, keys, 8), seed=seed)
    return q, k, v


def _score(text: str) -> Score:
    torch.manual_seed(1)
    score = Score(text, 4, 8, 2).double()
    for parameter in score.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return score


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("text", SCORES)
def test_what_is_prepared_is_the_definition(text: str, causal: bool) -> None:
    """Values and gradients, of the first call and of those after it, one query and many."""
    score = _score(text)
    for queries, keys in ((9, 9), (1, 9), (9, 9), (9, 7) if not causal else (1, 5)):
        q, k, v = _qkv(queries, keys, seed=queries)
        inputs = [q, k, v, *score.parameters()]
        outs = [attention(q, k, v, score, causal, backend=way) for way in ("auto", "reference")]
        torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)
        grads = [torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True) for out in outs]
        torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-9)
        with torch.no_grad():
            again = attention(q, k, v, score, causal)
        torch.testing.assert_close(again, outs[1], rtol=1e-9, atol=1e-9)


def test_a_method_that_is_switched_on_is_used() -> None:
    q, k, v = _qkv(9, 9)
    score = Score("Baseline@8", 4, 8, 2).double()
    plain = attention(q, k, v, score)
    score.use(score.built.with_method("YaRN(factor=4)"))
    stretched = attention(q, k, v, score)
    expected = attention(q, k, v, score, backend="reference")
    torch.testing.assert_close(stretched, expected, rtol=1e-9, atol=1e-9)
    assert (stretched - plain).abs().max() > 1e-3
    score.use(score.built)
    torch.testing.assert_close(attention(q, k, v, score), plain, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_finite_comes_out(bad: float, which: int) -> None:
    """After a call that was finite. A query that sees it gets NaN, the others do not."""
    q, k, v = (x.detach() for x in _qkv(6, 6))
    score = Score("Baseline", 4, 8, 2).double()
    plain = attention(q, k, v, score)
    (q, k)[which][:, :, 3, 0] = bad
    out = attention(q, k, v, score)
    torch.testing.assert_close(out[:, :, :3], plain[:, :, :3], rtol=1e-9, atol=1e-9)
    assert out[:, :, 3].isnan().all()


@pytest.mark.parametrize("name", ["QKBatchNorm", "QBatchNorm", "KBatchNorm-NoPE"])
def test_a_forward_moves_running_statistics_once(name: str) -> None:
    """Also the first one of its shape, for which whatever is prepared is made."""
    q, k, v = (torch.randn(2, 2, 7, 4) for _ in range(3))
    score = Score(name, heads=2, head_dim=4)
    expected = {}
    for kind, x in (("query_norm", q), ("key_norm", k)):
        rows = x.transpose(0, 1).reshape(2, -1, 4)
        expected[f"{kind}.running_mean"] = 0.1 * rows.mean(1)[None, :, None]
        expected[f"{kind}.running_var"] = 0.9 + 0.1 * rows.var(1)[None, :, None]
    attention(q, k, v, score, causal=False)
    found = dict(score.named_buffers())
    assert found
    for buffer, value in found.items():
        torch.testing.assert_close(value, expected[buffer])


def test_refusals_are_those_of_the_first_call() -> None:
    q, k, v = _qkv(6, 6)
    score = Score("Baseline", 4, 8, 2).double()
    attention(q, k, v, score)
    with pytest.raises(InputError, match="built for 4 query heads"):
        attention(q[:, :2], k, v, score)
    with pytest.raises(InputError, match="share a dtype"):
        attention(q, k.float(), v, score)
    with pytest.raises(InputError, match="unknown backend"):
        attention(q, k, v, score, backend="quick")
    with pytest.raises(InputError, match="second"):
        torch.autograd.grad(attention(q, k, v, score).sum(), q, create_graph=True)


CALLS = """
import json, sys, torch
from normattn import Attention

def calls(score, learning):
    layer, x = Attention(128, 4, score=score), torch.randn(1, 64, 128)
    count, there = [0], [False]
    def watch(frame, event, argument):
        name = getattr(argument, "__name__", "")
        there[0] |= event == "c_call" and name == "scaled_dot_product_attention"
        count[0] += event == "call" and not there[0]
    with torch.set_grad_enabled(learning):
        layer(x)
        sys.setprofile(watch)
        try:
            layer.forward(x)
        finally:
            sys.setprofile(None)
    assert there[0]
    return count[0] - 1

json.dump({text: [calls(text, on) for on in (False, True)] for text in json.load(sys.stdin)},
          sys.stdout)
"""


def test_few_python_calls_between_a_layer_and_the_kernel() -> None:
    """For every score that folds by a norm, a rotation and λ, without gradients and with."""
    scores = ["QKRMSNorm(gain=true)", "QRMSNorm(gain=false)", "QKLayerNorm(gain=true)"]
    scores += ["QKRMSNorm(across=each,gain=true)", "QKLayerNorm(across=all,gain=true)"]
    scores += ["Baseline", "KNA", "Baseline-XPos", "KNA-NoPE", "QKNorm2020@64"]
    scores += ["CosA-logn-YaRN(factor=2)@64"]
    for text, counts in of_program(CALLS, scores).items():
        assert max(counts) <= 30, (text, counts)


def test_what_a_device_shows_without_waiting() -> None:
    """Added to outputs off the CPU: 0, and NaN for rows of the batch that are not finite."""
    q, k = torch.full((3, 2, 4, 8), 3e38), torch.ones(3, 1, 4, 8)
    q[1, 0, 2, 5], k[2, 0, 0, 0] = torch.inf, -torch.inf
    shown = zero_or_nan(q, k).flatten()
    assert shown[0] == 0
    assert shown[1:].isnan().all()

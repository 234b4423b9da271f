"""What kernels give beside the output: log-sum-exp with gradients, and statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, attention
from normattn.kernels import AttentionInputs, attend, choose, merge_by_lse, run_kernel
from normattn.kernels.stats import observing
from score.cases import tensors
from thorough import half_of

from .problems import CHANGES, leaves_of, logits_of, make_inputs
from .test_observe import Notes

B, H, G, T, S, D = 2, 4, 2, 11, 17, 8
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window": 4, "sink_tokens": 1},
    "padding": {"padding": torch.arange(S).expand(B, -1) < torch.tensor([[2], [13]])},
    "added": {"attn_mask": torch.linspace(-2, 2, T * S, dtype=torch.float64).view(T, S)},
    "irregular": {"aligned": False},
}


def _inputs(kind: str, change: str) -> AttentionInputs:
    return make_inputs(T, S, change, **KINDS[kind])


def _score(p: AttentionInputs) -> Tensor:
    """The logits of every pair and the sink, by formula; −∞ where a key is hidden."""
    k = p.k.repeat_interleave(H // G, 1)
    score = p.q @ k.mT
    distance = p.mask.query[:, None] - p.mask.key
    if p.far_q is not None and p.far_k is not None and p.far_from is not None:
        far = p.far_q @ p.far_k.repeat_interleave(H // G, 1).mT
        score = torch.where(distance >= p.far_from, far, score)
    return logits_of(p, score)


def _lse(score: Tensor) -> Tensor:
    """ln Σ exp, −∞ without any term, where autograd's own rule gives NaN."""
    nothing = (score == -torch.inf).all(-1)
    return score.masked_fill(nothing[..., None], 0.0).logsumexp(-1).masked_fill(nothing, -torch.inf)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(("kind", "change"), half_of([*KINDS], CHANGES))
def test_the_log_sum_exp_and_its_gradients(kind: str, change: str, backend: str) -> None:
    inputs = _inputs(kind, change)
    leaves = [x for x in leaves_of(inputs) if x is not inputs.v]
    (out, lse), expected = run_kernel(inputs, backend, lse=True), _lse(_score(inputs))
    assert lse is not None
    torch.testing.assert_close(out, attend(inputs, backend), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, expected, rtol=1e-11, atol=1e-11)
    some = expected > -torch.inf
    along = torch.randn(int(some.sum()), dtype=torch.float64)
    mine = torch.autograd.grad((lse[some] * along).sum(), leaves, retain_graph=True)
    hers = torch.autograd.grad((expected[some] * along).sum(), leaves)
    torch.testing.assert_close(mine, hers, rtol=1e-10, atol=1e-10)
    # Beside the gradient of the output it is added.
    both = torch.autograd.grad(out.sum() + (lse[some] * along).sum(), leaves, retain_graph=True)
    alone = torch.autograd.grad(out.sum(), leaves)
    for total, one, other in zip(both, mine, alone, strict=True):
        torch.testing.assert_close(total, one + other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("split", [0, 3, 9, S])
def test_two_shards_of_keys_merged(split: int, backend: str) -> None:
    """Outputs and all gradients, a shard without keys and rows that see none in one included."""
    whole = _inputs("plain", "cap")
    parts = []
    for keys in (slice(0, split), slice(split, S)):
        mask = replace(whole.mask, key=whole.mask.key[keys], aligned=False)
        shard = replace(whole, k=whole.k[:, :, keys], v=whole.v[:, :, keys], mask=mask)
        shard_out, shard_lse = run_kernel(shard, backend, lse=True)
        assert shard_lse is not None
        parts += [shard_out, shard_lse]
    out, lse = merge_by_lse(*parts)
    whole_out, whole_lse = run_kernel(whole, "reference", lse=True)
    torch.testing.assert_close(out, whole_out)
    torch.testing.assert_close(lse, whole_lse)
    leaves = (whole.q, whole.k, whole.v)
    mine = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
    assert whole_lse is not None
    hers = torch.autograd.grad(whole_out.square().sum() + whole_lse.sum(), leaves)
    torch.testing.assert_close(mine, hers)


def test_it_is_chosen_by_who_gives_it_and_refused_in_words() -> None:
    inputs = _inputs("plain", "plain")
    assert choose(replace(inputs, q=inputs.q[:, :, -1:]), lse=True).name == "chunked"
    for backend in ("fused", "strips", "two-regime"):
        with pytest.raises(InputError, match=f"the {backend} kernel cannot serve this"):
            run_kernel(inputs, backend, lse=True)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", ["auto", "strips"])
@pytest.mark.parametrize(("kind", "change"), half_of([*KINDS], CHANGES))
def test_statistics_by_formula(kind: str, change: str, backend: str) -> None:
    """By formula, 0 and −∞ for a query that sees no key; the output is what it is without them."""
    inputs = _inputs(kind, change)
    distance = torch.arange(float(S), dtype=torch.float64)[None]
    notes = Notes(distance)
    with observing(notes):
        out = attend(inputs, backend)
    found, score = notes.seen[0][1], _score(inputs)
    torch.testing.assert_close(out, attend(inputs, backend), rtol=1e-11, atol=1e-12)
    keys, seen = score[..., :S], score[..., :S] > -torch.inf
    weight = torch.where(seen.any(-1, keepdim=True), score.softmax(-1), 0.0)
    apart = (inputs.mask.query[:, None] - inputs.mask.key).abs()
    assert found.mean is not None
    expected = {
        "lse": torch.where(seen.any(-1), _lse(score), -torch.inf),
        "largest": keys.amax(-1),
        "entropy": -torch.special.xlogy(weight, weight).sum(-1),
        "first": weight[..., 0],
        "visible": seen.sum(-1),
    }
    if inputs.sink is not None:
        expected["sink"] = weight[..., -1]
    for name, value in expected.items():
        ours = getattr(found, name).expand(value.shape)
        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-9, msg=name)
    mean = (weight[..., :S] * apart).sum(-1)
    torch.testing.assert_close(found.mean[0], mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("sink", ["", "-Sink"])
def test_attention_returns_the_log_sum_exp_with_its_gradient(sink: str, backend: str) -> None:
    q, k, v = tensors((B, 2, T, D), (B, 2, T, D), (B, 2, T, D))
    score = Score(f"Baseline-NoPE{sink}", 2, D).double()
    out, lse = attention(q, k, v, score, backend=backend, return_lse=True)
    torch.testing.assert_close(out, attention(q, k, v, score, backend=backend))
    logits = (q @ k.mT / D**0.5).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
    if score.sink is not None:
        logits = torch.cat((logits, score.sink[None, :, None, None].expand(B, 2, T, 1)), -1)
    expected, leaves = logits.logsumexp(-1), (q, k, *score.parameters())
    torch.testing.assert_close(lse, expected, rtol=1e-10, atol=1e-10)
    along = torch.randn_like(expected)
    mine, hers = (torch.autograd.grad(x, leaves, along) for x in (lse, expected))
    torch.testing.assert_close(mine, hers, rtol=1e-9, atol=1e-9)


def test_scores_without_one_log_sum_exp_say_why() -> None:
    q, k, v = tensors((1, 2, T, D), (1, 2, T, D), (1, 2, T, D))
    for text, why in (
        ("Baseline-Sigmoid@8", "not those of softmax"),
        ("Baseline-StickBreaking", "not those of softmax"),
        ("KNA-Differential@8", "gives no log-sum-exp"),
        ("KNA-DynamicNTK@8", "gives no log-sum-exp"),
    ):
        with pytest.raises(InputError, match=why):
            attention(q, k, v, Score(text, 2, D).double(), return_lse=True)

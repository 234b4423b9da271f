"""What each method computes: against a float64 oracle, and against transformers' own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from operator import sub
from typing import Any

import pytest
import torch
from torch import Tensor

import normattn
from normattn import InputError, ScoreSpec
from normattn.score.parts import rope_frequencies

from .families import LENGTH, build, logits, model_of, tokens
from .matrix import METHODS, stepwise
from .tiny import build as tiny

W, COUNT = 3, 2 * LENGTH + 3
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}
Relative = Callable[[int, int], float]
Factor = Callable[[int], float]


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (m, m + d/2) of x (H, d) turned by angles (d/2,)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def _attend(
    own: Any, relative: Relative, factor: Factor, theta: Tensor, hidden_states: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """A layer's attention, pair by pair.

    The logit of row i and column j is ⟨R^relative(i, j) q_i, k_j⟩ · factor(i + 1) / √d.
    """
    q, k, v = (
        projected(hidden_states[0]).unflatten(-1, (-1, own.head_dim)).transpose(0, 1)
        for projected in (own.q_proj, own.k_proj, own.v_proj)
    )
    k, v = (x.repeat_interleave(own.num_key_value_groups, 0) for x in (k, v))
    out = torch.zeros_like(q)
    for i in range(q.shape[1]):
        turned = [_turned(q[:, i], relative(i, j) * theta) for j in range(i + 1)]
        scores = torch.stack([(x * k[:, j]).sum(-1) for j, x in enumerate(turned)], -1)
        weights = (scores * factor(i + 1) / math.sqrt(own.head_dim)).softmax(-1)
        out[:, i] = (weights[..., None] * v[:, : i + 1]).sum(1)
    return own.o_proj(out.transpose(0, 1).flatten(1)[None]), None


def llama(model: Any, ids: Tensor, relative: Relative, factor: Factor, theta: Tensor) -> Tensor:
    """Logits (T, V) of one row of tokens by the same weights in float64."""
    exact = copy.deepcopy(model).double()
    for layer in exact.model.layers:
        layer.self_attn.forward = partial(_attend, layer.self_attn, relative, factor, theta)
    return logits(exact, ids[None])[0]


def _dual_chunk(i: int, j: int, size: int = 5, local: int = 3) -> float:
    behind, last = i // size - j // size, size + local - 1
    return (i % size, min(i % size + size, last), last)[min(behind, 2)] - j % size


METHODS_BY_HAND: dict[str, Relative] = {
    "ReRoPE(window=3)": lambda i, j: min(i - j, W),
    "ReRoPE(window=3)-logn+": lambda i, j: min(i - j, W),
    "ReRoPE": lambda i, j: min(i - j, LENGTH // 4),
    "LeakyReRoPE(window=3,s=2.5)-logn+": lambda i, j: min(i - j, W + (i - j - W) / 2.5),
    "SelfExtend(window=3,group=2)": lambda i, j: i - j if i - j < W else i // 2 - j // 2 + 2,
    "DualChunk(size=5,local=3)": _dual_chunk,
    "DualChunk(size=4,local=2)-logn+": partial(_dual_chunk, size=4, local=2),
    "DualChunk(size=5,local=3,beyond=1)-YaRNTemperature": (
        lambda i, j: _dual_chunk(i, j, 5, 4) if j < i // 5 * 5 else i - j
    ),
    **dict.fromkeys(("logn+", "YaRN(factor=3)-logn+", "ABF(base=300)", "PI(factor=3)"), sub),
    **dict.fromkeys(("NTK(factor=3)", "NTK-mixed(factor=3)", "YaRN(factor=3)"), sub),
}
FACTORS: dict[str, Factor] = {
    "logn+": lambda n: max(1.0, math.log(n) / math.log(LENGTH)),
    "YaRNTemperature": lambda n: (1 + 0.1 * math.log(max(1.0, n / LENGTH))) ** 2,
}


@pytest.mark.parametrize("method", METHODS_BY_HAND)
def test_methods_by_hand(method: str) -> None:
    model, ids = model_of("Llama"), tokens(1, COUNT)
    with normattn.extend(model, method):
        found = logits(model, ids)[0]
    theta, gain = rope_frequencies(8, 10000.0), 1.0
    scaling = ScoreSpec.parse(f"Baseline-{method}", train_length=LENGTH).rope_scaling
    if scaling is not None:
        theta, gain = scaling.inverse_frequencies(8, 10000.0, LENGTH), scaling.gain(LENGTH)
    factor: Factor = FACTORS.get(method.split("-")[-1], lambda n: 1.0)
    relative = METHODS_BY_HAND[method]
    expected = llama(model, ids[0], relative, lambda n: gain * factor(n), theta)
    torch.testing.assert_close(found.double(), expected, **CLOSE)


def _by_token(model: Any, ids: Tensor) -> Tensor:
    """The last logits, the last tokens read one by one."""
    return stepwise(model, ids, (ids.shape[1] - 3, 1, 1, 1))[:, -1]


def test_dynamic_agrees_with_itself_where_transformers_does_not() -> None:
    """A prompt of three training lengths: one layer, the last block reads with its spectrum."""
    ids, dynamic = tokens(1, 3 * LENGTH), {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0}
    theirs, ours = (
        build("Llama", num_hidden_layers=1, **more) for more in ({"rope_parameters": dynamic}, {})
    )
    decoded = _by_token(theirs, ids)
    prefilled = logits(theirs, ids)
    assert (prefilled[:, -1] - decoded).abs().max() > 1e-3
    # What ran before counts as well: now the same steps come out otherwise.
    assert (_by_token(theirs, ids) - decoded).abs().max() > 1e-3
    with normattn.extend(ours, "DynamicNTK"):
        found = logits(ours, ids)
        last = slice(2 * LENGTH, None)
        torch.testing.assert_close(found[:, last], prefilled[:, last], rtol=0, atol=2e-5)
        torch.testing.assert_close(_by_token(ours, ids), found[:, -1], rtol=0, atol=2e-5)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": LENGTH}


@pytest.mark.parametrize(
    ("method", "times", "far"),
    [
        ("ReRoPE(window=3)", 1.0, W),
        ("PI(factor=2)", 0.5, COUNT),
        ("ABF(base=1e6)", rope_frequencies(8, 1e6) / rope_frequencies(8, 1e4), COUNT),
    ],
)
def test_scaled_frequencies_are_kept_or_scaled_once_more(
    method: str, times: float | Tensor, far: int
) -> None:
    """On llama3's spectrum a method multiplies what is there, and says so."""
    model, ids = build("Llama", rope_parameters=LLAMA3), tokens(1, COUNT)
    theta = model.model.rotary_emb.inv_freq.double()
    assert not torch.allclose(theta, rope_frequencies(8, 10000.0))
    with normattn.extend(model, method, train_length=LENGTH) as extension:
        assert "on top of the model's own llama3 scaling" in str(extension.resolved)
        found = logits(model, ids)[0]
    expected = llama(model, ids[0], lambda i, j: min(i - j, far), lambda n: 1.0, theta * times)
    torch.testing.assert_close(found.double(), expected, **CLOSE)


@pytest.mark.parametrize("method", ["ReRoPE(window=3)-logn+", "DynamicNTK"])
def test_right_padding_and_holes_do_not_count(method: str) -> None:
    """Three rows: a hole, padding on the right, a mask of every pair for the row without."""
    model, ids = model_of("Llama"), tokens(2, COUNT)
    mask = torch.ones_like(ids)
    mask[0, 4:7] = 0
    mask[1, -6:] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    whole = torch.ones(COUNT, COUNT, dtype=torch.bool).tril()[None, None]
    with normattn.extend(model, method):
        found = logits(model, ids, **given)
        for row, real in enumerate(mask.bool()):
            alone = logits(model, ids[row : row + 1, real])[0]
            torch.testing.assert_close(found[row, real], alone, **CLOSE)
            one = {name: value[row : row + 1] for name, value in given.items()}
            run = logits(model, ids[row : row + 1], **one)
            torch.testing.assert_close(run[0, real], alone, **CLOSE)
        every_pair = logits(model, ids, attention_mask=whole)
        torch.testing.assert_close(every_pair, logits(model, ids), **CLOSE)

        def after(count: int, mask: Tensor) -> Tensor:
            """The last tokens, read after the others under a mask of their pairs."""
            with torch.no_grad():
                cache = model(ids[:, :count], use_cache=True).past_key_values
            return logits(model, ids[:, -2:], attention_mask=mask, past_key_values=cache)

        rest = after(COUNT - 2, whole[:, :, -2:])
        torch.testing.assert_close(rest, every_pair[:, -2:], **CLOSE)
        apart = whole[:, :, -1:].clone()
        apart[..., [COUNT // 2, COUNT - 1]] = False
        with pytest.raises(InputError, match="positions of cached keys"):
            after(COUNT - 1, torch.cat((apart, whole[:, :, -1:]), -2))


def test_layers_that_see_what_comes_are_refused_what_counts_from_the_past() -> None:
    """Gemma 3 as an encoder: frequencies may be scaled, our rules are those of causal reading."""
    model, ids = tiny("gemma3_text", use_bidirectional_attention=True), tokens(length=12)
    later = ids.clone()
    later[:, -1] = ids[:, -1] % 50 + 3
    for method, values in METHODS.items():
        if method in ("PI", "NTK", "NTK-mixed", "ABF", "YaRN"):
            with normattn.extend(model, method, **values):
                assert float((logits(model, later) - logits(model, ids))[:, :-1].abs().max()) > 1e-4
            continue
        with pytest.raises(InputError, match="asks its attention for is_causal=False"):
            normattn.extend(model, method, **values)


def test_chunks_are_refused_where_scores_know_more_than_distances() -> None:
    """A gain after the rotation: queries and keys moved together would score otherwise."""
    with pytest.raises(InputError, match="learned gains"):
        normattn.extend(tiny("hunyuan_v1_dense"), "DualChunk", train_length=LENGTH)

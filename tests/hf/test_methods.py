"""What each method computes: against a float64 oracle, and against transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import normattn
from normattn import InputError, ScoreSpec
from normattn.score.parts import rope_frequencies

from .families import LENGTH, build, logits, model_of, tokens
from .matrix import METHODS
from .oracle import llama
from .tiny import build as tiny

W, S, COUNT = 3, 2.5, 2 * LENGTH + 3


def _logn(n: int) -> float:
    return max(1.0, math.log(n) / math.log(LENGTH))


def _always(n: int) -> float:
    return 1.0


def _distance(i: int, j: int) -> float:
    return i - j


def _self_extend(i: int, j: int) -> float:
    return i - j if i - j < W else i // 2 - j // 2 + W - W // 2


def _dual_chunk(i: int, j: int, size: int = 5, local: int = 3) -> float:
    behind, last = i // size - j // size, size + local - 1
    return (i % size, min(i % size + size, last), last)[min(behind, 2)] - j % size


def _dual_chunk_of_four(i: int, j: int) -> float:
    return _dual_chunk(i, j, 4, 2)


REGIMES: list[tuple[str, dict[str, Any], Callable[[int, int], float], Callable[[int], float]]] = [
    ("ReRoPE", {"window": W}, lambda i, j: min(i - j, W), _always),
    ("ReRoPE-logn+", {"window": W}, lambda i, j: min(i - j, W), _logn),
    ("ReRoPE", {}, lambda i, j: min(i - j, LENGTH // 4), _always),
    (
        "LeakyReRoPE-logn+",
        {"window": W, "s": S},
        lambda i, j: i - j if i - j < W else W + (i - j - W) / S,
        _logn,
    ),
    ("SelfExtend", {"window": W, "group": 2}, _self_extend, _always),
    ("DualChunk", {"size": 5, "local": 3}, _dual_chunk, _always),
    ("DualChunk-logn+", {"size": 4, "local": 2}, _dual_chunk_of_four, _logn),
    (
        "DualChunk-YaRNTemperature",
        {"size": 5, "local": 3, "beyond": 1},
        lambda i, j: _dual_chunk(i, j, 5, 4) if j < i // 5 * 5 else i - j,
        lambda n: (1 + 0.1 * math.log(max(1.0, n / LENGTH))) ** 2,
    ),
    ("logn+", {}, _distance, _logn),
]


SPECTRA: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("PI", {"factor": 3}), ("ABF", {"base": 300.0}), ("NTK", {"factor": 3})),
    *(("NTK-mixed", {"factor": 3}), ("YaRN", {"factor": 3})),
)
METHODS_BY_HAND = [*REGIMES, ("YaRN-logn+", {"factor": 3}, _distance, _logn)]
METHODS_BY_HAND += [(method, values, _distance, _always) for method, values in SPECTRA]


@pytest.mark.parametrize(("method", "values", "relative", "factor"), METHODS_BY_HAND)
def test_methods_by_hand(
    method: str,
    values: dict[str, Any],
    relative: Callable[[int, int], float],
    factor: Callable[[int], float],
) -> None:
    model, ids = model_of("Llama"), tokens(1, COUNT)
    with normattn.extend(model, method, **values):
        found = logits(model, ids)[0]
    theta, gain = rope_frequencies(8, 10000.0), 1.0
    scaling = ScoreSpec.parse(f"Baseline-{method}", train_length=LENGTH, **values).rope_scaling
    if scaling is not None:
        theta, gain = scaling.inverse_frequencies(8, 10000.0, LENGTH), scaling.gain(LENGTH)
    expected = llama(model, ids[0], relative, lambda n: gain * factor(n), theta)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def _one_layer(**more: Any) -> Any:
    return build("Llama", num_hidden_layers=1, **more)


def _by_token(model: Any, ids: Tensor) -> Tensor:
    """The last logits, the last tokens read one by one."""
    with torch.no_grad():
        out = model(ids[:, :-3], use_cache=True)
        for at in range(ids.shape[1] - 3, ids.shape[1]):
            out = model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
    found: Tensor = out.logits[:, -1]
    return found


def test_dynamic_agrees_with_itself_where_transformers_does_not() -> None:
    """A prompt of three training lengths: one layer, the last block reads with its spectrum."""
    ids, dynamic = tokens(1, 3 * LENGTH), {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0}
    theirs, ours = _one_layer(rope_parameters=dynamic), _one_layer()
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


@pytest.mark.parametrize(
    ("method", "values"), [("ReRoPE", {"window": W}), ("PI", {"factor": 2}), ("ABF", {"base": 1e6})]
)
def test_scaled_frequencies_are_kept_or_scaled_once_more(
    method: str, values: dict[str, Any]
) -> None:
    """On llama3's spectrum a method multiplies what is there, and says so."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": LENGTH}
    model, ids = build("Llama", rope_parameters=rope), tokens(1, COUNT)
    theta = model.model.rotary_emb.inv_freq.double()
    assert not torch.allclose(theta, rope_frequencies(8, 10000.0))
    times = {"ReRoPE": 1.0, "PI": 0.5}.get(
        method, rope_frequencies(8, 1e6) / rope_frequencies(8, 1e4)
    )
    with normattn.extend(model, method, train_length=LENGTH, **values) as extension:
        assert "on top of the model's own llama3 scaling" in str(extension.resolved)
        found = logits(model, ids)[0]
    far = W if method == "ReRoPE" else COUNT
    expected = llama(model, ids[0], lambda i, j: min(i - j, far), _always, theta * times)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "values"), [("ReRoPE-logn+", {"window": W}), ("DynamicNTK", {})]
)
def test_right_padding_and_holes_do_not_count(method: str, values: dict[str, Any]) -> None:
    """Three rows: a hole, padding on the right, a mask of every pair for the row without."""
    model, ids = model_of("Llama"), tokens(2, COUNT)
    mask = torch.ones_like(ids)
    mask[0, 4:7] = 0
    mask[1, -6:] = 0
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = torch.ones(COUNT, COUNT, dtype=torch.bool).tril()[None, None]
    with normattn.extend(model, method, **values):
        found = logits(model, ids, attention_mask=mask, position_ids=counted)
        for row in (0, 1):
            real = mask[row].bool()
            alone = logits(model, ids[row : row + 1, real])[0]
            torch.testing.assert_close(found[row, real], alone, rtol=0, atol=1e-4)
            run = logits(
                model,
                ids[row : row + 1],
                attention_mask=mask[row : row + 1],
                position_ids=counted[row : row + 1],
            )
            torch.testing.assert_close(run[0, real], alone, rtol=0, atol=1e-4)
        every_pair = logits(model, ids, attention_mask=whole)
        torch.testing.assert_close(every_pair, logits(model, ids), rtol=0, atol=1e-4)
        with torch.no_grad():
            cache = model(ids[:, :-2], use_cache=True).past_key_values
        rest = logits(model, ids[:, -2:], attention_mask=whole[:, :, -2:], past_key_values=cache)
        torch.testing.assert_close(rest, every_pair[:, -2:], rtol=0, atol=1e-4)
        apart = whole[:, :, -1:].clone()
        apart[..., COUNT // 2] = False
        apart[..., COUNT - 1] = False
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
        odd = torch.cat((apart, whole[:, :, -1:]), -2)
        with pytest.raises(normattn.InputError, match="positions of cached keys"):
            logits(model, ids[:, -2:], attention_mask=odd, past_key_values=cache)


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

"""T5's bias: buckets as in transformers, a table that learns, models that read on."""

from __future__ import annotations

import math

import pytest
import torch

from normattn import InputError, Score, ScoreSpec, attention
from normattn.score.parts.bias import T5Bias


@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (16, 64), (8, 20), (7, 20)])
def test_buckets_are_those_of_transformers(buckets: int, most: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(3000)
    expected = t5.T5Attention._relative_position_bucket(-distance, False, buckets, most)
    part = T5Bias(buckets=buckets, max_distance=most)
    assert torch.equal(part.bucket(distance.double()), expected)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_attention_against_a_double_loop(backend: str) -> None:
    """softmax(q·k/√d + β[bucket]) by hand, with the gradient of β."""
    torch.manual_seed(0)
    score = Score(ScoreSpec.parse("Baseline-T5Bias(buckets=4,max_distance=8)"), 2, 4).double()
    q, k, v = (torch.randn(1, 2, 11, 4, dtype=torch.float64) for _ in range(3))
    bucket = [0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3]  # 2 + ⌊2·ln(r/2)/ln 4⌋ from r = 2 on
    table = dict(score.named_parameters())["bias.table"]

    logits = q @ k.transpose(-1, -2) / math.sqrt(4)
    bias = torch.stack(
        [torch.stack([table[:, bucket[max(i - j, 0)]] for j in range(11)], -1) for i in range(11)],
        -2,
    )
    seen = torch.ones(11, 11, dtype=torch.bool).tril()
    expected = (logits + bias).masked_fill(~seen, -math.inf).softmax(-1) @ v
    out = attention(q, k, v, score, backend=backend)
    torch.testing.assert_close(out, expected)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    grads = [torch.autograd.grad((x * weight).sum(), table)[0] for x in (out, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("parameters", ["buckets=1", "buckets=8,max_distance=4"])
def test_settings_without_a_meaning_are_refused(parameters: str) -> None:
    with pytest.raises(InputError, match=parameters.rsplit(",")[-1].split("=")[0]):
        ScoreSpec.parse(f"Baseline-T5Bias({parameters})")

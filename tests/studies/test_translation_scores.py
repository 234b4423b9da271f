"""Which scores a row of the translation table gives to encoder, decoder and cross attention."""

from __future__ import annotations

import pytest

from normattn.lab.studies.qknorm.translation import scores_of
from normattn.models.config import TranslatorConfig


@pytest.mark.parametrize("variant", ["Baseline", "KNA-logn", "QKNorm2020", "QRMSNorm-NoPE"])
def test_one_score_everywhere_where_that_can_be(variant: str) -> None:
    assert scores_of(variant) == {"model.score": variant}


@pytest.mark.parametrize(
    ("variant", "decoder", "across"),
    [
        ("QKBatchNorm", "Baseline", "KBatchNorm-NoPE"),
        ("KInstanceNorm", "Baseline", "KInstanceNorm-NoPE"),
        ("QBatchNorm", "Baseline", "Baseline-NoPE"),
        ("QKInstanceNorm-logn", "Baseline-logn", "KInstanceNorm-logn-NoPE"),
        ("QKBatchNorm-NoPE", "Baseline-NoPE", "KBatchNorm-NoPE"),
        ("QKBatchNorm(eps=1e-06)", "Baseline", "KBatchNorm(eps=1e-06)-NoPE"),
        ("KInstanceNorm(gain=false)-ALiBi", "Baseline-ALiBi", "KInstanceNorm(gain=false)-NoPE"),
    ],
)
def test_norms_over_tokens_stay_where_no_future_is_seen(
    variant: str, decoder: str, across: str
) -> None:
    found = scores_of(variant)
    assert found == {
        "model.score": variant,
        "model.decoder_score": decoder,
        "model.cross_score": across,
    }
    scores = {name.removeprefix("model."): text for name, text in found.items()}
    sizes = {"source_vocab": 9, "dim": 8, "heads": 2, "layers": 1, "train_length": 16}
    config = TranslatorConfig(**sizes, **scores)  # type: ignore[arg-type]
    assert str(config.cross_score) == f"{across}@16"

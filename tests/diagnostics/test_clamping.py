"""The last tokens of a text alone, behind it, and with positions clamped: against numpy."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from diagnostics.test_diagnostics import model_of, texts_of
from normattn.lab.diagnostics import measure_mechanism
from normattn.lab.diagnostics.ranges import READINGS
from normattn.models import CausalLM


def last_scores(model: CausalLM, ids: np.ndarray, last: int) -> tuple[int, float]:
    """Right predictions and nats of the last tokens, from the logits."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids[None, :-1]))[0].numpy()
    chosen, targets = logits[-last:], ids[-last:]
    losses = np.log(np.exp(chosen).sum(-1)) - chosen[np.arange(last), targets]
    return int((chosen.argmax(-1) == targets).sum()), float(losses.sum())


@pytest.mark.parametrize("score", ["Baseline", "KNA", "CosA", "KNA-NoPE", "Baseline-ALiBi"])
def test_a_record_holds_the_readings_by_document(score: str) -> None:
    model, texts = model_of(score), texts_of()
    record = measure_mechanism(model, texts, seed=0, weights="w")
    assert model.spec == model.config.score.resolve(train_length=16)  # no method stays on
    rotary = score in ("Baseline", "KNA", "CosA")
    for reading in range(len(READINGS)):
        at = record.filter(length=64, bin=float(reading), unit="b")
        hits, loss = (at.filter(statistic=f"last_{name}") for name in ("accuracy", "loss"))
        if READINGS[reading] == "clamped" and not rotary:
            assert hits["of"].item() == loss["of"].item() == 0
            continue
        assert hits["of"].item() == loss["of"].item() == 32
        clamped = READINGS[reading] == "clamped"
        with model.using("ReRoPE", window=15) if clamped else nullcontext():
            expected = [
                last_scores(model, texts.windows[row, -17:] if reading == 0 else windows, 16)
                for row, windows in enumerate(texts.windows)
                if row in (0, 2)  # the texts of document b
            ]
        assert hits["sum"].item() == sum(right for right, _ in expected)
        assert loss["sum"].item() == pytest.approx(sum(nats for _, nats in expected), rel=1e-9)

"""Windows that several sets hold are scored once, and every number stays what it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from polars.testing import assert_frame_equal

from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation.language_model import evaluate_run
from normattn.lab.stats.measurements import sorted_rows
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig

from .make import make_set

L = 8


def texts() -> list[EvaluationSet]:
    """A short text, a long one, the last segment of the long one, and that by position."""
    random = np.random.default_rng(0)
    short, long = (list(random.integers(0, 16, (5, n + 1))) for n in (L, 4 * L))
    natural = make_set(long)
    return [
        make_set(short, protocol="train_length"),
        natural,
        replace(natural, protocol="last_segment", start=3 * L),
        replace(natural, protocol="by_position"),
    ]


@pytest.fixture
def model() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(CausalLMConfig(vocab_size=16, dim=16, layers=2, heads=2, train_length=L))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many windows the model was given at a time."""
    rows: list[int] = []
    scores = CausalLM.token_scores

    def counted(self: CausalLM, ids: torch.Tensor, first: int = 0) -> TokenScores:
        rows.append(len(ids))
        return scores(self, ids, first)

    monkeypatch.setattr(CausalLM, "token_scores", counted)
    return rows


def test_windows_in_common_are_read_once_under_each_method(
    model: CausalLM, asked: list[int]
) -> None:
    chosen = texts()
    measured = evaluate_run(model, chosen, seed=0, methods=("", "NTK"), tokens_per_batch=8 * L)
    # Five short windows together; of the long ones two, two and one.
    assert asked == 2 * [5, 2, 2, 1]
    singly = [
        evaluate_run(model, [one], seed=0, methods=(method,), factor=4.0, tokens_per_batch=8 * L)
        for method in ("", "NTK")
        for one in chosen
    ]
    for together, (alone,) in zip(measured, singly, strict=True):
        assert_frame_equal(sorted_rows(together), sorted_rows(alone), check_exact=True)

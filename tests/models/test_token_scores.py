"""Scores of a row's last tokens alone are those of all tokens, and go through the head alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.cross_entropy import TokenScores, token_scores
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig

VOCABULARY = 512


def _model() -> CausalLM:
    torch.manual_seed(0)
    config = CausalLMConfig(vocab_size=VOCABULARY, dim=64, layers=2, heads=2, train_length=64)
    return CausalLM(config)


@pytest.fixture
def headed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens went through the head at a time."""
    rows: list[int] = []

    def counted(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenScores:
        rows.append(len(hidden))
        return token_scores(hidden, weight, targets)

    monkeypatch.setattr("normattn.models.causal_lm.token_scores", counted)
    return rows


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("tokens", "first", "through"),
    [(256, 192, 64), (256, 130, 128), (256, 63, 256), (200, 150, 200), (64, 63, 64), (1, 0, 1)],
)
def test_last_tokens_have_the_same_scores_to_the_last_bit(
    tokens: int, first: int, through: int, bf16: bool, headed: list[int]
) -> None:
    model = _model()
    ids = torch.randint(VOCABULARY, (3, tokens + 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        whole, last = model.token_scores(ids), model.token_scores(ids, first)
    assert headed == [3 * tokens, 3 * through]
    assert last.loss.shape == last.correct.shape == (3, tokens - first)
    # Of bf16 and of other libraries nobody knows that they round a row alike among any others.
    close = 1e-2 if bf16 else 0.0 if torch.backends.mkl.is_available() else 1e-5  # type: ignore[no-untyped-call]
    torch.testing.assert_close(last.loss, whole.loss[:, first:], rtol=close, atol=close)
    assert torch.equal(last.correct, whole.correct[:, first:])


@pytest.mark.parametrize(("first", "through"), [(0, [8, 8, 4]), (7, [8, 8, 4]), (17, [4])])
def test_chunks_before_the_last_tokens_go_through_no_head(
    first: int, through: list[int], headed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normattn.models.causal_lm._SCORED_TOKENS", 16)
    monkeypatch.setattr("normattn.models.causal_lm.CHUNK", 8)
    model = _model()
    ids = torch.randint(VOCABULARY, (2, 21))
    whole = model.token_scores(ids)
    headed.clear()
    last = model.token_scores(ids, first)
    assert headed == 2 * through
    assert torch.equal(last.loss, whole.loss[:, first:])
    assert torch.equal(last.correct, whole.correct[:, first:])


@pytest.mark.parametrize("first", [-1, 20])
def test_no_token_after_the_first_is_refused(first: int) -> None:
    with pytest.raises(InputError, match=f"from {first} on were asked for, but a row predicts 20"):
        _model().token_scores(torch.zeros((1, 21), dtype=torch.int64), first)

"""Whole runs: plain cross-entropy under every method, undone again; nothing is read twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from torch import nn

from normattn.errors import InputError
from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation.language_model import evaluate_run
from normattn.lab.evaluation.scorer import ModelScorer, weights_digest
from normattn.lab.stats import MeasurementStore, measurements
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.score.spec import ScoreSpec

from .test_protocols import make_set, one, table

L = 8


@pytest.fixture
def model() -> CausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 16, "dim": 16, "layers": 2, "heads": 2, "dropout": 0.5}
    config = CausalLMConfig(**sizes, train_length=L, score=ScoreSpec.parse("KNA"))
    made = CausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def _sets(windows: int = 3) -> list[EvaluationSet]:
    """A short text, and a long one."""
    generator = np.random.default_rng(0)
    return [
        make_set(list(generator.integers(0, 16, (windows, length + 1))), protocol=protocol)
        for protocol, length in (("train_length", L), ("non_repeated", 4 * L))
    ]


def _assert_equal(found: list[pl.DataFrame], expected: list[pl.DataFrame]) -> None:
    """The same sums of the same cells in the same order; the order of a frame's rows is free."""
    for one_frame, other in zip(found, expected, strict=True):
        assert_frame_equal(
            measurements.sorted_rows(one_frame), measurements.sorted_rows(other), check_exact=True
        )


def test_scores_are_plain_cross_entropy_and_modes_are_restored(model: CausalLM) -> None:
    next(model.children()).eval()
    before = [part.training for part in model.modules()]
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 16, (3, 21)))
    scorer = ModelScorer(model)
    scores = scorer(ids)
    assert [part.training for part in model.modules()] == before
    with pytest.raises(InputError):  # a token outside the vocabulary
        scorer(torch.full((1, 5), 99))
    assert [part.training for part in model.modules()] == before
    model.eval()
    with torch.no_grad():
        logits = model(ids[:, :-1]).double()
    expected = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    torch.testing.assert_close(scores.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.correct, logits.argmax(-1) == ids[:, 1:])
    assert not scores.loss.requires_grad


def test_bf16_scores_are_close_and_another_evaluation(model: CausalLM, tmp_path: Path) -> None:
    store = MeasurementStore(tmp_path)
    both = [
        evaluate_run(model, _sets(), seed=0, store=store, precision=precision)
        for precision in ("fp32", "bf16")
    ]
    assert len(store) == 4
    for full, half in zip(*both, strict=True):
        assert (one(full, "settings"), one(half, "settings")) == ("fp32", "bf16")
        assert (table(half, "loss") != table(full, "loss")).any()
        np.testing.assert_allclose(table(half, "loss"), table(full, "loss"), rtol=0.1)


def test_every_method_is_evaluated_and_undone(model: CausalLM) -> None:
    weights, spec = weights_digest(model), model.config.score
    found = evaluate_run(model, _sets(), seed=3, methods=("", "YaRN", "ReRoPE", "logn+"))
    assert [(one(each, "method"), one(each, "protocol")) for each in found] == [
        (method, protocol)
        for method in ("", "YaRN", "ReRoPE", "logn+")
        for protocol in ("train_length", "non_repeated")
    ]
    whole = measurements.concat(found)
    told = {"row": "KNA", "weights": weights, "seed": 3, "train_length": L, "settings": "fp32"}
    assert {column: one(whole, column) for column in told} == told
    assert one(found[2], "score") == "KNA-YaRN(factor=4)@8"
    assert weights_digest(model) == weights
    assert model.config.score == spec
    plain = evaluate_run(model, _sets(), seed=3)
    _assert_equal(plain, found[:2])
    losses = [table(each, "loss") for each in found]
    assert len({each.tobytes() for each in losses[1::2]}) == 4  # each changes something beyond L
    np.testing.assert_array_equal(losses[6], losses[0])  # inference-time log-n: nothing within L


def test_the_sums_are_those_of_the_model_with_the_spec_built_in(model: CausalLM) -> None:
    config = model.config.model_copy(
        update={"score": model.config.score.with_method("YaRN", factor=4)}
    )
    built = CausalLM(config)
    built.load_state_dict(model.state_dict())
    direct = evaluate_run(built, _sets(), seed=0)
    stretched = evaluate_run(model, _sets(), seed=0, methods=("YaRN",))
    for statistic in ("accuracy", "loss"):
        for built_in, switched_on in zip(direct, stretched, strict=True):
            np.testing.assert_array_equal(table(built_in, statistic), table(switched_on, statistic))


def test_it_is_done_once(model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"methods": ("", "NTK"), "store": MeasurementStore(tmp_path)}
    told: list[pl.DataFrame] = []
    first = evaluate_run(model, _sets(), seed=0, **options)
    monkeypatch.setattr(CausalLM, "token_scores", None)
    again = evaluate_run(model, _sets(), seed=0, on_measured=told.append, **options)
    _assert_equal(again, first)
    _assert_equal(told, first)


def test_digests_tell_names_shapes_types_and_values_apart() -> None:
    def linear(change: Callable[[nn.Linear], object] = lambda _: None) -> str:
        torch.manual_seed(0)
        made = nn.Linear(2, 3)
        change(made)
        return weights_digest(made)

    assert linear() == linear()
    digests = {linear(), linear(lambda m: m.bias.data.add_(1e-7)), linear(lambda m: m.bfloat16())}
    assert len(digests | {weights_digest(nn.Sequential(nn.Linear(2, 3)))}) == 4


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


def test_windows_in_common_are_read_once_by_method(model: CausalLM, asked: list[int]) -> None:
    short, long = _sets(windows=5)
    last = replace(long, protocol="last_segment", start=3 * L)
    chosen = [short, long, last, replace(long, protocol="by_position")]
    measured = evaluate_run(model, chosen, seed=0, methods=("", "NTK"), tokens_per_batch=8 * L)
    # Five short windows together; of the long ones two, two and one.
    assert asked == 2 * [5, 2, 2, 1]
    singly = [
        evaluate_run(model, [one], seed=0, methods=(method,), factor=4.0, tokens_per_batch=8 * L)
        for method in ("", "NTK")
        for one in chosen
    ]
    _assert_equal(measured, [alone for (alone,) in singly])

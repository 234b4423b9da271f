from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normattn.data.evaluation_sets import EvaluationSet
from normattn.errors import InputError
from normattn.evaluation import (
    EvaluationStore,
    TokenScorer,
    evaluate_run,
    from_causal_lm,
    from_logits,
    weights_digest,
)
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.reports.records import AnyRecord
from normattn.score.spec import ScoreSpec

from .make import make_set

L = 8


@pytest.fixture
def model() -> CausalLM:
    torch.manual_seed(0)
    config = CausalLMConfig(
        vocab_size=16,
        dim=16,
        layers=2,
        heads=2,
        train_length=L,
        score=ScoreSpec.parse("KNA"),
        dropout=0.5,
    )
    made = CausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def _sets() -> list[EvaluationSet]:
    generator = np.random.default_rng(0)
    return [
        make_set(
            list(generator.integers(0, 16, (3, length + 1))), protocol=protocol, train_length=L
        )
        for protocol, length in (("train_length", L), ("non_repeated", 4 * L))
    ]


@pytest.mark.parametrize("wrap", [from_causal_lm, from_logits])
def test_scorers_agree_with_plain_cross_entropy(
    model: CausalLM, wrap: Callable[[CausalLM], TokenScorer]
) -> None:
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 16, (3, 21)))
    scores = wrap(model)(ids)
    model.eval()
    with torch.no_grad():
        logits = model(ids[:, :-1]).double()
    chances = torch.log_softmax(logits, dim=-1)
    expected = -chances.gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(scores.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.correct, logits.argmax(-1) == ids[:, 1:])
    assert not scores.loss.requires_grad


@pytest.mark.parametrize("wrap", [from_causal_lm, from_logits])
def test_each_submodules_mode_is_restored(
    model: CausalLM, wrap: Callable[[CausalLM], TokenScorer]
) -> None:
    model.train()
    next(model.children()).eval()
    before = [part.training for part in model.modules()]
    scorer = wrap(model)
    scorer(torch.zeros((1, 5), dtype=torch.int64))
    assert [part.training for part in model.modules()] == before
    with pytest.raises(InputError):  # a token outside the vocabulary
        scorer(torch.full((1, 5), 99))
    assert [part.training for part in model.modules()] == before


def test_any_callable_is_scored_one_window_at_a_time() -> None:
    shapes = []

    def logits(ids: Tensor) -> Tensor:
        shapes.append(tuple(ids.shape))
        return torch.zeros(*ids.shape, 4)

    scores = from_logits(logits)(torch.zeros((3, 600), dtype=torch.int64))
    assert shapes == [(1, 599)] * 3
    assert scores.loss.shape == (3, 599)
    torch.testing.assert_close(scores.loss, torch.full((3, 599), float(np.log(4))))


def test_bf16_scores_are_close_and_another_evaluation(model: CausalLM, tmp_path: Path) -> None:
    store = EvaluationStore(tmp_path)
    both = [
        evaluate_run(model, _sets(), run="r", seed=0, store=store, precision=precision)
        for precision in ("fp32", "bf16")
    ]
    assert len(store.records()) == 4
    for full, half in zip(*both, strict=True):
        assert half.precision == "bf16"
        assert half.loss != full.loss
        np.testing.assert_allclose(half.loss, full.loss, rtol=0.1)


def test_every_method_is_evaluated_and_undone(model: CausalLM) -> None:
    weights, spec = weights_digest(model), model.config.score
    records = evaluate_run(
        model, _sets(), run="run", seed=3, methods=("", "YaRN", "ReRoPE", "logn+")
    )
    assert [(r.method, r.protocol) for r in records] == [
        (method, protocol)
        for method in ("", "YaRN", "ReRoPE", "logn†")
        for protocol in ("train_length", "non_repeated")
    ]
    assert {r.variant for r in records} == {"KNA"}
    assert records[2].spec == "KNA-YaRN(factor=4)@8"
    assert all(r.weights == weights and r.seed == 3 for r in records)
    assert weights_digest(model) == weights
    assert model.config.score == spec
    plain = evaluate_run(model, _sets(), run="run", seed=3)
    assert plain == records[:2]
    assert len({r.loss for r in records[1::2]}) == 4  # every method changes something beyond L
    assert records[6].loss == records[0].loss  # post-hoc log-n changes nothing within L


def test_the_records_are_those_of_the_model_with_the_spec_built_in(model: CausalLM) -> None:
    config = model.config.model_copy(
        update={"score": model.config.score.with_method("YaRN", factor=4)}
    )
    built = CausalLM(config)
    built.load_state_dict(model.state_dict())
    direct = evaluate_run(built, _sets(), run="run", seed=0)
    stretched = evaluate_run(model, _sets(), run="run", seed=0, methods=("YaRN",))
    assert [r.loss for r in direct] == [r.loss for r in stretched]


def test_nothing_is_scored_again(
    model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EvaluationStore(tmp_path)
    told: list[AnyRecord] = []
    first = evaluate_run(model, _sets(), run="r", seed=0, methods=("", "NTK"), store=store)
    monkeypatch.setattr(CausalLM, "token_scores", None)
    again = evaluate_run(
        model, _sets(), run="r", seed=0, methods=("", "NTK"), store=store, on_record=told.append
    )
    assert again == first == told
    monkeypatch.undo()
    with torch.no_grad():
        next(model.parameters()).add_(0.5)
    assert evaluate_run(model, _sets(), run="r", seed=0, store=store) != first[:2]


def test_digests_tell_names_shapes_types_and_values_apart() -> None:
    def linear(change: Callable[[nn.Linear], object] = lambda _: None) -> str:
        torch.manual_seed(0)
        made = nn.Linear(2, 3)
        change(made)
        return weights_digest(made)

    assert linear() == linear()
    digests = {linear(), linear(lambda m: m.bias.data.add_(1e-7)), linear(lambda m: m.bfloat16())}
    assert len(digests | {weights_digest(nn.Sequential(nn.Linear(2, 3)))}) == 4


def test_no_set_is_refused(model: CausalLM) -> None:
    with pytest.raises(InputError, match="nothing to evaluate"):
        evaluate_run(model, [], run="r", seed=0)

"""Training to translate: shares add up to the batch, fills vocabularies, learns, refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data.pairs_helpers import multi_layout
from normattn.errors import InputError, Interrupted
from normattn.lab.data.pairs import PairData, prepare_pairs
from normattn.lab.runs import read_metrics
from normattn.lab.training.tasks.translation import (
    TranslationConfig,
    TranslationWorkload,
    epochs,
    train_translation,
)
from normattn.models.pretrained import load_as
from normattn.models.translator import Translator


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    place = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMATTN_CACHE", str(place / "cache"))
        yield {
            "steps": 25,
            "batch_tokens": 1200,
            "log_every": 1,
            "model": {"dim": 16, "layers": 1, "heads": 2},
            "data": {"corpus": str(multi_layout(place / "corpus", train=61)), "vocab_size": 300},
            "optimiser": {"lr": 1e-2},
            "schedule": {"warmup_steps": 2},
        }


def made(settings: dict[str, Any], **changes: Any) -> tuple[TranslationConfig, PairData]:
    config = TranslationConfig.parse({**settings, **changes})
    return config, prepare_pairs(config.data)


def test_shares_add_up_to_the_batch(settings: dict[str, Any]) -> None:
    config, data = made(settings)
    whole = _task(config, data, 1)
    found = []
    for shares in (1, 8):
        task = _task(config, data, shares)
        task.model.load_state_dict(whole.model.state_dict())
        for step in range(1, 4):
            task.model.zero_grad()
            sums: dict[str, float] = {"loss": 0.0}
            for share in range(shares):
                loss, metrics = task.loss(task.batch(step, share, shares))
                (loss / shares).backward()
                sums["loss"] += float(loss.detach()) / shares
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + float(value) / shares
            found.append((sums, task.model.source_embedding.weight.grad))
    for (one, gradient), (eight, gradients) in zip(found[:3], found[3:], strict=True):
        assert one == pytest.approx(eight, rel=1e-9)
        torch.testing.assert_close(gradient, gradients, rtol=1e-7, atol=1e-12)


def _task(config: TranslationConfig, data: PairData, shares: int) -> Any:
    task = TranslationWorkload().task(config, data, torch.device("cpu"), shares)
    task.model.double()
    return task


def test_the_loss_is_the_mean_over_the_tokens_of_the_batch(settings: dict[str, Any]) -> None:
    config, data = made(settings, label_smoothing=0.2)
    task = _task(config, data, 1)
    batch = task.batch(1, 0, 1)
    loss, metrics = task.loss(batch)
    logs = torch.log_softmax(task.model(batch.source, batch.target[:, :-1]), -1)
    wanted = batch.target[:, 1:]
    real = wanted != 0
    assert int(real.sum()) == int(batch.targets)
    nll = -logs.gather(-1, wanted[..., None]).squeeze(-1)[real].mean()
    smooth = 0.8 * nll - 0.2 * logs.mean(-1)[real].mean()
    torch.testing.assert_close(loss, smooth)
    torch.testing.assert_close(metrics["nll"], nll, check_dtype=False)
    hits = ((logs.argmax(-1) == wanted) & real).sum() / real.sum()
    assert float(metrics["accuracy"]) == pytest.approx(float(hits))


def test_a_whole_training(settings: dict[str, Any], tmp_path: Path) -> None:
    config, data = made(settings)
    result = train_translation(config, tmp_path / "run", show_progress=False)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 25
    assert lines[-1]["nll"] < 0.8 * lines[0]["nll"]
    assert result.metrics["accuracy"] > lines[0]["accuracy"]
    model = load_as(Translator, tmp_path / "run" / "model")
    assert model.config == config.model
    assert (tmp_path / "run" / "source.tokeniser.json").is_file()
    assert TranslationWorkload().cost(config).parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert epochs(config, data) > 2


def test_it_does_not_go_on_with_other_pairs(settings: dict[str, Any], tmp_path: Path) -> None:
    place = multi_layout(tmp_path / "corpus", train=61)
    config = TranslationConfig.parse(
        {**settings, "data": {"corpus": str(place), "vocab_size": 300}}
    )
    with pytest.raises(Interrupted):
        train_translation(config, tmp_path / "run", should_stop=lambda: True, show_progress=False)
    multi_layout(place, train=60)
    with pytest.raises(InputError, match="was begun on other data"):
        train_translation(config, tmp_path / "run", show_progress=False)


def test_vocabularies_follow_the_data(settings: dict[str, Any]) -> None:
    config, _ = made(settings)
    model = config.model
    assert (model.source_vocab, model.target_vocab, model.shared_vocabulary) == (300, 300, True)
    assert model.train_length == config.data.max_length
    apart = {**settings["data"], "target_vocab_size": 280}
    model = TranslationConfig.parse({**settings, "data": apart}).model
    assert (model.source_vocab, model.target_vocab, model.shared_vocabulary) == (300, 280, False)
    # What a run's config.json says is read back.
    config = TranslationConfig.parse({**settings, "data": apart})
    assert TranslationConfig.parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"dim": 16, "layers": 1, "source_vocab": 5}}, "source_vocab 5"),
        ({"data": {"vocab_size": 100}}, "vocab_size"),
        ({"data": {"corpora": "x"}}, "corpora"),
        ({"batch_size": 3}, "batch_size"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
    ],
)
def test_bad_settings(settings: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        TranslationConfig.parse({**settings, **changes})


def test_batches_that_hold_no_sentence(settings: dict[str, Any], tmp_path: Path) -> None:
    config, _ = made(settings, batch_tokens=16)
    with pytest.raises(InputError, match="more than batch_tokens"):
        train_translation(config, tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()

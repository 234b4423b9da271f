"""Training a classifier: it learns, resumes exactly, and says what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.relation_files import write_relations
from normattn.errors import InputError, Interrupted
from normattn.lab.data.relations import prepare_relations
from normattn.lab.evaluation.classification import DevelopmentProbe
from normattn.lab.training.tasks.classification import (
    ClassificationConfig,
    ClassificationWorkload,
    train_classifier,
)
from normattn.models.classifier import Classifier
from normattn.models.pretrained import load_as


def config(folder: Path, **changes: Any) -> ClassificationConfig:
    """A small classifier of the documents in `folder`."""
    fields: dict[str, Any] = {
        "model": {"dim": 16, "layers": 1, "heads": 2, "labels": 3, "dropout": 0.1},
        "data": {"corpus": str(folder), "vocab_size": 120, "max_tokens": 16},
        "batch_size": 4,
        "steps": 40,
        "optimiser": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2},
    }
    return ClassificationConfig.parse({**fields, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_relations(tmp_path_factory.mktemp("relations") / "data", count=24)


def test_it_learns_what_the_words_say_and_leaves_a_model(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    settings = config(folder)
    probe = DevelopmentProbe(prepare_relations(settings.data), every=20)
    result = train_classifier(settings, tmp_path / "run", probes=[probe], show_progress=False)
    assert result.loss < 0.2
    lines = (tmp_path / "run" / "development.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"micro_f1": 1.0' in lines[-1]
    model = load_as(Classifier, tmp_path / "run" / "model")
    assert model.config == settings.model
    assert '"unseen"' in (tmp_path / "run" / "labels.json").read_text()


def test_a_stopped_run_goes_on_to_the_same_digits(folder: Path, tmp_path: Path) -> None:
    settings = config(folder, steps=12)
    train_classifier(settings, tmp_path / "whole", show_progress=False)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 5

    with pytest.raises(Interrupted):
        train_classifier(settings, tmp_path / "parts", should_stop=stop, show_progress=False)
    train_classifier(settings, tmp_path / "parts", show_progress=False)
    whole, parts = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_accumulated_micro_batches_are_the_same_batch(folder: Path, tmp_path: Path) -> None:
    fields = {"steps": 3, "model": {"dim": 16, "layers": 1, "heads": 2, "labels": 3}}
    losses = [
        train_classifier(
            config(folder, accumulate=n, **fields), tmp_path / str(n), show_progress=False
        ).loss
        for n in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_model_takes_vocabulary_and_length_from_the_data(folder: Path) -> None:
    settings = config(folder)
    assert (settings.model.vocab_size, settings.model.train_length) == (120, 16)
    with pytest.raises(InputError, match=r"model\.vocab_size is 99 .* 120"):
        config(folder, model={"dim": 16, "layers": 1, "labels": 3, "vocab_size": 99})


def test_a_model_with_another_number_of_labels_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path
) -> None:
    wrong = config(folder, model={"dim": 16, "layers": 1, "labels": 4})
    with pytest.raises(InputError, match=r"model.labels is 4, but .* has 3 labels"):
        train_classifier(wrong, tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_training_split_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="24 documents, fewer than one batch of 64"):
        train_classifier(config(folder, batch_size=64), tmp_path / "run", show_progress=False)


def test_the_cost_is_known_without_data(tmp_path: Path) -> None:
    cost = ClassificationWorkload().cost(config(tmp_path / "nowhere"))
    assert cost.trained == 40 * 4 * 16
    assert cost.parameters > 0

"""Runs of classifiers, translators and Vision Transformers, looked into on data held out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from data.helpers import multi_layout, write_relations
from normattn.cli.inspect import inspect_model
from normattn.cli.inspect_inputs import KINDS
from normattn.cli.options import Inspect
from normattn.errors import InputError
from normattn.lab.diagnostics.attention import attention_weights
from normattn.lab.diagnostics.inspection import by_head, totals
from normattn.lab.runs import RunDirectory
from normattn.lab.stats import measurements
from normattn.lab.training import train_model
from normattn.lab.training.tasks.classification import ClassificationConfig, VisionTrainingConfig
from normattn.lab.training.tasks.translation import TranslationConfig
from normattn.models.pretrained import load_any

pytestmark = pytest.mark.usefixtures("runs_here")
LOOP: dict[str, Any] = {"steps": 2, "device": "cpu", "schedule": {"warmup_steps": 1}}
MODEL: dict[str, Any] = {"dim": 8, "layers": 2, "heads": 2, "score": "KNA-RealFormer"}
CHOICES: dict[str, Any] = {"windows": 3, "bins": 4, "max_tokens": 64}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("looked-into")


def trained(config: Any, run: Path) -> Path:
    train_model(config, run, show_progress=False)
    return run


@pytest.fixture(scope="module")
def translation(place: Path) -> Path:
    data = {"corpus": str(multi_layout(place / "pairs")), "vocab_size": 280}
    fields = {**LOOP, "batch_tokens": 1300, "model": MODEL, "data": data}
    return trained(TranslationConfig.parse(fields), place / "translation")


@pytest.fixture(scope="module")
def classification(place: Path) -> Path:
    corpus = str(write_relations(place / "relations", count=12))
    data = {"corpus": corpus, "vocab_size": 120, "max_tokens": 16}
    fields = {**LOOP, "batch_size": 4, "model": {**MODEL, "labels": 3}, "data": data}
    return trained(ClassificationConfig.parse(fields), place / "classification")


def look(run: Path, out: Path, **choices: Any) -> pl.DataFrame:
    inspect_model(Inspect(run=run, out=out, **{**CHOICES, **choices}))
    names = {path.name for path in (out / "figures").iterdir()}
    assert "layers_entropy_share.png" in names
    assert any(name.startswith("attention") for name in names)
    return measurements.read(out / measurements.FILE).filter(protocol="inspect")


def layers(measured: pl.DataFrame) -> list[str]:
    found = measured.select("layer", "factor.layer").unique().sort("layer").rows()
    assert [layer for layer, _ in found] == list(range(len(found)))
    return [name for _, name in found]


def read(run: Path) -> tuple[Any, Any]:
    """The model, and what is read of its data."""
    stored, model = RunDirectory.existing(run), load_any(run / "model")
    settings, inputs_of, _ = KINDS[stored.kind]
    config = settings.parse(stored.config)
    return model, inputs_of(config, Inspect(run=run, windows=3), model, config.prepare())


def assert_entropies(measured: pl.DataFrame, weights: list[dict[str, torch.Tensor]]) -> None:
    """They are the means of those of the weights of each text, pair by pair."""
    for layer, name in enumerate(layers(measured)):
        rows = [-torch.special.xlogy(each[name], each[name]).sum(-1) for each in weights]
        expected = torch.cat(rows, -1).mean(-1)
        assert by_head(measured, "entropy", layer) == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_translator(translation: Path, tmp_path: Path) -> None:
    measured = look(translation, tmp_path / "out", bins=1)
    assert [name.replace(".sublayer", "") for name in layers(measured)] == [
        *("encoder.0.mixer", "encoder.1.mixer"),
        *("decoder.0.mixer", "decoder.0.cross", "decoder.1.mixer", "decoder.1.cross"),
    ]
    model, found = read(translation)
    weights = [attention_weights(model, row, found.read, found.length) for row in found.rows]
    assert_entropies(measured, weights)
    for name, alpha in weights[0].items():
        assert alpha.shape[1:] == tuple(map(len, found.words(name)))


def test_what_a_translator_does_not_take(translation: Path, tmp_path: Path) -> None:
    for option, value in (("length", 4), ("text", tmp_path / "text.txt")):
        with pytest.raises(InputError, match=f"--{option} is for language models"):
            look(translation, tmp_path / "out", **{option: value})
    with pytest.raises(InputError, match="layers 0 to 5"):
        look(translation, tmp_path / "out", attention="6,0")


def test_a_classifier(classification: Path, tmp_path: Path) -> None:
    """Padding counts for nothing: documents together are looked at as each alone."""
    measured = look(classification, tmp_path / "out", cosines=True)
    assert measured["factor.texts"][0].startswith("3 validation documents of ")
    assert [len(by_head(measured, "entropy", layer)) for layer in (0, 1)] == [2, 2]
    model, found = read(classification)
    alone = [row[row != 0] for row in found.rows]  # The padding is piece 0.
    assert len({len(row) for row in alone}) > 1
    assert_entropies(measured, [attention_weights(model, row, model, len(row)) for row in alone])


def test_a_vision_transformer(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the images are scikit-learn's")
    data = {"source": "digits", "max_images": 40}
    model = {**MODEL, "score": "KNA-NoPE", "patch": 4}
    fields = {**LOOP, "batch_size": 4, "model": model, "data": data}
    vision = trained(VisionTrainingConfig.parse(fields), place / "vision")
    measured = look(vision, tmp_path / "out", attention="0,1")
    assert measured["factor.texts"][0] == "3 validation images of digits"
    assert totals(measured, "entropy", 0)[1][0].tolist() == [3, 3, 6, 3]
    with pytest.raises(InputError, match="--text is for language models"):
        look(vision, tmp_path / "out", text=tmp_path / "text.txt")


def test_missing_data(place: Path, translation: Path, classification: Path, tmp_path: Path) -> None:
    for run, data in ((translation, "pairs"), (classification, "relations")):
        shutil.move(place / data, tmp_path / data)
        with pytest.raises(InputError, match=data):
            look(run, tmp_path / "out")
        shutil.move(tmp_path / data, place / data)

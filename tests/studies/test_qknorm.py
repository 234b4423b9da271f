"""The QK-Norm study: its cells, the scores of each attention, and stopping it anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data.pairs_helpers import multi_layout
from normattn.errors import InputError
from normattn.lab.stats import measurements
from normattn.lab.studies.qknorm import STUDY, collect, resolve
from normattn.lab.studies.qknorm.rows import parts
from normattn.lab.studies.qknorm.settings import MULTIPLES, SCORES, SWEPT
from normattn.lab.studies.qknorm.translation import RateCell, TranslateCell, scores_of
from normattn.lab.studies import preset as presets
from normattn.lab.sweep.run import Request, Sweep
from studies.inprocess import files, run, run_killed

PRESET = """
summary = "for tests"
scores = ["Baseline", "KNA"]

[training]
steps = 6
batch_tokens = 1300
checkpoint_seconds = 0
device = "cpu"

[training.model]
dim = 8
layers = 1
heads = 2

[training.data]
corpus = "{corpus}"
vocab_size = 280

[training.schedule]
warmup_steps = 1

[evaluation]
max_sentences = 4
beam = 1

[rates]
scores = ["Baseline"]
multiples = [1, 8]
max_sentences = 6
training = {{ steps = 3, inspect_every = 1 }}

[vision]
scores = ["KNA"]

[vision.training]
steps = 2
batch_size = 4
checkpoint_seconds = 0
device = "cpu"
model = {{ dim = 8, layers = 1, heads = 2, patch = 4, pool = "mean" }}
data = {{ source = "digits", max_images = 60 }}
schedule = {{ warmup_steps = 1 }}
"""


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A preset file of cells that train in a moment."""
    pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu")
    pytest.importorskip("sklearn", reason="the images are scikit-learn's")
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "own.toml"
    path.write_text(PRESET.format(corpus=multi_layout(tmp_path / "corpus")))
    return str(path)


def sweep(preset: str, out: Path, **changes: Any) -> Sweep:
    return resolve(Request(preset, out=out, changes=changes))


def test_every_preset_can_be() -> None:
    assert presets.names("qknorm") == ["gpu", "laptop", "multi30k", "smoke"]
    for name in presets.names("qknorm"):
        cells = resolve(Request(name, seeds=(0,))).cells
        assert len({(cell.variant, cell.seed) for cell in cells}) == len(cells)
    cells = resolve(Request("laptop")).cells
    rows = [cell.variant for cell in cells if isinstance(cell, TranslateCell)]
    assert list(dict.fromkeys(rows)) == list(SCORES)
    swept = {(cell.score, cell.rate) for cell in cells if isinstance(cell, RateCell)}
    assert swept == {(score, rate) for score in SWEPT for rate in MULTIPLES}


@pytest.mark.parametrize(
    ("variant", "decoder", "across"),
    [
        ("QKBatchNorm", "Baseline", "KBatchNorm-NoPE"),
        ("QBatchNorm", "Baseline", "Baseline-NoPE"),
        ("KInstanceNorm", "Baseline", "KInstanceNorm-NoPE"),
        ("QKInstanceNorm(gain=false)-logn", "Baseline-logn", "KInstanceNorm(gain=false)-logn-NoPE"),
    ],
)
def test_norms_across_the_sequence_stay_out_of_the_decoder(
    variant: str, decoder: str, across: str
) -> None:
    assert scores_of(variant) == {
        "model.score": variant,
        "model.decoder_score": decoder,
        "model.cross_score": across,
    }


def test_other_scores_are_everywhere(preset: str, tmp_path: Path) -> None:
    assert scores_of("KNA-logn") == {"model.score": "KNA-logn"}
    cell = sweep(preset, tmp_path / "out").cells[1]
    assert isinstance(cell, TranslateCell)
    model = cell.training_config.model
    assert model.decoder_score is not None
    assert model.cross_score is not None
    assert [score.name for score in (model.score, model.decoder_score, model.cross_score)] == [
        *("KNA", "KNA", "KNA-NoPE")
    ]


def test_every_default_row_can_be_trained(preset: str, tmp_path: Path) -> None:
    rows = sweep(preset, tmp_path / "out", scores=list(SCORES)).cells
    names = [cell.variant for cell in rows if isinstance(cell, TranslateCell)]
    assert names == list(SCORES)


def test_a_rate_multiplies_the_learning_rate(preset: str, tmp_path: Path) -> None:
    cells = sweep(preset, tmp_path / "out").cells
    swept = [cell for cell in cells if isinstance(cell, RateCell)]
    assert [cell.variant for cell in swept] == ["Baseline@x1", "Baseline@x8"]
    assert [cell.training_config.optimiser.lr for cell in swept] == [1e-3, 8e-3]
    assert {cell.training_config.steps for cell in swept} == {3}
    assert [cell.identity("training").row for cell in swept] == ["Baseline"] * 2
    assert [cell.identity("training").factors for cell in swept] == [
        {"experiment": "rates", "rate": rate, "learning_rate": rate * 1e-3} for rate in (1.0, 8.0)
    ]
    chosen = resolve(Request(preset, ("KNA",), out=tmp_path / "out")).cells
    assert [cell.variant for cell in chosen] == ["KNA", "vision KNA"]


CLIPPED = "Baseline+Muon+QK-Clip"


def test_rows_are_trained_with_what_stands_after_a_plus(preset: str, tmp_path: Path) -> None:
    rows = ["Baseline", "Baseline+QK-Clip", "Baseline+QK-Clip+Muon"]
    changes = {
        **dict.fromkeys(("scores", "rates.scores", "vision.scores"), rows),
        "trained_with.Muon.optimiser.lr": 2e-3,
        "trained_with.QK-Clip.qk_clip": 5,
    }
    cells = sweep(preset, tmp_path / "out", **changes).cells
    found = {cell.variant: cell.training_config for cell in cells}
    assert [name for name in found if name.startswith(CLIPPED)] == [
        *(CLIPPED, f"{CLIPPED}@x1", f"{CLIPPED}@x8")
    ]
    assert found.keys() >= {f"vision {CLIPPED}", "Baseline@x8", "Baseline+QK-Clip@x8"}
    for name, config in found.items():
        assert config.optimiser.name == ("muon" if "Muon" in name else "adamw"), name
        assert config.qk_clip == (5 if "QK-Clip" in name else None), name
        # Multiples are of the row's own learning rate.
        own = 2e-3 if "Muon" in name else 1e-3
        assert config.optimiser.lr == own * (8 if name.endswith("@x8") else 1), name
    scores = {config.scores for name, config in found.items() if "vision" not in name}
    assert len(scores) == 1
    (last,) = (cell for cell in cells if cell.variant == f"{CLIPPED}@x8")
    assert isinstance(last, RateCell)
    identity = last.identity("training")
    assert (identity.row, identity.score) == (CLIPPED, "Baseline")
    assert identity.factors == {
        "experiment": "rates",
        "rate": 8.0,
        "learning_rate": 0.016,
        "qk_clip": 5.0,
    }
    chosen = resolve(Request(preset, ("Baseline+QK-Clip",), out=tmp_path, changes=changes)).cells
    assert {cell.variant.removeprefix("vision ").partition("@")[0] for cell in chosen} == {
        "Baseline+QK-Clip"
    }


def test_a_plus_that_joins_nothing() -> None:
    assert parts("KNA-logn+") == ("KNA-logn+", ())
    assert parts("Baseline-RoPE(base=1e+06)+Muon") == ("Baseline-RoPE(base=1e+06)", ("Muon",))


def test_images_may_have_more_seeds(preset: str, tmp_path: Path) -> None:
    def seeds(request: Request) -> list[int]:
        return [cell.seed for cell in resolve(request).cells if cell.variant == "vision KNA"]

    changes = {"vision.seeds": 3}
    assert seeds(Request(preset, out=tmp_path / "out", changes=changes)) == [0, 1, 2]
    assert seeds(Request(preset, seeds=(4,), out=tmp_path / "out", changes=changes)) == [4]


def test_stopped_anywhere_it_is_the_same(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    run(STUDY, sweep(preset, whole))
    assert run_killed(STUDY, sweep(preset, tmp_path / "broken"), 5, monkeypatch) > 1
    found = files(whole)
    assert files(tmp_path / "broken") == found
    for figure in ("bleu_by_score", "loss_by_learning_rate", "training_loss", "largest_logit"):
        assert f"name='{figure}'".encode() in found["figures.txt"], figure
    assert b"name='attention_entropy'" in found["figures.txt"]
    assert {"table.csv", "rates.csv", "tolerance.csv", "vision.csv"} <= found.keys()
    tables = json.loads(found["table.json"])["tables"]
    assert [row["row"] for row in tables["table"]] == ["Baseline", "KNA"]
    assert tables["table"][1]["change_loss"]["units"] == 4
    assert [row["row"] for row in tables["rates"]] == ["Baseline ×1", "Baseline ×8"]
    assert tables["rates"][0]["loss"]["units"] == 6
    assert tables["rates"][1]["largest_logit"]["value"] > 0
    assert 0 < tables["rates"][1]["last_entropy_share"]["value"] <= 1
    assert [row["row"] for row in tables["vision"]] == ["KNA ×1"]
    run(STUDY, sweep(preset, whole, scores=["Baseline", "KNA", CLIPPED]))
    tables = json.loads(files(whole)["table.json"])["tables"]
    assert [row["row"] for row in tables["table"]] == ["Baseline", "KNA", CLIPPED]
    kept = whole / "cells" / "KNA" / "seed0" / "evaluations" / "translations.json"
    assert len(json.loads(kept.read_text())["translations"]) == 4
    _damaged(whole)


def _damaged(out: Path) -> None:
    """What cannot be read is named, and two test sets are not mixed."""
    (place,) = (out / "cells" / "KNA").glob("*/evaluations/translation.parquet")
    other = measurements.read(place).with_columns(pl.lit("other").alias("data"))
    measurements.write(place, other)
    with pytest.raises(InputError, match="translation was measured on 2 data sets"):
        collect(out)
    place.write_text("nothing")
    with pytest.raises(InputError, match=r"translation\.parquet is no frame"):
        collect(out)


def test_bad_input(preset: str, tmp_path: Path) -> None:
    for changes, said in (
        ({"rates.multiples": [2, 1]}, "multiples must rise"),
        ({"training.model.score": "KNA"}, "varied by the tables"),
        ({"training.model.cross_score": "KNA"}, "varied by the tables"),
        ({"training.steps": 0}, "steps"),
        ({"training.batch_size": 3}, "batch_size"),
        ({"rates.training": {"step": 3}}, "step"),
        ({"scores": ["Baseline", "KNB"]}, "KNB"),
        ({"scores": ["KNA", "KNA"]}, "named twice"),
        ({"scores": ["KNA-YaRN"]}, "applied after training"),
        ({"scores": ["KNA-logn++Muon"]}, r"KNA-logn\+ holds logn"),
        ({"scores": ["Baseline+Moun"]}, r"did you mean Muon\?.* \(in Baseline\+Moun\)"),
        ({"scores": ["Baseline+Muon+Muon"]}, "names something twice"),
        ({"scores": ["Baseline+Muon+QK-Clip", "Baseline+QK-Clip+Muon"]}, "is named twice"),
        ({"scores": ["QKRMSNorm+QK-Clip"]}, "its norm undoes it"),
        ({"vision.scores": ["QKRMSNorm+QK-Clip"]}, "its norm undoes it"),
        ({"trained_with.Muon.optimiser.name": "moun", "scores": ["KNA+Muon"]}, "moun"),
        ({"trained_with.Wide.model.score": "KNA"}, "varied by the tables"),
    ):
        with pytest.raises(InputError, match=said):
            sweep(preset, tmp_path / "out", **changes)
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(preset, methods=("YaRN",)))
    with pytest.raises(InputError, match="did you mean laptop"):
        resolve(Request("latop"))

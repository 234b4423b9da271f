"""`reproduce rmsnorm`: what it trains, what it says, and that stopping it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data.relation_files import write_relations
from normattn.errors import InputError
from normattn.lab.stats import collected, measurements
from normattn.lab.studies.rmsnorm import NORMS, STUDY, TIMED, NormCell, TimeCell, collect, resolve
from normattn.lab.studies.rmsnorm.measuring import whole_time
from normattn.lab.studies import preset as presets
from normattn.lab.sweep.run import Request, Sweep
from studies.inprocess import files, run, run_killed

pytest.importorskip("torchmetrics")

PRESET = """
summary = "for tests"
seeds = 2

[training]
steps = 6
batch_size = 4
checkpoint_seconds = 0
device = "cpu"

[training.model]
dim = 8
layers = 1
heads = 1

[training.data]
corpus = "{corpus}"
vocab_size = 120
max_tokens = 16

[training.schedule]
warmup_steps = 1

[evaluation]
every = 3

[timing]
rounds = 2
"""


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset file of small documents."""
    folder = tmp_path_factory.mktemp("rmsnorm")
    corpus = write_relations(folder / "data", count=12)
    path = folder / "tiny.toml"
    path.write_text(PRESET.format(corpus=corpus))
    return path


def sweep(preset: Path, out: Path, **asked: Any) -> Sweep:
    return resolve(Request(preset=str(preset), out=out, **asked))


def test_both_norms_are_trained_alike_and_then_timed(preset: Path, tmp_path: Path) -> None:
    cells = sweep(preset, tmp_path).cells
    assert [(cell.variant, cell.seed) for cell in cells] == [
        *(("LayerNorm", 0), ("RMSNorm", 0), ("LayerNorm", 1), ("RMSNorm", 1)),
        (TIMED, 0),
    ]
    layer, rms = (cell.training_config.model_dump() for cell in cells[:2])
    assert (layer["model"].pop("norm"), rms["model"].pop("norm")) == ("layer", "rms")
    assert layer == rms
    assert layer["model"]["labels"] == 3
    timed = cells[-1]
    assert isinstance(timed, TimeCell)
    assert timed.norms == tuple(NORMS)
    assert type(cells[0]) is NormCell


def test_one_norm_alone_is_not_timed(preset: Path, tmp_path: Path) -> None:
    cells = sweep(preset, tmp_path, variants=("rmsnorm",), seeds=(7,)).cells
    assert [(cell.variant, cell.seed) for cell in cells] == [("RMSNorm", 7)]
    with pytest.raises(InputError, match="no norm 'BatchNorm' here; there are LayerNorm, RMSNorm"):
        sweep(preset, tmp_path, variants=("BatchNorm",))


def test_every_preset_resolves_and_those_that_say_so_have_the_source_size(tmp_path: Path) -> None:
    for name in presets.names("rmsnorm"):
        made = resolve(Request(preset=name, out=tmp_path))
        parameters = {made.stages(cell)[0].cost.parameters for cell in made.cells[:2]}
        if name != "smoke":
            assert all(count == pytest.approx(7.92e6, rel=0.01) for count in parameters)
            assert len({cell.seed for cell in made.cells[:-1]}) >= 3


def test_what_a_preset_may_not_say_and_data_that_is_missing(preset: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the norm and the seed are varied by the table"):
        sweep(preset, tmp_path, changes={"training.model.norm": "rms"})
    with pytest.raises(InputError, match="nowhere does not exist"):
        sweep(preset, tmp_path, changes={"training.data.corpus": "nowhere"})
    with pytest.raises(InputError, match="chooses its own methods"):
        sweep(preset, tmp_path, methods=("YaRN",))


def test_stopped_anywhere_it_is_the_same(
    preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(STUDY, sweep(preset, tmp_path / "whole"))
    # Times differ from run to run: those of the unbroken one are given to the other.
    timed = Path("cells") / TIMED / "seed0" / "evaluations" / "step time.parquet"
    (tmp_path / "parts" / timed).parent.mkdir(parents=True)
    (tmp_path / "parts" / timed).write_bytes((tmp_path / "whole" / timed).read_bytes())
    assert run_killed(STUDY, sweep(preset, tmp_path / "parts"), 9, monkeypatch) > 1
    for variant in NORMS:
        for name in ("evaluations/classification.parquet", "metrics.jsonl", "development.jsonl"):
            place = Path("cells") / variant / "seed1" / name
            assert (tmp_path / "parts" / place).read_bytes() == (
                tmp_path / "whole" / place
            ).read_bytes()
    whole, parts = files(tmp_path / "whole"), files(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert whole.keys() == {
        *("measurements.parquet", "table.md", "table.csv", "table.json", "figures.txt")
    }
    rows = json.loads(whole["table.json"])["tables"]["table"]
    assert [row["row"] for row in rows] == ["LayerNorm", "RMSNorm"]
    for row in rows:
        assert row["micro_f1"]["seeds"] == [0, 1]
        assert row["step_ms"]["units"] == 2
        assert row["step_ms"]["low"] <= row["step_ms"]["value"] <= row["step_ms"]["high"]
    assert "RMSNorm costs a little F1 (0.26 points)" in whole["table.md"].decode()
    # All but the time of a training is the same to the last bit.
    same = [_timeless(tmp_path / name) for name in ("whole", "parts")]
    assert same[0].equals(same[1])
    with pytest.raises(InputError, match="holds tests of 2 data sets; report them apart"):
        _of_other_data(tmp_path / "parts")


def _timeless(out: Path) -> pl.DataFrame:
    measured = measurements.sorted_rows(STUDY.measurements(out))
    assert set(measured["protocol"]) == {
        *("classification", "training", "development", "step time")
    }
    return measured.filter(pl.col("statistic") != "training_seconds")


def _of_other_data(out: Path) -> None:
    """Give one model another test set."""
    path = out / "cells" / "RMSNorm" / "seed1" / "evaluations" / "classification.parquet"
    measurements.write(path, measurements.read(path).with_columns(pl.lit("other").alias("data")))
    assert collected(out).height
    collect(out)


def test_a_resumed_training_took_its_steps_at_its_own_pace() -> None:
    lines = [
        *({"step": 4, "seconds": 8.0}, {"step": 6, "seconds": 12.0}),
        *({"step": 5, "seconds": 1.0}, {"step": 10, "seconds": 11.0}),
    ]
    assert whole_time(lines, 10) == pytest.approx(20.0)
    assert whole_time([], 10) is None

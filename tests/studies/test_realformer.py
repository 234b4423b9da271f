"""The RealFormer study: its cells, and that stopping it anywhere changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from normattn.studies._realformer_settings import ROWS
from normattn.studies._realformer_stages import FAILURE

from normattn.errors import InputError
from normattn.studies.realformer import EncoderCell, GridCell, resolve
from normattn.sweep import presets
from normattn.sweep.study import Request, Sweep
from studies.inprocess import files, run, run_killed

PRESET = """
summary = "for tests"

[training]
steps = 4
batch_size = 4
checkpoint_seconds = 0
device = "cpu"

[training.model]
dim = 8
layers = 2
heads = 2
norm = "layer"
train_length = 8

[training.data]
corpus = "{corpus}"
vocab_size = 260
test_fraction = 0.3

[training.schedule]
warmup_steps = 1

[sizes.small]
training = {{}}

[sizes.large]
rows = ["PostLN", "RealFormer"]
training = {{ model = {{ dim = 12 }} }}

[grid]
size = "small"
rows = ["PostLN"]
rates = [1e-3]
dropouts = [0.0]
steps = 2
warmup_steps = 1

[evaluation]
max_windows = 8
max_tokens = 32
"""
ROW = ("PostLN", "RealFormer", "RealFormer-half", "ReZeroNoNorm")


@pytest.fixture
def preset(tiny: Path, tmp_path: Path) -> str:
    """A preset file of cells that train in a moment."""
    path = tmp_path / "own.toml"
    path.write_text(PRESET.format(corpus=tiny.parent / "texts"))
    return str(path)


def sweep(preset: str, out: Path, **changes: Any) -> Sweep:
    """The rows of `ROW` at the small size, two at the large one, and the grid."""
    chosen = {"sizes.small.rows": list(ROW), **changes}
    return resolve(Request(preset, out=out, changes=chosen))


@pytest.mark.parametrize("name", ["smoke", "laptop"])
def test_a_preset_holds_every_row(name: str) -> None:
    cells = resolve(Request(name)).cells
    table = [cell for cell in cells if isinstance(cell, EncoderCell) and cell.readings]
    assert {cell.row for cell in table} == set(ROWS)
    assert {cell.size for cell in table} == {"small", "large"}
    assert {cell.row for cell in cells if isinstance(cell, GridCell)} >= {"PostLN", "RealFormer"}
    half, whole = (
        next(c for c in table if (c.row, c.size) == (row, "small")).training_config
        for row in ("RealFormer-half", "RealFormer")
    )
    assert half.steps == whole.steps // 2
    assert half.model == whole.model


def test_the_preset_of_the_source() -> None:
    assert presets.names("realformer") == ["gpu-base", "laptop", "smoke"]
    cells = resolve(Request("gpu-base", ("RealFormer",), seeds=(0,))).cells
    sizes = {}
    for cell in cells:
        assert isinstance(cell, EncoderCell)
        model = cell.training_config.model
        sizes[cell.size] = (model.layers, model.dim, model.train_length)
    assert sizes == {"small": (4, 512, 512), "base": (12, 768, 512), "large": (24, 1024, 512)}


def test_stopped_anywhere_it_is_the_same(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(sweep(preset, whole))
    stems = {name.partition(".")[0] for name in files(whole)} - {"table"}
    assert stems == {
        *("accuracy_by_exit", "residual_variance", "attention_entropy", "attention_agreement"),
        *("attention_agreement_mean", "gradients", "gradients_start", "training_loss"),
        "robustness",
    }
    # Figures are drawn of nothing but what stands in these files.
    monkeypatch.setattr("normattn.reports.figures.realformer.draw_lines", lambda *_, **__: [])
    assert run_killed(sweep(preset, broken), 9, monkeypatch) > 1
    for name in ("table.md", "table.csv", "table.json", "layers.csv", "grid.csv"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    metrics = Path("cells/small-RealFormer/seed0/metrics.jsonl")
    assert (broken / metrics).read_bytes() == (whole / metrics).read_bytes()
    facts = json.loads((whole / "table.json").read_text())
    assert [(row["size"], row["row"]) for row in facts["rows"]] == [
        *(("small", row) for row in ROWS if row in ROW),
        *(("large", row) for row in ("PostLN", "RealFormer")),
    ]
    for row in facts["rows"]:
        assert row["accuracy"]["low"] <= row["accuracy"]["value"] <= row["accuracy"]["high"]
        assert row["steps"] == (2 if row["row"] == "RealFormer-half" else 4)


def test_a_row_that_diverges_is_a_result(preset: str, tmp_path: Path) -> None:
    # Tiger's steps are relative: at this rate every weight grows tenfold a step.
    poison = {"training.optimiser": {"name": "tiger", "lr": 10.0}, "training.steps": 60}
    made = sweep(preset, tmp_path / "out", **poison)
    cells = [c for c in made.cells if c.variant in ("small-PostLN", "grid-PostLN")]
    from normattn.sweep.cell import run_cell
    from normattn.sweep.layout import CellPaths, write_if_changed

    codes = {}
    for cell in cells:
        paths = CellPaths.of(made.out, cell.variant, cell.seed)
        write_if_changed(paths.settings, cell.model_dump(mode="json"))
        codes[cell.variant] = run_cell(paths.job)
    assert codes == {"small-PostLN": 3, "grid-PostLN": 0}
    assert (made.out / "cells" / "small-PostLN" / "seed0" / FAILURE).is_file()
    made.report(made.out)
    text = (made.out / "table.md").read_text()
    assert "small PostLN, seed 0: diverged at step" in text
    assert "first value that is not finite came from" in text


def test_rows_can_be_chosen(preset: str) -> None:
    chosen = resolve(Request(preset, ("RealFormer", "PostLN"), seeds=(3, 5)))
    assert sorted((cell.variant, cell.seed) for cell in chosen.cells) == sorted(
        (f"{size}-{row}", seed)
        for size in ("small", "large")
        for row in ("PostLN", "RealFormer")
        for seed in (3, 5)
    )


def test_bad_input(preset: str) -> None:
    with pytest.raises(InputError, match="there is no row 'RealFromer'"):
        resolve(Request(preset, ("RealFromer",)))
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(preset, methods=("YaRN",)))
    with pytest.raises(InputError, match="placement is varied by the table"):
        resolve(Request(preset, changes={"training.model.placement": "PreLN"}))
    with pytest.raises(InputError, match=r"grid\.size is huge; there are small, large"):
        resolve(Request(preset, changes={"grid.size": "huge"}))
    with pytest.raises(InputError, match="less than their warm-up"):
        resolve(Request(preset, changes={"training.schedule.warmup_steps": 3}))

"""The RealFormer study: its cells, and that stopping it anywhere changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.errors import InputError
from normattn.io import read_object
from normattn.lab.studies.realformer import STUDY, EncoderCell, GridCell, resolve
from normattn.lab.studies.realformer.settings import ROWS
from normattn.lab.studies import preset as presets
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import Request, Sweep
from normattn.lab.training.init_from import new_masked_model
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models.masked_lm import MaskedLM
from normattn.models.pretrained import load_as
from studies.inprocess import PAGE, files, one_cell, run, run_killed, write

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
ROW = ("PostLN", "RealFormer", "RealFormer-half", "ReZeroNoNorm", "RealFormer-from-PostLN")
HALF = ("RealFormer-half", "RealFormer-from-PostLN")


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
    assert presets.names("realformer") == ["gpu-base", "laptop", "smoke", "workstation"]
    cells = resolve(Request("gpu-base", ("RealFormer",), seeds=(0,))).cells
    sizes = {}
    for cell in cells:
        assert isinstance(cell, EncoderCell)
        model = cell.training_config.model
        sizes[cell.size] = (model.layers, model.dim, model.train_length)
    assert sizes == {"small": (4, 512, 512), "base": (12, 768, 512), "large": (24, 1024, 512)}


def test_the_preset_of_rates_chosen_row_by_row() -> None:
    """Variants of a row have its rate, and no row is trained at one depth alone."""
    rates: dict[str, dict[str, float]] = {"four": {}, "twelve": {}}
    starts: set[tuple[str, float]] = set()
    for cell in resolve(Request("workstation", seeds=(0,))).cells:
        assert isinstance(cell, EncoderCell)
        assert cell.training["model"]["init_std"] == 0.07
        rates[cell.size][cell.row] = cell.training["optimiser"]["lr"]
        if cell.start is not None:
            starts.add((cell.size, cell.start["optimiser"]["lr"]))
    assert starts == {(size, own["PostLN"]) for size, own in rates.items()}
    assert set(rates["four"]) == set(rates["twelve"])
    for own in rates.values():
        assert own["RealFormer-half"] == own["RealFormer-from-PostLN"] == own["RealFormer"]
        assert own["PostLN-continued"] == own["PostLN"]
    assert {row for row, rate in rates["twelve"].items() if rate == 6e-3} == {
        *("PreLN", "ReZero", "ResidualQKV")
    }


def test_stopped_anywhere_it_is_the_same(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(STUDY, sweep(preset, whole))
    made = files(whole)
    assert set(made) == {
        *("measurements.parquet", "table.md", "table.json", "figures.txt"),
        *(f"{key}.csv" for key in ("table", "settings", "layers", "robustness", "grid")),
    }
    for name in (
        *("accuracy_by_exit", "residual_variance", "attention_entropy", "attention_agreement"),
        *("attention_agreement_mean", "gradients", "gradients_start", "training_loss"),
        "robustness",
    ):
        assert f"name='{name}'" in made["figures.txt"].decode()
    assert run_killed(STUDY, sweep(preset, broken), 9, monkeypatch) > 1
    assert files(broken) == made
    metrics = Path("cells/small-RealFormer/seed0/metrics.jsonl")
    assert (broken / metrics).read_bytes() == (whole / metrics).read_bytes()
    rows = json.loads(made["table.json"])["tables"]["table"]
    assert [(row["size"], row["row"]) for row in rows] == [
        *(("small", row) for row in ROWS if row in ROW),
        *(("large", row) for row in ("PostLN", "RealFormer")),
    ]
    for row in rows:
        accuracy = row["accuracy"]
        assert accuracy["low"] <= accuracy["value"] <= accuracy["high"]
        assert row["planned_steps"]["value"] == (2 if row["row"] in HALF else 4)


def test_a_row_that_diverges_is_a_result(preset: str, tmp_path: Path) -> None:
    # Tiger's steps are relative: at this rate every weight grows tenfold a step.
    poison = {"training.optimiser": {"name": "tiger", "lr": 10.0}, "training.steps": 60}
    made = sweep(preset, tmp_path / "out", **poison)
    cells = [c for c in made.cells if c.variant in ("small-PostLN", "grid-PostLN")]
    codes = {cell.variant: one_cell(STUDY, made, cell) for cell in cells}
    assert codes == {"small-PostLN": 3, "grid-PostLN": 0}
    write(STUDY, made.out)
    text = (made.out / PAGE / "table.md").read_text()
    assert "PostLN, size small, seed 0: diverged at step" in text
    assert "first value that is not finite came from" in text


def test_a_grid_that_diverges_goes_on(preset: str, tmp_path: Path) -> None:
    poison = {"grid.rates": [1e-3, 10.0], "grid.steps": 60}
    made = sweep(preset, tmp_path / "out", **poison, **{"training.optimiser.name": "tiger"})
    (cell,) = (cell for cell in made.cells if cell.variant == "grid-PostLN")
    assert one_cell(STUDY, made, cell) == 0
    write(STUDY, made.out)
    rows = json.loads((made.out / PAGE / "table.json").read_text())["tables"]["grid"]
    assert [(row["warmup"], row["learning_rate"], row["loss"] is None) for row in rows] == [
        *(("1", "0.001", False), ("1", "10", True)),
        *(("0", "0.001", False), ("0", "10", True)),
    ]
    assert [row["state"] for row in rows][1::2] == ["diverged", "diverged"]
    text = (made.out / PAGE / "table.md").read_text()
    assert "PostLN, dropout 0.0, learning rate 10.0, size small, warmup 1, seed 0: diverged" in text


def test_a_damaged_measurement_is_named_in_one_line(preset: str, tmp_path: Path) -> None:
    made = sweep(preset, tmp_path / "out")
    (cell,) = (cell for cell in made.cells if cell.variant == "small-PostLN")
    assert one_cell(STUDY, made, cell) == 0
    (file,) = made.out.glob("cells/small-PostLN/seed0/evaluations/*.parquet")
    good = file.read_bytes()
    file.write_bytes(good[:-20])
    with pytest.raises(InputError, match=r"scores\.parquet is damaged") as refused:
        STUDY.measurements(made.out)
    assert "\n" not in str(refused.value)
    assert one_cell(STUDY, made, cell) == 0
    assert file.read_bytes() == good


def test_rows_can_be_chosen(preset: str) -> None:
    chosen = resolve(Request(preset, ("RealFormer", "PostLN"), seeds=(3, 5)))
    assert sorted((cell.variant, cell.seed) for cell in chosen.cells) == sorted(
        (f"{size}-{row}", seed)
        for size in ("small", "large")
        for row in ("PostLN", "RealFormer")
        for seed in (3, 5)
    )


def test_a_row_goes_on_from_the_trained_postln(preset: str, tmp_path: Path) -> None:
    chosen = ["PostLN", "PostLN-continued", "RealFormer-from-PostLN"]
    made = sweep(preset, tmp_path, **{"sizes.small.rows": chosen, "grid.rows": []})
    run(STUDY, made)
    start = {}
    for row in chosen:
        paths = RunPaths.of(tmp_path, f"small-{row}", 0)
        start[row] = (paths.run / "model" / "model.safetensors").read_bytes()
        if row == "PostLN":
            continue
        folder = paths.continued / row
        config = MaskedConfig.parse(read_object(folder / "config.json")["config"], "the run")
        assert config.continued is not None
        assert config.steps == 2
        begun = new_masked_model(config.model, config.continued).state_dict()
        trained = load_as(MaskedLM, paths.run / "model").state_dict()
        assert all(torch.equal(begun[name], weights) for name, weights in trained.items())
        ended = load_as(MaskedLM, folder / "model").state_dict()
        assert any(not torch.equal(ended[name], weights) for name, weights in trained.items())
    assert len(set(start.values())) == 1
    frame = STUDY.measurements(tmp_path)
    scores = frame.filter(protocol="masked")["score"].unique().to_list()
    assert sorted(scores) == ["Baseline-RealFormer@8", "Baseline@8"]
    claims = json.loads(files(tmp_path)["table.json"])["claims"]
    assert "a trained PostLN gains more by going on as RealFormer than as it is" in {
        claim["claim"] for claim in claims
    }


def test_no_rows_are_none(preset: str, tmp_path: Path) -> None:
    made = sweep(preset, tmp_path, **{"sizes.large.rows": []})
    assert {cell.size for cell in made.cells if isinstance(cell, EncoderCell)} == {"small"}
    sizes = dict(made.facts)["sizes"]
    assert sizes.startswith("small: ")
    assert "large" not in sizes


def test_a_row_may_have_a_rate_of_its_own(preset: str) -> None:
    rows = ["PostLN", "PreLN", "RealFormer-from-PostLN"]
    changes = {"sizes.small.rows": rows, "sizes.small.rates": {"PostLN": 0.25}}
    rates = {
        cell.row: cell.training_config.optimiser.lr
        for cell in resolve(Request(preset, changes=changes)).cells
        if isinstance(cell, EncoderCell) and cell.size == "small" and cell.readings
    }
    assert rates["PostLN"] == rates["RealFormer-from-PostLN"] == 0.25
    assert rates["PreLN"] != 0.25
    with pytest.raises(InputError, match="rates: there is no row 'PostLm'"):
        resolve(Request(preset, changes={"sizes.small.rates": {"PostLm": 0.25}}))


def test_a_masked_model_goes_on_without_a_method(preset: str) -> None:
    cell = next(cell for cell in resolve(Request(preset)).cells if isinstance(cell, EncoderCell))
    going_on = {"start": "model", "weights": "0" * 64, "length": 16}
    fields = {**cell.training, "seed": 0, "continued": going_on}
    with pytest.raises(InputError, match="goes on without method and length"):
        MaskedConfig.parse(fields, "a run")


def test_bad_input(preset: str) -> None:
    with pytest.raises(InputError, match="there is no row 'RealFromer'"):
        resolve(Request(preset, ("RealFromer",)))
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(preset, methods=("YaRN",)))
    with pytest.raises(InputError, match="placement is varied by the table"):
        resolve(Request(preset, changes={"training.model.placement": "PreLN"}))
    with pytest.raises(InputError, match=r"grid\.size is huge; there are small, large"):
        resolve(Request(preset, changes={"grid.size": "huge"}))
    with pytest.raises(InputError, match="starts from a trained PostLN, which the grid does not"):
        resolve(Request(preset, changes={"grid.rows": ["RealFormer-from-PostLN"]}))
    with pytest.raises(InputError, match="less than their warm-up"):
        resolve(Request(preset, changes={"training.schedule.warmup_steps": 3}))

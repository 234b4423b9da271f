"""What a request resolves to, before anything runs."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from normattn.errors import InputError
from normattn.lab.studies.keynorm import METHODS, VARIANTS, resolve, trained_in_variants
from normattn.lab.studies import preset as presets
from normattn.lab.studies.language import ReadCell, TextConfig
from normattn.lab.studies.methods import Omission, grouped
from normattn.lab.sweep.planner import make_plan
from normattn.lab.sweep.run import Request, Run
from normattn.lab.training import TrainingConfig
from normattn.score import ScoreSpec
from normattn.score.parts import base as registry


def text(config: SweepConfig) -> TextConfig:
    assert isinstance(config, TextConfig)
    return config


def trained(cell: Cell) -> TrainingConfig:
    assert isinstance(cell, ReadCell)
    return cell.training_config


def methods_of(cell: Cell) -> tuple[str, ...]:
    assert isinstance(cell, ReadCell)
    return cell.methods


@pytest.mark.parametrize(
    "name", ["smoke", "quick", "laptop", "workstation", "workstation-mha", "gpu-100m"]
)
def test_every_preset_gives_the_whole_table(name: str) -> None:
    sweep = resolve(Request(preset=name))
    rows = {(cell.variant, method) for cell in sweep.cells for method in methods_of(cell)}
    assert rows == {(variant, method) for variant in VARIANTS for method in METHODS}
    assert len(rows) == 32
    assert not sweep.skipped
    assert sweep.out == Path("runs") / f"keynorm-{name}"


def test_the_variants_are_those_of_the_source() -> None:
    names = "Baseline Baseline-logn QNA QNA-logn KNA KNA-logn CosA CosA-logn"
    assert names.split() == list(VARIANTS)
    assert [ScoreSpec.parse(name).name for name in VARIANTS] == list(VARIANTS)


def test_the_source_s_own_setting() -> None:
    model = trained(resolve(Request(preset="gpu-100m")).cells[0]).model
    assert (model.block, model.layers, model.dim, model.key_size) == ("gau", 24, 768, 128)
    assert (model.train_length, model.placement, model.norm_gain) == (512, "DeepNorm", False)
    sweep = resolve(Request(preset="gpu-100m"))
    assert sweep.cells[0].training_config.optimiser.name == "tiger"
    assert max(text(sweep.config).evaluation.multiples) * model.train_length == 4096
    rerope = model.score.with_method("ReRoPE").resolve(train_length=512, factor=8.0)
    assert "window=128" in str(rerope)
    assert 90e6 < make_plan(sweep).parameters[0] < 140e6


def test_quick_is_the_workstation_s_architecture_and_text_that_is_always_there() -> None:
    quick, workstation = (
        trained(resolve(Request(preset=name)).cells[0]) for name in ("quick", "workstation")
    )
    smaller = {"dim", "layers", "train_length", "score", "vocab_size", "gamma_std"}
    assert quick.model.model_dump(exclude=smaller) == workstation.model.model_dump(exclude=smaller)
    assert (quick.data.corpus, quick.precision) == ("python-source", "fp32")


def test_rows_can_be_added_without_another_configuration(tiny: Path) -> None:
    narrow = resolve(Request(str(tiny), ("KNA",), ("as is",), (0,)))
    wide = resolve(Request(str(tiny), ("Baseline", "KNA-logn"), ("YaRN", "NTK"), (0, 1, 2)))
    assert narrow.config == wide.config
    assert [cell.name for cell in wide.cells] == [
        f"{variant} seed {seed}" for seed in range(3) for variant in ("Baseline", "KNA-logn")
    ]


def test_settings_change_the_configuration(tiny: Path) -> None:
    plain = text(resolve(Request(str(tiny))).config)
    changed = text(resolve(Request(str(tiny), changes={"training.model.dim": 32})).config)
    assert plain != changed
    assert changed.training["model"]["dim"] == 32
    assert {**changed.training, "model": None} == {**plain.training, "model": None}


def test_a_group_of_settings_is_no_value(tiny: Path) -> None:
    with pytest.raises(InputError, match=r"model cannot be 5: it is a group of settings \(.*dim"):
        resolve(Request(str(tiny), changes={"training.model": 5}))


def test_every_setting_is_resolved(tiny: Path) -> None:
    training = text(resolve(Request(str(tiny))).config).training
    assert training["optimiser"]["betas"]
    assert training["data"]["seed"] == 0
    assert training["model"]["vocab_size"] == 260
    assert "seed" not in training
    assert "score" not in training["model"]


def test_a_method_without_sense_leaves_out_its_row_and_says_why(tiny: Path) -> None:
    sweep = resolve(Request(str(tiny), ("KNA", "KNA-NoPE")))
    cells = {cell.variant: methods_of(cell) for cell in sweep.cells}
    assert cells["KNA"] == METHODS
    assert cells["KNA-NoPE"] == ("as is",)
    assert len(sweep.skipped) == 3
    assert sweep.skipped[0].sentence.startswith(
        "KNA-NoPE with NTK is left out: NTK on NoPE makes no sense"
    )


def test_parameters_of_a_variant_are_kept(tiny: Path) -> None:
    cell = resolve(Request(str(tiny), ("CosA(c=3.5)",))).cells[0]
    assert cell.variant == "CosA(c=3.5)"
    assert trained(cell).model.score == ScoreSpec.parse("CosA(c=3.5)@8")


def test_presets_hold_no_setting_twice() -> None:
    """What a TOML file says is what the preset means: nothing in it is ignored."""
    for name in presets.names():
        file = resources.files(presets) / f"{name.replace('-', '_')}.toml"
        written = tomllib.loads(file.read_text("utf-8"))
        kept = presets.load(name).model_dump()
        for group in ("training", "evaluation"):
            for key, value in written[group].items():
                stored = kept[group][key]
                assert (list(stored) if isinstance(stored, tuple) else stored) == value


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean smoke"):
        presets.load("smoek")


def test_parameters_of_a_method_are_kept(tiny: Path) -> None:
    named = ("ReRoPE(window=3)", "ReRoPE(window=3)-logn+", "YaRN(factor=2)", "NTK-mixed")
    sweep = resolve(Request(str(tiny), ("KNA",), named))
    kept = ("ReRoPE(window=3)", "ReRoPE(window=3)-logn+", "YaRN(factor=2)", "NTKMixed")
    assert methods_of(sweep.cells[0]) == kept


def test_all_is_every_part_that_a_row_can_have(tiny: Path) -> None:
    for request in (
        Request(str(tiny), methods=("all",)),
        Request(str(tiny), variants=("all",), methods=("all",)),
    ):
        sweep = resolve(request)
        rows = {cell.variant: methods_of(cell) for cell in sweep.cells}
        found = [name for name in trained_in_variants(1) if name in rows]
        assert list(rows) == found
        assert {"Baseline", "KNA-logn", "CosA", "KNA-NoPE"} <= rows.keys()
        for name, part in registry.parts().items():
            if part.when != "trained-in":
                said = any(each.method == name for each in sweep.skipped)
                assert any(name in methods for methods in rows.values()) or said
        assert {"as is", "YaRN", "ReRoPE"} <= set(rows["Baseline"])
        # Nothing rotary is left to stretch on a model without positions.
        assert rows["Baseline-NoPE"] == ("as is",)
        assert rows["Baseline-Sink"] == ("as is", "YaRN", "ReRoPE")
    some = resolve(Request(str(tiny), ("KNA",), ("all",)))
    assert [cell.variant for cell in some.cells] == ["KNA"]


def test_every_trained_in_part_has_a_row_of_its_own() -> None:
    shown = trained_in_variants(layers=4)
    for name, part in registry.parts().items():
        if part.when == "trained-in" and part.slot.value != "variant":
            assert name == "RoPE" or any(row.endswith(f"-{name}") for row in shown)


def test_a_part_of_every_few_layers_reaches_one_of_them() -> None:
    assert "Baseline-NoPEEvery" in trained_in_variants(layers=4)
    few = trained_in_variants(layers=3)
    assert "Baseline-NoPEEvery(every=3)" in few
    assert "Baseline-NoPEEvery" not in few


@pytest.mark.parametrize("option", ["variants", "methods"])
def test_all_stands_alone(tiny: Path, option: str) -> None:
    request = Request(str(tiny), **{option: ("all", "KNA")})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"--{option} all is said alone"):
        resolve(request)


def test_settings_of_another_study_are_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="there is no setting nowhere"):
        resolve(Request(str(tiny), changes={"nowhere.steps": 1}))


def test_rows_left_out_for_one_reason_are_named_together() -> None:
    omissions = [
        Omission(variant, method, f"{method} on NoPE is odd: {variant}-{method} has none")
        for variant in ("KNA-NoPE", "QNA-NoPE")
        for method in ("YaRN", "NTK")
    ]
    odd = Omission("KNA-HWFA", "NTK", "NTK needs more")
    assert omissions[0].sentence.startswith("KNA-NoPE with YaRN is left out: YaRN on NoPE is odd")
    assert grouped([*omissions, odd]) == [
        "KNA-NoPE, QNA-NoPE with YaRN, NTK are left out, as "
        "YaRN on NoPE is odd: KNA-NoPE-YaRN has none",
        "KNA-HWFA with NTK is left out: NTK needs more",
    ]

"""One change of the setting at a time: what changes, and that the page says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.lab.data import prepare_tokens
from normattn.lab.studies.factors import CHANGES, STUDY, FactorCell, resolve, words
from normattn.lab.studies.keynorm import resolve as resolve_keynorm
from normattn.lab.studies.language import ReadCell
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.studies.language import evaluate_trained
from normattn.lab.sweep.runner import reproduce
from normattn.lab.sweep.run import Request, Sweep
from normattn.models.pretrained import load_model
from normattn.settings import first_difference
from studies.inprocess import files, run

FEW: dict[str, Any] = {"training.steps": 3, "evaluation.max_windows": 6}


def cells(sweep: Sweep) -> dict[str, FactorCell]:
    return {c.variant: c for c in sweep.cells if isinstance(c, FactorCell) and c.seed == 0}


def differing(ours: Any, base: Any, prefix: str = "") -> dict[str, Any]:
    """The settings in which two groups differ, by dotted name."""
    if not (isinstance(ours, dict) and isinstance(base, dict)):
        return {} if ours == base else {prefix[:-1]: ours}
    found: dict[str, Any] = {}
    for name in sorted(ours.keys() | base.keys()):
        found |= differing(ours.get(name), base.get(name), f"{prefix}{name}.")
    return found


def test_each_change_changes_what_it_says_and_nothing_else(tiny: Path) -> None:
    sweep = resolve(Request("laptop", changes={"factors.english": str(tiny.parent / "texts")}))
    made = {name: c.training_config.model_dump(mode="json") for name, c in cells(sweep).items()}
    base = made["preset-KNA"]
    other = ("preln", "mha")  # of a preset that is otherwise
    found = {n: differing(made[f"{n}-KNA"], base) for n in CHANGES if n not in other}
    assert found.pop("gau") == {"model.block": "gau", "model.heads": 1}
    assert found.pop("tiger").keys() == {
        *("optimiser.name", "optimiser.lr", "optimiser.beta", "optimiser.betas"),
        *("optimiser.eps", "optimiser.weight_decay"),
    }
    score = "KNA-RoPE(base=130)@64"
    assert found == {
        "preset": {},
        "base-130": {"model.score": score},
        "length-2x": {"batch_size": 32, "model.train_length": 128, "model.score": "KNA@128"},
        "length-4x": {"batch_size": 16, "model.train_length": 256, "model.score": "KNA@256"},
        "no-tiling": {"data.tiled_fraction": 0.0},
        "steps-third": {"steps": 300},
        "steps-half": {"steps": 450},
        "steps-4x": {"steps": 3600},
        "one-head": {"model.heads": 1},
        "heads-2x": {"model.heads": 2, "model.score": score},
        "heads-4x": {"model.heads": 1, "model.score": score},
        "deepnorm": {"model.placement": "DeepNorm"},
        "layers-6": {"model.layers": 6},
        "layers-12": {"model.layers": 12},
        "english": {"data.corpus": str(tiny.parent / "texts")},
    }
    small = cells(resolve(Request("workstation", variants=("preset", "mha+preln"))))
    made = {name: cell.training_config.model_dump(mode="json") for name, cell in small.items()}
    assert differing(made["mha+preln-KNA"], made["preset-KNA"]) == {
        "model.block": "mha",
        "model.heads": 4,
        "model.gamma_std": None,  # Only a gated attention unit has it.
        "model.placement": "PreLN",
    }
    # The preset of that name is the same setting, so that its tables take these models over.
    (alone,) = {
        cell.training_config.model_dump_json()
        for cell in resolve_keynorm(Request("workstation-mha", variants=("KNA",), seeds=(0,))).cells
        if isinstance(cell, ReadCell)
    }
    assert json.loads(alone) == made["mha+preln-KNA"]
    joined = resolve(Request("laptop", variants=("gau+no-tiling+steps-4x",)))
    config = cells(joined)["gau+no-tiling+steps-4x-KNA"].training_config
    assert (config.model.block, config.data.tiled_fraction, config.steps) == ("gau", 0.0, 3600)


def test_the_table_is_what_the_models_read(tiny: Path, tmp_path: Path) -> None:
    changes = ("preset", "base-130", "length-2x", "length-2x+base-130")
    asked = Request(str(tiny), variants=changes, seeds=(0, 1), out=tmp_path, changes=FEW)
    sweep = resolve(asked)
    run(STUDY, sweep)
    facts = json.loads(files(tmp_path)["table.json"])["tables"]["table"]
    assert [fact["row"] for fact in facts] == [words(name) for name in changes]

    def change(name: str, score: str) -> float:
        """The change of the last segment's accuracy once more, from the saved models alone."""
        values: list[float] = []
        for seed in (0, 1):
            (cell,) = (c for c in sweep.cells if c.name == f"{name}-{score} seed {seed}")
            assert isinstance(cell, FactorCell)
            place = RunPaths.of(tmp_path, cell.variant, seed).run
            config, settings = cell.training_config, cell.evaluation
            assert str(load_model(place / "model").config.score) == str(config.model.score)
            frame = evaluate_trained(
                place, config, prepare_tokens(config.data), methods=[""], settings=settings
            )
            ends: list[float] = []
            for length in (4, 1):
                at = frame.filter(protocol="last_segment", statistic="accuracy").filter(
                    length=length * config.model.train_length
                )
                ends.append(100 * float(at["sum"].sum()) / float(at["of"].sum()))
            values.append(ends[0] - ends[1])
        return sum(values) / 2

    for name, fact in zip(changes, facts, strict=True):
        ours, base = change(name, "KNA"), change(name, "Baseline")
        assert fact["KNA_change"]["value"] == pytest.approx(ours)
        assert fact["gap"]["value"] == pytest.approx(ours - base)
        if name == "preset":
            assert fact["effect"] is None
        else:
            assert fact["effect"]["value"] == pytest.approx(ours - change("preset", "KNA"))
        if "+" not in name:
            assert fact["last"] is None
        else:
            added = ours - change(name.rpartition("+")[0], "KNA")
            assert fact["last"]["value"] == pytest.approx(added)


def test_bad_input(tiny: Path) -> None:
    with pytest.raises(InputError, match="did you mean gau"):
        resolve(Request(str(tiny), variants=("gaus",)))
    with pytest.raises(InputError, match="no corpus of English text was named"):
        resolve(Request(str(tiny), variants=("english",)))
    with pytest.raises(InputError, match="heads: input should be greater than or equal to 1"):
        resolve(Request(str(tiny), variants=("heads-4x",)))
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(str(tiny), methods=("YaRN",)))
    with pytest.raises(InputError, match="preln changes nothing in the preset tiny"):
        resolve(Request(str(tiny), variants=("preln",)))
    skipped = [each.variant for each in resolve(Request(str(tiny))).skipped]
    assert skipped == ["no-tiling", "heads-4x", "preln", "mha", "english"]


def test_the_row_of_english_text_may_be_added_later(tiny: Path, tmp_path: Path) -> None:
    english = tmp_path / "english"
    english.mkdir()
    before = resolve(Request(str(tiny), variants=("preset",), changes=FEW))
    later = resolve(Request(str(tiny), changes={**FEW, "factors.english": str(english)}))
    stored, wanted = (sweep.config.model_dump(mode="json") for sweep in (before, later))
    assert first_difference(stored, wanted, free_settings(stored, wanted)) is None
    assert with_added(stored, wanted) == wanted
    assert with_added(wanted, stored) == wanted
    other = {**wanted, "english": "elsewhere"}
    assert first_difference(wanted, other, free_settings(wanted, other)) == (
        *("english", repr(str(english)), "'elsewhere'"),
    )


def test_every_text_is_looked_at_before_any_work(tiny: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    asked = Request(
        str(tiny),
        out=tmp_path / "out",
        variants=("preset", "tiger", "english"),
        changes={**FEW, "factors.english": str(nowhere)},
    )
    assert len({cell.reads for cell in resolve(asked).cells}) == 2
    with pytest.raises(InputError, match=f"{nowhere}' does not exist"):
        reproduce(STUDY, asked)
    assert not (tmp_path / "out").exists()

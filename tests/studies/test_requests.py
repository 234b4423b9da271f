"""What requests of the studies of language models resolve to, before anything runs."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.lab.studies import find
from normattn.lab.studies import preset as presets
from normattn.lab.studies.ablations import QUESTIONS
from normattn.lab.studies.keynorm import METHODS, VARIANTS, extended_variants
from normattn.lab.studies.language import TextRun
from normattn.lab.studies.methods import explain_unsupported, inference_time_methods
from normattn.lab.sweep.config import merged
from normattn.lab.sweep.planner import make_plan
from normattn.lab.sweep.run import Request, Sweep
from normattn.lab.sweep.runner import reproduce
from normattn.score import ScoreSpec
from normattn.score.parts import base as registry

FEW: dict[str, Any] = {"training.steps": 3, "evaluation.max_windows": 6}


def resolve(study: str, preset: Any = "laptop", *given: Any, **more: Any) -> Sweep:
    return find(study).resolve(Request(str(preset), *given, **more))


def methods_of(sweep: Sweep) -> dict[str, tuple[str, ...]]:
    return {run.variant: run.methods for run in sweep.runs if isinstance(run, TextRun)}


# keynorm


@pytest.mark.parametrize(
    "name", ["smoke", "quick", "laptop", "base", "workstation", "workstation-mha", "gpu-100m"]
)
def test_every_preset_gives_the_whole_table(name: str) -> None:
    sweep = resolve("keynorm", name)
    assert methods_of(sweep) == dict.fromkeys(VARIANTS, METHODS)
    assert len(VARIANTS) * len(METHODS) == 32
    assert not sweep.skipped
    assert sweep.out == Path("runs") / f"keynorm-{name}"


def test_parameters_of_scores_and_methods_are_kept(tiny: Path) -> None:
    named = ("ReRoPE(window=3)", "ReRoPE(window=3)-logn+", "YaRN(factor=2)", "NTK-mixed")
    sweep = resolve("keynorm", tiny, ("CosA(c=3.5)",), named)
    assert methods_of(sweep) == {
        "CosA(c=3.5)": ("ReRoPE(window=3)", "ReRoPE(window=3)-logn+", "YaRN(factor=2)", "NTKMixed")
    }
    assert sweep.runs[0].training_config.model.score == ScoreSpec.parse("CosA(c=3.5)@8")


def test_a_method_without_sense_leaves_out_its_row_and_says_why(tiny: Path) -> None:
    sweep = resolve("keynorm", tiny, ("KNA", "KNA-NoPE"))
    assert methods_of(sweep) == {"KNA": METHODS, "KNA-NoPE": ("unmodified",)}
    (said,) = sweep.skipped
    assert said.startswith("KNA-NoPE is not evaluated with NTK, YaRN, ReRoPE: ")


def test_what_a_preset_says_is_what_it_means() -> None:
    """Nothing in a file is ignored: what stands in it stands in the settings."""
    folder = resources.files("normattn.lab.studies") / "presets"
    for name in presets.names():
        written = tomllib.loads((folder / f"{name.replace('-', '_')}.toml").read_text("utf-8"))
        kept = presets.load(name).model_dump(mode="json")
        for group in {"training", "evaluation"} & written.keys():
            assert kept[group] == merged(kept[group], written[group])


def own_preset(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, "utf-8")
    return str(folder / name)


def test_a_preset_says_only_what_differs_from_its_base(tmp_path: Path) -> None:
    own_preset(tmp_path, "wide.toml", 'base = "base"\nname = "w"\n[training.model]\ndim = 256\n')
    text = 'base = "../wide.toml"\nseeds = 2\n[training]\nsteps = 700\n'
    path = own_preset(tmp_path / "deep", "short.toml", text)
    ours, theirs = (trained(resolve("keynorm", name))["KNA"] for name in (path, "base"))
    assert differing(ours, theirs) == {"model.dim": 256, "steps": 700}
    sweep = resolve("keynorm", path)
    assert (sweep.config.preset, len(sweep.runs)) == ("short", 2 * len(VARIANTS))
    # Another block leaves the settings of the base's behind.
    text = 'base = "workstation"\n[training.model]\nblock = "mha"\nheads = 2\n'
    model = presets.load(own_preset(tmp_path, "heads.toml", text)).training["model"]
    assert (model["heads"], "key_size" in model, "gamma_std" in model) == (2, False, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "own.toml"', "cannot be its own base: .*own.toml -> .*own.toml"),
        ('base = "other.toml"', "cannot be its own base: .*own.toml -> .*other.toml -> .*own.toml"),
        ('base = "workstaton"', "the base of .*own.toml: .*did you mean workstation"),
        ('base = "gone.toml"', "the base of .*own.toml: .*gone.toml"),
        ("base = 3", "base in .*own.toml must be a preset or a path, got 3"),
        ('base = "laptop"\n[training]\nmodel = 3', "model cannot be 3"),
    ],
)
def test_bases_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    own_preset(tmp_path, "other.toml", f'base = "../{tmp_path.name}/own.toml"')
    with pytest.raises(InputError, match=said):
        resolve("keynorm", own_preset(tmp_path, "own.toml", text))


def test_all_is_every_part_that_a_row_can_have(tiny: Path) -> None:
    for asked in ({}, {"variants": ("all",)}):
        sweep = resolve("keynorm", tiny, methods=("all",), **asked)
        rows = methods_of(sweep)
        assert list(rows) == [name for name in extended_variants(1) if name in rows]
        assert {"Baseline", "KNA-logn", "CosA", "KNA-NoPE"} <= rows.keys()
        skipped = " ".join(sweep.skipped)
        for name, part in registry.parts().items():
            if part.when != "training-time":
                assert any(name in of for of in rows.values()) or f"with {name} is" in skipped
        # Nothing rotary is left to stretch on a model without positions.
        assert rows["Baseline-NoPE"] == ("unmodified",)
        assert rows["Baseline-Sink"] == ("unmodified", "YaRN", "ReRoPE")
    assert list(methods_of(resolve("keynorm", tiny, ("KNA",), ("all",)))) == ["KNA"]


def test_what_was_trained_counts_as_such_by_its_own_settings_alone(tmp_path: Path) -> None:
    asked = Request(preset="smoke", seeds=(0, 1, 2), variants=("KNA",), out=tmp_path)
    sweep = find("keynorm").resolve(asked)
    whole = make_plan(sweep)
    place = tmp_path / "cells" / "KNA" / "seed1"
    place.mkdir(parents=True)
    (place / "status.json").write_text('{"state": "finished", "step": 1, "steps": 1}')
    settings = sweep.runs[1].training_config.model_dump(mode="json")
    for changes, finished in (({}, 1), ({"threads": 2}, 1), ({"steps": 1}, 0)):
        stored = {"format": 1, "kind": "causal-lm", "config": {**settings, **changes}}
        (place / "config.json").write_text(json.dumps(stored))
        plan = make_plan(sweep)
        assert (plan.runs, plan.finished) == (3, finished)
        assert (plan.flops < whole.flops) == bool(finished)


# The others


def test_every_question_compares_rows_that_differ_in_one_part() -> None:
    for name, seeds in (("smoke", 1), ("workstation", 3)):
        assert len(resolve("questions", name).runs) == 17 * seeds
    for question in QUESTIONS.values():
        # A row is named as its measurements are.
        assert [ScoreSpec.parse(row).text for row in question.rows] == list(question.rows)
        for row, other in question.pairs:
            ours, theirs = (set(ScoreSpec.parse(name).parts) for name in (row, other))
            assert len(ours - theirs) == 1, row
            assert len(theirs - ours) <= 1, row


def differing(ours: Any, base: Any, prefix: str = "") -> dict[str, Any]:
    """The settings in which two groups differ, by dotted name."""
    if not (isinstance(ours, dict) and isinstance(base, dict)):
        return {} if ours == base else {prefix[:-1]: ours}
    found: dict[str, Any] = {}
    for name in sorted(ours.keys() | base.keys()):
        found |= differing(ours.get(name), base.get(name), f"{prefix}{name}.")
    return found


def trained(sweep: Sweep) -> dict[str, Any]:
    return {
        run.variant: run.training_config.model_dump(mode="json")
        for run in sweep.runs
        if run.seed == 0
    }


CHANGED = ("third-rope", "length-4x", "heads-2x", "english")


def test_each_change_changes_what_it_says_and_nothing_else(tiny: Path) -> None:
    """Those that touch more than one setting; the numbers of the others are in tests/golden."""
    texts = str(tiny.parent / "texts")
    made = trained(resolve("factors", "laptop", changes={"factors.english": texts}))
    found = {name: differing(made[f"{name}-KNA"], made["preset-KNA"]) for name in CHANGED}
    score = "KNA-RoPE(base=130)@64"
    assert found == {
        "third-rope": {"model.score": "KNA-PRoPE(fraction=0.33)@64"},
        "length-4x": {"batch_size": 16, "model.train_length": 256, "model.score": "KNA@256"},
        "heads-2x": {"model.heads": 2, "model.score": score},
        "english": {"data.corpus": texts},
    }
    units = trained(resolve("factors", "workstation", variants=("preset", "mha+preln")))
    assert differing(units["mha+preln-KNA"], units["preset-KNA"]) == {
        "model.block": "mha",
        "model.heads": 4,
        "model.gamma_std": None,  # Only a gated attention unit has it.
        "model.placement": "PreLN",
    }


def test_every_text_is_looked_at_before_any_work(tiny: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    asked = Request(
        str(tiny),
        out=tmp_path / "out",
        variants=("preset", "tiger", "english"),
        changes={**FEW, "factors.english": str(nowhere)},
    )
    assert len({run.data_key for run in find("factors").resolve(asked).runs}) == 2
    with pytest.raises(InputError, match=f"{nowhere}' does not exist"):
        reproduce(find("factors"), asked)
    assert not (tmp_path / "out").exists()


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("keynorm", {"changes": {"training.model": 5}}, r"model cannot be 5: it is a group .*dim"),
    ("keynorm", {"changes": {"nowhere.steps": 1}}, "nowhere"),
    ("keynorm", {"changes": {"reading.multiples": [1]}}, "uses no reading settings"),
    ("keynorm", {"variants": ("all", "KNA")}, "--variants all cannot be combined"),
    ("keynorm", {"preset": "smoek"}, "did you mean smoke"),
    ("keynorm", {"variants": ("KNA-YaRN",)}, "is applied after training"),
    ("window", {"changes": {"window.shares": [0.1, 0.12]}}, "same window twice"),
    ("window", {"changes": {"window": 3}}, "window is a group of settings, got 3"),
    ("reading", {"changes": {"evaluation.multiples": [1]}}, r"uses reading\.multiples instead"),
    ("factors", {"variants": ("gaus",)}, "did you mean gau"),
    ("factors", {"variants": ("english",)}, "no corpus of English text is given"),
    ("factors", {"variants": ("heads-4x",)}, r"heads is \d here, .* a multiple of 4"),
    (
        "factors",
        {"variants": ("length-4x",), "changes": {"training.batch_size": 6}},
        "batch_size is 6 here, .* a multiple of 4",
    ),
    ("factors", {"variants": ("preln",)}, "preln changes nothing in the preset tiny"),
    ("continue", {"changes": {"continued.read": [2, 4]}}, "read must rise from 1"),
    ("continue", {"changes": {"continued.multiple": 3}}, r"give continued\.batch_size"),
    ("retrofit", {"methods": ("YaRN",)}, "chooses its own methods"),
    ("mechanism", {"changes": {"evaluation.multiples": [1]}}, r"mechanism\.multiple instead"),
    ("retrofit", {"changes": {"continued.multiple": 8}}, "uses the training length instead"),
)


@pytest.mark.parametrize(("study", "asked", "said"), REFUSED, ids=lambda case: str(case)[:40])
def test_bad_input(study: str, asked: dict[str, Any], said: str, tiny: Path) -> None:
    with pytest.raises(InputError, match=said):
        find(study).resolve(Request(**{"preset": str(tiny), **asked}))


# Methods and texts


def test_every_post_hoc_part_stands_alone_and_some_with_logn() -> None:
    spec = ScoreSpec.parse("KNA", train_length=64)
    methods = inference_time_methods(spec)
    parts = [name for name, part in registry.parts().items() if part.when != "training-time"]
    refused = re.split(r"[ ,:]+", " ".join(explain_unsupported(spec)))
    assert set(parts) <= {*methods, *refused}
    assert {"logn+", "PI", "NTK", "YaRN", "ReRoPE"} <= {*methods}
    assert methods[-3:] == ("NTK-logn+", "YaRN-logn+", "ReRoPE-logn+")
    for method in methods:
        assert spec.with_method(method).resolve(factor=8).variant_name == "KNA"
    nope = ScoreSpec.parse("KNA-NoPE", train_length=64)
    assert "logn+" in inference_time_methods(nope)
    assert "YaRN" not in inference_time_methods(nope)
    # An unknown length leaves out what needs it.
    assert "ReRoPE" not in inference_time_methods(ScoreSpec.parse("KNA"))

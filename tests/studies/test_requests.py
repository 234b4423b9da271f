"""What requests resolve to, and which are refused, before anything runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.lab.runs import RunDirectory
from normattn.lab.studies import find
from normattn.lab.studies import preset as presets
from normattn.lab.studies import qknorm_runs as qknorm
from normattn.lab.studies.ablations import QUESTIONS
from normattn.lab.studies.keynorm import METHODS, VARIANTS, extended_variants
from normattn.lab.studies.language import TextRun, candidates, supported_methods
from normattn.lab.studies.realformer_runs import ROWS, EncoderRun
from normattn.lab.studies.rmsnorm import TIMED, NormRun, TimeRun
from normattn.lab.sweep.config import CHANGEABLE, merged
from normattn.lab.sweep.planner import make_plan
from normattn.lab.sweep.run import Request, Sweep
from normattn.lab.sweep.runner import reproduce
from normattn.models.config import TranslatorConfig
from normattn.score import ScoreSpec
from normattn.score.parts import base as registry
from studies import small


def resolve(study: str, preset: Any = "laptop", *given: Any, **more: Any) -> Sweep:
    return find(study).resolve(Request(str(preset), *given, **more))


def methods_of(sweep: Sweep) -> dict[str, tuple[str, ...]]:
    return {run.variant: run.methods for run in sweep.runs if isinstance(run, TextRun)}


# keynorm
def test_every_preset_gives_the_whole_table_and_means_what_it_says() -> None:
    """Nothing in a file is ignored: what stands in it stands in the settings."""
    assert len(VARIANTS) * len(METHODS) == 32
    folder = resources.files("normattn.lab.studies") / "presets"
    for name in presets.names():
        sweep = resolve("keynorm", name)
        assert methods_of(sweep) == dict.fromkeys(VARIANTS, METHODS)
        assert not sweep.skipped
        assert sweep.out == Path("runs") / f"keynorm-{name}"
        written = tomllib.loads((folder / f"{name.replace('-', '_')}.toml").read_text("utf-8"))
        kept = presets.load(name).model_dump(mode="json")
        for group in {"training", "evaluation"} & written.keys():
            assert kept[group] == merged(kept[group], written[group])


def test_parameters_of_scores_and_methods_are_kept(tiny: Path) -> None:
    named = ("ReRoPE(window=3)", "ReRoPE(window=3)-logn+", "YaRN(factor=2)", "NTK-mixed")
    sweep = resolve("keynorm", tiny, ("CosA(c=3.5)",), named)
    assert methods_of(sweep) == {
        "CosA(c=3.5)": ("ReRoPE(window=3)", "ReRoPE(window=3)-logn+", "YaRN(factor=2)", "NTKMixed")
    }
    assert sweep.runs[0].training_config.model.score == ScoreSpec.parse("CosA(c=3.5)@8")
    # A method without a sense leaves out its row and says why.
    sweep = resolve("keynorm", tiny, ("KNA", "KNA-NoPE"))
    assert methods_of(sweep) == {"KNA": METHODS, "KNA-NoPE": ("unmodified",)}
    (said,) = sweep.skipped
    assert said.startswith("KNA-NoPE is not evaluated with NTK, YaRN, ReRoPE: ")


def own_preset(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, "utf-8")
    return str(folder / name)


def test_a_preset_says_only_what_differs_from_its_base(tmp_path: Path) -> None:
    own_preset(tmp_path, "wide.toml", 'base = "base"\nname = "w"\n[training.model]\ndim = 256\n')
    text = 'base = "../wide.toml"\nseeds = 2\n[training]\nsteps = 700\n'
    sweep = resolve("keynorm", own_preset(tmp_path / "deep", "short.toml", text))
    ours, theirs = (trained(each)["KNA"] for each in (sweep, resolve("keynorm", "base")))
    assert differing(ours, theirs) == {"model.dim": 256, "steps": 700}
    assert (sweep.config.preset, len(sweep.runs)) == ("short", 2 * len(VARIANTS))
    # Another block leaves the settings of the base's behind.
    text = 'base = "workstation"\n[training.model]\nblock = "mha"\nheads = 2\n'
    model = presets.load(own_preset(tmp_path, "heads.toml", text)).training["model"]
    assert (model["heads"], "key_size" in model, "gamma_std" in model) == (2, False, False)
    # And generated tokens those of text, also where the command line chooses them.
    text = 'base = "base"\n[training.data]\ncorpus = "synthetic:copy"\n'
    data = presets.load(own_preset(tmp_path, "copy.toml", text)).training["data"]
    assert data == {"corpus": "synthetic:copy", "vocab_size": 2048}
    resolve("keynorm", "base", changes={"training.data.corpus": "synthetic:copy"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "own.toml"', "cannot be its own base: .*own.toml -> .*own.toml"),
        ('base = "other.toml"', "cannot be its own base: .*own.toml -> .*other.toml -> .*own.toml"),
        ('base = "workstaton"', "did you mean workstation"),
        ('base = "gone.toml"', "gone.toml"),
        ("base = 3", "no preset is called '3'"),
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
    sweep = resolve("keynorm", "smoke", ("KNA",), seeds=(0, 1, 2), out=tmp_path)
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
    runs = [run for run in sweep.runs if run.seed == 0]
    return {run.variant: run.training_config.model_dump(mode="json") for run in runs}


def test_each_change_changes_what_it_says_and_nothing_else() -> None:
    """Those that touch more than one setting; the numbers of the others are in tests/golden."""
    made = trained(resolve("factors", "laptop"))
    for name, changed in {
        "third-rope": {"model.score": "KNA-PRoPE(fraction=0.33)@64"},
        "length-4x": {"batch_size": 16, "model.train_length": 256, "model.score": "KNA@256"},
        "heads-2x": {"model.heads": 2, "model.score": "KNA-RoPE(base=130)@64"},
    }.items():
        assert differing(made[f"{name}-KNA"], made["preset-KNA"]) == changed, name
    units = trained(resolve("factors", "workstation", variants=("preset", "mha+preln")))
    assert differing(units["mha+preln-KNA"], units["preset-KNA"]) == {
        "model.block": "mha",
        "model.heads": 4,
        "model.gamma_std": None,  # Only a gated attention unit has it.
        "model.placement": "PreLN",
    }


def test_the_text_is_looked_at_before_any_work(tiny: Path, tmp_path: Path) -> None:
    changes = {"training.data.corpus": str(tmp_path / "nowhere")}
    asked = Request(str(tiny), ("preset", "tiger"), changes=changes, out=tmp_path / "out")
    with pytest.raises(InputError, match=r"nowhere' does not exist"):
        reproduce(find("factors"), asked)
    assert not (tmp_path / "out").exists()


# Methods and texts
def test_every_post_hoc_part_stands_alone_and_some_with_logn() -> None:
    spec = ScoreSpec.parse("KNA", train_length=64)
    methods, _ = supported_methods(spec, candidates(), 8.0)
    assert {"logn+", "PI", "NTK", "YaRN", "ReRoPE"} <= {*methods}
    assert methods[-3:] == ("NTK-logn+", "YaRN-logn+", "ReRoPE-logn+")
    for method in methods:
        assert spec.with_method(method).resolve(factor=8).variant_name == "KNA"
    nope = ScoreSpec.parse("KNA-NoPE", train_length=64)
    assert "logn+" in supported_methods(nope, candidates(), 8.0)[0]
    assert "YaRN" not in supported_methods(nope, candidates(), 8.0)[0]
    # An unknown length leaves out what needs it.
    assert "ReRoPE" not in supported_methods(ScoreSpec.parse("KNA"), candidates(), 8.0)[0]


@pytest.fixture(scope="module")
def own(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The preset for a study."""
    return cache(lambda study: small.preset(study, tiny, tmp_path_factory.mktemp(study)))


# QK-Norm
def test_every_preset_of_qknorm_can_be() -> None:
    assert presets.names("qknorm") == ["gpu", "laptop", "multi30k", "smoke"]
    for name in presets.names("qknorm"):
        runs = resolve("qknorm", name, seeds=(0,)).runs
        assert len({run.variant for run in runs}) == len(runs)
    runs = resolve("qknorm", "laptop", seeds=(0,)).runs
    translated = [r.variant for r in runs if isinstance(r, qknorm.TranslationRun) and r.translated]
    assert translated == list(qknorm.SCORES)
    swept = {(r.row, r.factors["rate"]) for r in runs if r.factors["experiment"] == "rates"}
    assert swept == {(score, rate) for score in qknorm.SWEPT for rate in qknorm.MULTIPLES}


@pytest.mark.parametrize(
    ("variant", "decoder", "across"),
    [
        ("QKBatchNorm", "Baseline", "KBatchNorm-NoPE"),
        ("KInstanceNorm", "Baseline", "KInstanceNorm-NoPE"),
        ("QBatchNorm", "Baseline", "Baseline-NoPE"),
        ("QKBatchNorm-NoPE", "Baseline-NoPE", "KBatchNorm-NoPE"),
        ("QKInstanceNorm(gain=false)-logn", "Baseline-logn", "KInstanceNorm(gain=false)-logn-NoPE"),
        ("KInstanceNorm(gain=false)-ALiBi", "Baseline-ALiBi", "KInstanceNorm(gain=false)-NoPE"),
    ],
)
def test_norms_over_tokens_see_no_future(variant: str, decoder: str, across: str) -> None:
    scores = {"score": variant, "decoder_score": decoder, "cross_score": across}
    assert qknorm.scores_of(variant) == {f"model.{name}": scores[name] for name in scores}
    sizes = {"source_vocab": 9, "dim": 8, "heads": 2, "layers": 1, "train_length": 16}
    config = TranslatorConfig(**sizes, **scores)  # type: ignore[arg-type]
    assert str(config.cross_score) == f"{across}@16"
    assert qknorm.scores_of("KNA-logn") == {"model.score": "KNA-logn"}


def test_a_rate_multiplies_the_learning_rate_of_the_row(own: Callable[[str], str]) -> None:
    pairs = own("qknorm")
    runs = resolve("qknorm", pairs).runs
    swept = [run for run in runs if run.factors["experiment"] == "rates"]
    assert [run.variant for run in swept] == ["Baseline@x1", "Baseline@x8"]
    assert [run.training_config.optimiser.lr for run in swept] == [1e-3, 8e-3]
    assert [run.identity("training").factors for run in swept] == [
        {"experiment": "rates", "rate": rate, "learning_rate": rate * 1e-3} for rate in (1.0, 8.0)
    ]
    chosen = resolve("qknorm", pairs, ("QKBatchNorm",)).runs
    names = ["QKBatchNorm", "vision QKBatchNorm", "vision QKBatchNorm@x2"]
    assert [run.variant for run in chosen] == names
    vision = chosen[2].training_config
    assert str(vision.model.score).startswith("QKBatchNorm-NoPE@")
    assert vision.model.positions == "learned"
    changes = {"evaluation.split": "validation"}
    held = resolve("qknorm", pairs, ("QKBatchNorm",), changes=changes).runs
    assert [getattr(run, "split", None) for run in held[1:]] == ["validation"] * 2


def test_rows_are_trained_with_what_stands_after_a_plus(own: Callable[[str], str]) -> None:
    rows = ["Baseline", "Baseline+QK-Clip", "Baseline+QK-Clip+Muon"]
    changes = {
        **dict.fromkeys(("scores", "rates.scores", "vision.scores"), rows),
        "vision.rates.scores": [],
        "trained_with.Muon.optimiser.lr": 2e-3,
        "trained_with.QK-Clip.qk_clip": 5,
    }
    found = {run.variant: run for run in resolve("qknorm", own("qknorm"), changes=changes).runs}
    clipped = "Baseline+Muon+QK-Clip"
    names = [name for name in found if clipped in name]
    assert sorted(names) == [clipped, f"{clipped}@x1", f"{clipped}@x8", f"vision {clipped}"]
    for name, run in found.items():
        config = run.training_config
        assert config.optimiser.name == ("muon" if "Muon" in name else "adamw"), name
        assert config.qk_clip == (5 if "QK-Clip" in name else None), name
        # Multiples are of the row's own learning rate.
        rate = 2e-3 if "Muon" in name else 1e-3
        assert config.optimiser.lr == rate * (8 if name.endswith("@x8") else 1), name
    identity = found[f"{clipped}@x8"].identity("training")
    assert (identity.row, identity.score) == (clipped, "Baseline")
    assert identity.factors["qk_clip"] == 5.0
    assert qknorm.split_row("KNA-logn+") == ("KNA-logn+", ())
    score = "Baseline-RoPE(base=1e+06)"
    assert qknorm.split_row(f"{score}+Muon") == (score, ("Muon",))


# RealFormer
def _encoders(sweep: Sweep, protocol: str = "masked") -> list[EncoderRun]:
    return [r for r in sweep.runs if isinstance(r, EncoderRun) and r.protocol == protocol]


@pytest.mark.parametrize("name", ["smoke", "laptop"])
def test_a_preset_of_realformer_holds_every_row(name: str) -> None:
    sweep = resolve("realformer", name)
    table = _encoders(sweep)
    assert {run.row for run in table} == set(ROWS)
    assert {run.size for run in table} == {"small", "large"}
    assert {run.row for run in _encoders(sweep, "grid")} >= {"PostLN", "RealFormer"}
    configs = {run.row: run.training_config for run in table if run.size == "small"}
    half, whole = configs["RealFormer-half"], configs["RealFormer"]
    assert half.steps == whole.steps // 2
    assert half.model == whole.model


def test_rows_rates_and_sizes_can_be_chosen(own: Callable[[str], str]) -> None:
    encoders = own("realformer")
    chosen = resolve("realformer", encoders, ("RealFormer", "PostLN"), seeds=(3, 5))
    asked = product(("small", "large"), ("PostLN", "RealFormer"), (3, 5))
    expected = [(f"{size}-{row}", seed) for size, row, seed in asked]
    assert sorted((run.variant, run.seed) for run in chosen.runs) == sorted(expected)
    rows = ["PostLN", "PreLN", "RealFormer-from-PostLN"]
    small_size = {"sizes.small.rows": rows, "sizes.small.rates": {"PostLN": 0.25}}
    made = resolve("realformer", encoders, changes={**small_size, "sizes.large.rows": []})
    rates = {run.row: run.training_config.optimiser.lr for run in _encoders(made)}
    assert rates["PostLN"] == rates["RealFormer-from-PostLN"] == 0.25
    assert rates["PreLN"] != 0.25
    assert "large" not in {run.size for run in _encoders(made)}


# RMSNorm
def test_both_norms_are_trained_alike_and_then_timed(own: Callable[[str], str]) -> None:
    documents = own("rmsnorm")
    runs = resolve("rmsnorm", documents).runs
    assert [run.variant for run in runs] == [*("LayerNorm", "RMSNorm") * 2, TIMED]
    assert [run.seed for run in runs] == [0, 0, 1, 1, 0]
    layer, rms = (run.training_config.model_dump() for run in runs[:2])
    assert (layer["model"].pop("norm"), rms["model"].pop("norm")) == ("layer", "rms")
    assert layer == rms
    assert layer["model"]["labels"] == 3
    timed = runs[-1]
    assert isinstance(timed, TimeRun)
    assert timed.norms == ("LayerNorm", "RMSNorm")
    alone = resolve("rmsnorm", documents, variants=("RMSNorm",), seeds=(7,)).runs
    assert [(type(run), run.variant, run.seed) for run in alone] == [(NormRun, "RMSNorm", 7)]


# What is refused


@pytest.mark.parametrize("study", ["keynorm", "qknorm", "realformer", "rmsnorm"])
def test_a_rerun_may_change_what_changes_no_number(
    study: str, own: Callable[[str], str], tmp_path: Path
) -> None:
    preset = own(study)

    def opened(changes: dict[str, Any]) -> RunDirectory:
        config = resolve(study, preset, changes=changes).config
        return RunDirectory.open(tmp_path / "out", config, study, CHANGEABLE)

    with opened({}).lock():
        pass
    opened({"training.checkpoint_seconds": 7, "training.track": "trackio"})
    with pytest.raises(InputError, match=r"steps is \d+ there and 9 here"):
        opened({"training.steps": 9})
    for setting in ("rates.max_sentences", "evaluation.beam") if study == "qknorm" else ():
        with pytest.raises(InputError, match=rf"{setting} is \d there and 9 here"):
            opened({setting: 9})


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "keynorm": [
        ({"training.model": 5}, r"model cannot be 5: it is a group .*dim"),
        ({"nowhere.steps": 1}, "nowhere"),
        ({"reading.multiples": [1]}, "does not use that setting"),
        ({"training.data": {"corpus": "synthetic:copy", "tiled_low": 3}}, "tiled_low has no"),
        ({"variants": ("all", "KNA")}, "--variants all cannot be combined"),
    ],
    "window": [({"window.shares": [0.1, 0.12]}, "unknown field window")],
    "reading": [({"evaluation.multiples": [1]}, "does not use that setting")],
    "factors": [
        ({"variants": ("gaus",)}, "did you mean gau"),
        ({"variants": ("heads-4x",)}, r"heads is \d here, .* a multiple of 4"),
        ({"variants": ("length-4x",), "training.batch_size": 6}, "batch_size is 6 .* of 4"),
        ({"variants": ("preln",)}, "preln changes nothing in the preset tiny"),
    ],
    "continue": [
        ({"continued.read": [2, 4]}, "read must rise from 1"),
        ({"continued.multiple": 3}, r"a multiple of 3"),
    ],
    "retrofit": [
        ({"methods": ("YaRN",)}, "chooses its own methods"),
        ({"continued.multiple": 8}, "does not use that setting"),
    ],
    "mechanism": [({"evaluation.max_windows": 1}, "does not use that setting")],
    "qknorm": [
        ({"rates.multiples": [2, 1]}, "multiples must rise"),
        ({"training.model.score": "KNA"}, "varied by the study"),
        ({"scores": ["KNA-YaRN"]}, "applied after training"),
        ({"scores": ["KNA-logn++Muon"]}, r"KNA-logn\+ holds logn"),
        ({"scores": ["Baseline+Moun"]}, r"did you mean Muon\?.* \(in Baseline\+Moun\)"),
        ({"scores": ["QKRMSNorm+QK-Clip"]}, "its norm undoes it"),
        ({"trained_with.Muon.optimiser.name": "moun", "scores": ["KNA+Muon"]}, "moun"),
        ({"vision.training.model.patch": 3, "vision.scores": ["KNA"]}, "patches of 3 × 3"),
    ],
    "realformer": [
        ({"variants": ("RealFromer",)}, "did you mean RealFormer"),
        ({"training.model.placement": "PreLN"}, "placement is varied by the study"),
        ({"grid.size": "huge"}, r"grid\.size is huge; there are small, large"),
        ({"grid.rows": ["RealFormer-from-PostLN"]}, "which the grid does not"),
        ({"training.schedule.warmup_steps": 3}, "less than their warm-up"),
        ({"sizes.small.rates": {"PostLm": 0.25}}, "sizes.small.rates.*did you mean PostLN"),
    ],
    "rmsnorm": [
        ({"variants": ("BatchNorm",)}, "no norm is called 'BatchNorm'.*LayerNorm, RMSN"),
        ({"methods": ("YaRN",)}, "chooses its own methods"),
        ({"training.model.norm": "rms"}, r"model\.norm is varied by the study"),
    ],
}


@pytest.mark.parametrize(
    ("study", "asked", "said"),
    [(study, *case) for study, cases in REFUSED.items() for case in cases],
    ids=str,
)
def test_bad_input(study: str, asked: dict[str, Any], said: str, own: Callable[[str], str]) -> None:
    changes = {name: value for name, value in asked.items() if name not in ("variants", "methods")}
    chosen = {name: value for name, value in asked.items() if name not in changes}
    with pytest.raises(InputError, match=said):
        resolve(study, own(study), changes=changes, **chosen)

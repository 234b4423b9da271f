"""What requests of the studies of other models resolve to: qknorm, realformer and rmsnorm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.lab.studies import find, preset
from normattn.lab.studies.qknorm_runs import (
    MULTIPLES,
    SCORES,
    SWEPT,
    TranslationRun,
    scores_of,
    split_row,
)
from normattn.lab.studies.realformer_runs import ROWS, EncoderRun
from normattn.lab.studies.rmsnorm import TIMED, NormRun, TimeRun
from normattn.lab.sweep.run import Request, Sweep
from normattn.models.config import TranslatorConfig
from studies import small

QKNORM, REALFORMER, RMSNORM = (find(name) for name in ("qknorm", "realformer", "rmsnorm"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu")
    pytest.importorskip("sklearn", reason="the images are scikit-learn's")
    return small.qknorm(tmp_path_factory.mktemp("qknorm"))


@pytest.fixture
def encoders(tiny: Path, tmp_path: Path) -> str:
    return small.realformer(tmp_path, tiny.parent / "texts")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small.rmsnorm(tmp_path_factory.mktemp("rmsnorm"))


# QK-Norm


def test_every_preset_of_qknorm_can_be() -> None:
    assert preset.names("qknorm") == ["gpu", "laptop", "multi30k", "smoke"]
    for name in preset.names("qknorm"):
        runs = QKNORM.resolve(Request(name, seeds=(0,))).runs
        assert len({run.variant for run in runs}) == len(runs)
    runs = QKNORM.resolve(Request("laptop", seeds=(0,))).runs
    translated = [r.variant for r in runs if isinstance(r, TranslationRun) and r.translated]
    assert translated == list(SCORES)
    swept = {(r.row, r.factors["rate"]) for r in runs if r.factors["experiment"] == "rates"}
    assert swept == {(score, rate) for score in SWEPT for rate in MULTIPLES}


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
def test_norms_over_tokens_stay_where_no_future_is_seen(
    variant: str, decoder: str, across: str
) -> None:
    found = scores_of(variant)
    assert found == {
        "model.score": variant,
        "model.decoder_score": decoder,
        "model.cross_score": across,
    }
    scores = {name.removeprefix("model."): text for name, text in found.items()}
    sizes = {"source_vocab": 9, "dim": 8, "heads": 2, "layers": 1, "train_length": 16}
    config = TranslatorConfig(**sizes, **scores)  # type: ignore[arg-type]
    assert str(config.cross_score) == f"{across}@16"
    assert scores_of("KNA-logn") == {"model.score": "KNA-logn"}


def test_a_rate_multiplies_the_learning_rate_of_the_row(pairs: str, tmp_path: Path) -> None:
    runs = QKNORM.resolve(Request(pairs, out=tmp_path)).runs
    swept = [run for run in runs if run.factors["experiment"] == "rates"]
    assert [run.variant for run in swept] == ["Baseline@x1", "Baseline@x8"]
    assert [run.training_config.optimiser.lr for run in swept] == [1e-3, 8e-3]
    assert [run.identity("training").factors for run in swept] == [
        {"experiment": "rates", "rate": rate, "learning_rate": rate * 1e-3} for rate in (1.0, 8.0)
    ]
    chosen = QKNORM.resolve(Request(pairs, ("QKBatchNorm",), out=tmp_path)).runs
    assert [run.variant for run in chosen] == [
        *("QKBatchNorm", "vision QKBatchNorm", "vision QKBatchNorm@x2")
    ]
    vision = chosen[2].training_config
    assert str(vision.model.score).startswith("QKBatchNorm-NoPE@")
    assert vision.model.positions == "learned"
    changes = {"evaluation.split": "validation"}
    held = QKNORM.resolve(Request(pairs, ("QKBatchNorm",), changes=changes)).runs
    assert [getattr(run, "split", None) for run in held[1:]] == ["validation"] * 2


CLIPPED = "Baseline+Muon+QK-Clip"


def test_rows_are_trained_with_what_stands_after_a_plus(pairs: str, tmp_path: Path) -> None:
    rows = ["Baseline", "Baseline+QK-Clip", "Baseline+QK-Clip+Muon"]
    changes = {
        **dict.fromkeys(("scores", "rates.scores", "vision.scores"), rows),
        "vision.rates.scores": [],
        "trained_with.Muon.optimiser.lr": 2e-3,
        "trained_with.QK-Clip.qk_clip": 5,
    }
    runs = QKNORM.resolve(Request(pairs, out=tmp_path, changes=changes)).runs
    found = {run.variant: run for run in runs}
    names = [name for name in found if name.startswith(CLIPPED)]
    assert names == [CLIPPED, f"{CLIPPED}@x1", f"{CLIPPED}@x8"]
    assert f"vision {CLIPPED}" in found
    for name, run in found.items():
        config = run.training_config
        assert config.optimiser.name == ("muon" if "Muon" in name else "adamw"), name
        assert config.qk_clip == (5 if "QK-Clip" in name else None), name
        # Multiples are of the row's own learning rate.
        own = 2e-3 if "Muon" in name else 1e-3
        assert config.optimiser.lr == own * (8 if name.endswith("@x8") else 1), name
    identity = found[f"{CLIPPED}@x8"].identity("training")
    assert (identity.row, identity.score) == (CLIPPED, "Baseline")
    assert identity.factors["qk_clip"] == 5.0
    assert split_row("KNA-logn+") == ("KNA-logn+", ())
    assert split_row("Baseline-RoPE(base=1e+06)+Muon") == ("Baseline-RoPE(base=1e+06)", ("Muon",))


# RealFormer


def _encoders(sweep: Sweep, grid: bool = False) -> list[EncoderRun]:
    protocol = "grid" if grid else "masked"
    return [r for r in sweep.runs if isinstance(r, EncoderRun) and r.protocol == protocol]


@pytest.mark.parametrize("name", ["smoke", "laptop"])
def test_a_preset_of_realformer_holds_every_row(name: str) -> None:
    sweep = REALFORMER.resolve(Request(name))
    table = _encoders(sweep)
    assert {run.row for run in table} == set(ROWS)
    assert {run.size for run in table} == {"small", "large"}
    assert {run.row for run in _encoders(sweep, grid=True)} >= {"PostLN", "RealFormer"}
    half, whole = (
        next(r for r in table if (r.row, r.size) == (row, "small")).training_config
        for row in ("RealFormer-half", "RealFormer")
    )
    assert half.steps == whole.steps // 2
    assert half.model == whole.model


def test_rows_rates_and_sizes_can_be_chosen(encoders: str) -> None:
    chosen = REALFORMER.resolve(Request(encoders, ("RealFormer", "PostLN"), seeds=(3, 5)))
    assert sorted((run.variant, run.seed) for run in chosen.runs) == sorted(
        (f"{size}-{row}", seed)
        for size in ("small", "large")
        for row in ("PostLN", "RealFormer")
        for seed in (3, 5)
    )
    rows = ["PostLN", "PreLN", "RealFormer-from-PostLN"]
    changes = {
        "sizes.small.rows": rows,
        "sizes.small.rates": {"PostLN": 0.25},
        "sizes.large.rows": [],
    }
    made = REALFORMER.resolve(Request(encoders, changes=changes))
    rates = {run.row: run.training_config.optimiser.lr for run in _encoders(made)}
    assert rates["PostLN"] == rates["RealFormer-from-PostLN"] == 0.25
    assert rates["PreLN"] != 0.25
    assert "large" not in {run.size for run in _encoders(made)}


# RMSNorm


def test_both_norms_are_trained_alike_and_then_timed(documents: str) -> None:
    runs = RMSNORM.resolve(Request(documents)).runs
    assert [(run.variant, run.seed) for run in runs] == [
        *(("LayerNorm", 0), ("RMSNorm", 0), ("LayerNorm", 1), ("RMSNorm", 1)),
        (TIMED, 0),
    ]
    layer, rms = (run.training_config.model_dump() for run in runs[:2])
    assert (layer["model"].pop("norm"), rms["model"].pop("norm")) == ("layer", "rms")
    assert layer == rms
    assert layer["model"]["labels"] == 3
    timed = runs[-1]
    assert isinstance(timed, TimeRun)
    assert timed.norms == ("LayerNorm", "RMSNorm")
    alone = RMSNORM.resolve(Request(documents, variants=("rmsnorm",), seeds=(7,))).runs
    assert [(type(run), run.variant, run.seed) for run in alone] == [(NormRun, "RMSNorm", 7)]


# What is refused


BAD_SETTINGS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "pairs": [
        ({"rates.multiples": [2, 1]}, "multiples must rise"),
        ({"training.model.score": "KNA"}, "varied by the study"),
        ({"scores": ["KNA-YaRN"]}, "applied after training"),
        ({"scores": ["KNA-logn++Muon"]}, r"KNA-logn\+ holds logn"),
        ({"scores": ["Baseline+Moun"]}, r"did you mean Muon\?.* \(in Baseline\+Moun\)"),
        ({"scores": ["QKRMSNorm+QK-Clip"]}, "its norm undoes it"),
        ({"trained_with.Muon.optimiser.name": "moun", "scores": ["KNA+Muon"]}, "moun"),
        ({"vision.training.model.patch": 3, "vision.scores": ["KNA"]}, "patches of 3 × 3"),
    ],
    "encoders": [
        ({"training.model.placement": "PreLN"}, "placement is varied by the study"),
        ({"grid.size": "huge"}, r"grid\.size is huge; there are small, large"),
        ({"grid.rows": ["RealFormer-from-PostLN"]}, "which the grid does not"),
        ({"training.schedule.warmup_steps": 3}, "less than their warm-up"),
        ({"sizes.small.rates": {"PostLm": 0.25}}, "sizes.small.rates.*did you mean PostLN"),
    ],
    "documents": [({"training.model.norm": "rms"}, r"model\.norm is varied by the study")],
}
BAD_CHOICES: list[tuple[str, dict[str, Any], str]] = [
    ("encoders", {"variants": ("RealFromer",)}, "did you mean RealFormer"),
    ("documents", {"variants": ("BatchNorm",)}, "no norm is called 'BatchNorm'.*LayerNorm, RMSN"),
    ("documents", {"methods": ("YaRN",)}, "chooses its own methods"),
    *(
        (preset, {"changes": changes}, said)
        for preset, cases in BAD_SETTINGS.items()
        for changes, said in cases
    ),
]


@pytest.mark.parametrize(("preset", "asked", "said"), BAD_CHOICES, ids=str)
def test_bad_input(
    preset: str, asked: dict[str, Any], said: str, request: pytest.FixtureRequest
) -> None:
    study = {"pairs": QKNORM, "encoders": REALFORMER, "documents": RMSNORM}[preset]
    with pytest.raises(InputError, match=said):
        study.resolve(Request(request.getfixturevalue(preset), **asked))

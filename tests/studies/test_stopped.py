"""Every study, killed anywhere and resumed: the same bytes; some numbers computed once more."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.report.output import page_json, page_markdown
from normattn.lab.report.page import context
from normattn.lab.stats import measurements
from normattn.lab.studies import find
from normattn.lab.studies.base import Study
from normattn.lab.studies.continued import held_out_sets
from normattn.lab.studies.language import evaluation_sets
from normattn.lab.studies.preset import EvaluationSettings
from normattn.lab.sweep import paths as sweep_paths
from normattn.lab.sweep import runner
from normattn.lab.sweep.run import Sweep
from normattn.lab.training import TrainingConfig
from normattn.lab.training.init_from import new_model
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models import CausalLM
from normattn.models.masked_lm import MaskedLM
from normattn.models.pretrained import load_as, load_model
from studies import small

Tables = dict[str, list[dict[str, Any]]]


class Killed(BaseException):
    """The power went."""


def run(study: Study, sweep: Sweep) -> None:
    for each in sweep.runs:
        paths = sweep.paths(each)
        write_json(paths.settings, {"study": study.name, **each.model_dump(mode="json")})
        assert runner.run_child(paths.job, study) == 0


def run_killed(study: Study, sweep: Sweep, every: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """`run`, killed at note `every` of its progress, then at 2 · `every` …; returns how often."""
    notes = kills = 0

    def note(path: Path, value: dict[str, Any]) -> None:
        nonlocal notes
        sweep_paths.write_progress(path, value)
        notes += 1
        if notes == (kills + 1) * every:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(runner, "write_progress", note)
        patch.setattr(runner, "PROGRESS_SECONDS", 0.0)
        while True:
            notes = 0
            try:
                run(study, sweep)
            except Killed:
                kills += 1
            else:
                return kills


def page(study: Study, measured: pl.DataFrame) -> tuple[Tables, str]:
    made = context(study.page, measured)
    tables: Tables = json.loads(page_json(made))["tables"]
    return tables, page_markdown(made)


def _window(sweep: Sweep, found: Tables, text: str) -> None:
    rows = found["table"]
    assert [rows[n]["row"] for n in (0, 5, -1)] == ["no log-n", "no log-n, w = 8", "logn, w = 8"]
    # At w = L no relative position of the training length is touched.
    assert rows[5]["cost"]["value"] == 0.0


def _continue(sweep: Sweep, found: Tables, text: str) -> None:
    facts = {(fact["row"], fact["step"]): fact for fact in found["table"]}
    names = (*(f"Baseline{way}" for way in ("", "-PI", "-ABF", "-NTK", "-YaRN")), "KNA")
    assert facts.keys() == {*product(names, "014")}
    for name, folder, method in (
        ("KNA", "KNA/seed0/as it is", ""),
        ("Baseline-PI", "Baseline/seed0/PI(factor=4)", "PI(factor=4)"),
    ):
        place = sweep.out / "continued" / folder
        model = load_model(place / "kept" / "step-00000004")
        data = prepare_tokens(_config(place).data)
        settings = EvaluationSettings(multiples=(1, 4, 8), max_windows=3)
        with model.using(method):
            windows = held_out_sets(data, 8, settings)[-1].windows
            scores = model.token_scores(torch.from_numpy(windows))
        fact, correct = facts[name, "4"], 100 * float(scores.correct.double().mean())
        assert fact["loss_64"]["value"] == pytest.approx(float(scores.loss.mean()), rel=1e-5)
        assert fact["accuracy_64"]["value"] == pytest.approx(correct)


def _config(place: Path) -> TrainingConfig:
    return TrainingConfig.parse(read_object(place / "config.json")["config"])


def _retrofit(sweep: Sweep, found: Tables, text: str) -> None:
    facts = {(fact["row"], fact["step"]): fact for fact in found["table"]}
    names = ("as Baseline", "as KNA", "as QKRMSNorm")
    assert facts.keys() == {*product(names, "014")}
    base = load_model(sweep.out / "cells" / "Baseline" / "seed0" / "model")
    settings: Any = sweep.runs[0]
    for name in names:
        place = sweep.out / "continued" / "Baseline" / "seed0" / name[3:]
        config = _config(place)
        fresh = new_model(CausalLM, config.model, config.continued)
        assert fresh.config.score.variant_name == name[3:]
        weights = fresh.state_dict()
        assert all(torch.equal(weights[key], value) for key, value in base.state_dict().items())
        assert bool(weights.keys() - base.state_dict().keys()) == (name == "as QKRMSNorm")
        last = load_model(place / "kept" / "step-00000004")
        read: Any = evaluation_sets(prepare_tokens(config.data), 8, settings.evaluation)[-1]
        correct = last.token_scores(torch.from_numpy(read.windows)).correct[:, read.start :]
        far = facts[name, "4"]["far"]["value"]
        assert far == pytest.approx(100 * float(correct.double().mean()))


def _mechanism(sweep: Sweep, found: Tables, text: str) -> None:
    clamped = {row["row"]: row for row in found["clamped"]}
    assert clamped["KNA-NoPE"]["accuracy_clamped"] is None
    for row, whole, part, less in (
        *((row, "further", "far_outside", "near_outside") for row in found["distances"]),
        (clamped["KNA"], "loss_clamped_less_unmodified", "loss_clamped", "loss_unmodified"),
    ):
        difference = row[part]["value"] - row[less]["value"]
        assert row[whole]["value"] == pytest.approx(difference, abs=1e-6)


def _qknorm(sweep: Sweep, found: Tables, text: str) -> None:
    assert found["table"][1]["change_loss"]["units"] == 4
    assert found["rates"][0]["loss"]["units"] == 6
    assert [row["row"] for row in found["vision"]] == ["QKBatchNorm ×1", "QKBatchNorm ×2"]
    measured = find("qknorm").measurements(sweep.out)
    tested = measured.filter(protocol="images", statistic="accuracy").select("row", "factor.rate")
    assert set(tested.rows()) == {("QKBatchNorm", 1.0), ("QKBatchNorm", 2.0)}
    kept = sweep.out / "cells" / "KNA" / "seed0" / "evaluations" / "translations.json"
    assert len(read_object(kept)["translations"]) == 4
    _of_other_data("qknorm", sweep.out, "KNA/*/evaluations/translation")


def _of_other_data(study: str, out: Path, pattern: str) -> None:
    """Two test sets are not mixed, and a record that cannot be read is named."""
    place = sorted(out.glob(f"cells/{pattern}.parquet"))[0]
    other = measurements.read(place).with_columns(pl.lit("0").alias("data"))
    measurements.write(place, other)
    assert "0" not in find(study).collect(out)["data"]  # Of two data sets one counts.
    place.write_text("nothing")
    with pytest.raises(InputError, match=rf"{place.name} is not a measurements table"):
        find(study).collect(out)


def _realformer(sweep: Sweep, found: Tables, text: str) -> None:
    rows, chosen = found["table"], small.CHANGES["realformer"]["sizes.small.rows"]
    both = [*product(["small"], chosen), *product(["large"], ("PostLN", "RealFormer"))]
    assert [(row["size"], row["row"]) for row in rows] == both
    for row in rows:
        half = row["row"] in ("RealFormer-half", "RealFormer-from-PostLN")
        assert row["planned_steps"]["value"] == (2 if half else 4)
    # Memory changes no number.
    one: Any = sweep.runs[0]
    folder, config = sweep.paths(one).run, one.training_config
    stored = measurements.read(folder / "evaluations" / "scores.parquet")
    less = one.evaluation.model_copy(update={"max_tokens": 1})
    again = one.model_copy(update={"evaluation": less}).measure(
        folder, config, prepare_tokens(config.data), lambda *_: None
    )
    first, again = (
        each.filter(pl.col("statistic") == "gradients_start").sort("layer", "unit")
        for each in (stored, again)
    )
    assert first.equals(again)
    # A row goes on from the trained PostLN.
    name = "RealFormer-from-PostLN"
    start = sweep.out / "cells" / f"small-{name}" / "seed0" / "model"
    folder = sweep.out / "continued" / f"small-{name}" / "seed0" / name
    config = MaskedConfig.parse(read_object(folder / "config.json")["config"], "the run")
    assert config.continued is not None
    begun = new_model(MaskedLM, config.model, config.continued).state_dict()
    trained = load_as(MaskedLM, start).state_dict()
    assert all(torch.equal(begun[key], weights) for key, weights in trained.items())
    ended = load_as(MaskedLM, folder / "model").state_dict()
    assert any(not torch.equal(ended[key], weights) for key, weights in trained.items())


def _rmsnorm(sweep: Sweep, found: Tables, text: str) -> None:
    rows = found["table"]
    assert [row["row"] for row in rows] == ["LayerNorm", "RMSNorm"]
    assert all((row["micro_f1"]["seeds"], row["step_ms"]["units"]) == ([0, 1], 2) for row in rows)
    assert "RMSNorm costs a little F1 (0.26 points)" in text
    _of_other_data("rmsnorm", sweep.out, "RMSNorm/seed1/evaluations/classification")


STUDIES = {
    "window": (17, _window),
    "continue": (23, _continue),
    "retrofit": (17, _retrofit),
    "mechanism": (4, _mechanism),
    "qknorm": (5, _qknorm),
    "realformer": (9, _realformer),
    "rmsnorm": (9, _rmsnorm),
}
"""After how many notes of progress each study is killed, again and again; and what it must show."""


@pytest.mark.parametrize("name", STUDIES)
def test_killed_anywhere_it_is_the_same(
    name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normattn.lab.studies.continued.NORMED", ("KNA",))
    study = find(name)
    # The two read one corpus, so that nothing differs but the kills.
    whole, broken = (
        study.resolve(small.request(name, tiny, tmp_path, tmp_path / each))
        for each in ("whole", "broken")
    )
    run(study, whole)
    assert all(stage.is_done() for each in whole.runs for stage in whole.stages(each))
    if name == "rmsnorm":
        # Times differ from run to run: those of the unbroken one are given to the other.
        timed = Path("cells/step time/seed0/evaluations/step time.parquet")
        (broken.out / timed).parent.mkdir(parents=True)
        (broken.out / timed).write_bytes((whole.out / timed).read_bytes())
    every, check = STUDIES[name]
    assert run_killed(study, broken, every, monkeypatch) > 1
    measured = study.measurements(whole.out)
    assert study.measurements(broken.out).equals(measured)
    for metrics in sorted(whole.out.glob("cells/*/*/metrics.jsonl")):
        again = broken.out / metrics.relative_to(whole.out)
        assert again.read_bytes() == metrics.read_bytes()
    check(whole, *page(study, measured))

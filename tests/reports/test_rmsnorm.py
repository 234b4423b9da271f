"""The norm study's rows: F1 from counts, paired differences, ratios of times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.classification_record import (
    ClassificationRecord,
    macro_f1,
    micro_f1,
    read_classification,
    write_classification,
)
from normattn.reports.rmsnorm import rmsnorm_report
from normattn.reports.rmsnorm_records import StepTimes, Training
from normattn.reports.rmsnorm_rows import differences, norm_rows, time_ratio

DRAWN = Bootstrap(resamples=200)


def record(variant: str, seed: int, wrong: int = 0, data: str = "d") -> ClassificationRecord:
    """Twenty documents of one of three labels; the first `wrong` are predicted to be the next."""
    true = tuple((i % 3,) for i in range(20))
    predicted = tuple(((i + (i < wrong)) % 3,) for i in range(20))
    return ClassificationRecord(
        variant=variant,
        seed=seed,
        parameters=10,
        weights="w",
        data=data,
        split="test",
        labels=("a", "b", "c"),
        documents=tuple(f"x{i}" for i in range(20)),
        threshold=0.4 + 0.1 * seed,
        development_micro_f1=0.5,
        micro_f1=1 - wrong / 20,
        macro_f1=1 - wrong / 20,
        true=true,
        predicted=predicted,
        loss=tuple(0.1 + 0.01 * (i < wrong) for i in range(20)),
    )


def training() -> Training:
    metrics = tuple({"step": step, "loss": 1 / step} for step in range(1, 7))
    keys = {"loss": 0.1, "micro_f1": 0.5, "macro_f1": 0.4, "threshold": 0.5}
    development = tuple({"step": step, **keys} for step in (3, 6))
    return Training(6, metrics, development, 12.0)


def test_f1_of_counts_by_hand() -> None:
    sums = np.array([3.0, 0, 0, 4, 1, 0, 5, 1, 0])
    assert micro_f1(sums) == pytest.approx(100 * 2 * 3 / (5 + 6))
    # The third label is nowhere: it does not count.
    assert macro_f1(sums) == pytest.approx(100 * (2 * 3 / 9 + 0) / 2)
    assert micro_f1(np.zeros(9)) == macro_f1(np.zeros(9)) == 0


def test_a_label_that_a_resample_misses_keeps_its_f1() -> None:
    whole = np.array([3.0, 0, 1, 4, 1, 1, 4, 1, 1])
    drawn = np.array([4.0, 0, 0, 4, 1, 0, 4, 0, 0])
    # The second label was drawn, the third was not.
    assert macro_f1(drawn, whole) == pytest.approx(100 * (1 + 0 + 1) / 3)
    assert macro_f1(whole, whole) == macro_f1(whole)


def test_rows_pool_seeds_and_hold_their_value() -> None:
    records = [record("RMSNorm", s, wrong=2 * s) for s in (1, 0)] + [record("LayerNorm", 0)]
    trainings = {(r.variant, r.seed): training() for r in records}
    layer, rms = norm_rows(records, trainings, None, DRAWN)
    assert (layer.norm, rms.norm) == ("LayerNorm", "RMSNorm")
    assert layer.metrics["micro_f1"].value == 100
    assert rms.metrics["micro_f1"].value == pytest.approx(95)
    low, high = rms.metrics["micro_f1"].low, rms.metrics["micro_f1"].high
    assert low is not None
    assert high is not None
    assert low < 95 < high
    assert (rms.seeds, rms.thresholds, rms.seconds) == ((0, 1), (0.4, 0.5), 12.0)
    assert rms.metrics["loss"].value == pytest.approx(100.5)


def test_differences_are_paired_on_the_seeds_that_both_have() -> None:
    same = [record(v, s, wrong=3) for v in ("LayerNorm", "RMSNorm") for s in (0, 1)]
    found = differences([*same, record("RMSNorm", 5, wrong=20)], DRAWN)
    assert all((e.value, e.low, e.high) == (0, 0, 0) for e in found.values())
    worse = [record("LayerNorm", 0), record("RMSNorm", 0, wrong=12)]
    assert differences(worse, DRAWN)["micro_f1"].below_zero
    assert differences([record("RMSNorm", 0)], DRAWN) == {}


def test_a_ratio_of_times_is_paired_by_round() -> None:
    drift = np.linspace(1, 5, 30)
    times = StepTimes(
        seconds={"LayerNorm": tuple(drift), "RMSNorm": tuple(0.9 * drift)},
        device="cpu",
        threads=1,
        batch_size=4,
        precision="fp32",
    )
    ratio = time_ratio(times, DRAWN)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.9, 0.9, 0.9))


def test_the_page_says_what_was_found_and_what_diverged(tmp_path: Path) -> None:
    records = [record("LayerNorm", 0), record("RMSNorm", 0, wrong=12)]
    trainings = {(r.variant, r.seed): training() for r in records}
    times = StepTimes(
        seconds={"LayerNorm": (1.0, 2.0), "RMSNorm": (0.5, 1.0)},
        device="cpu",
        threads=1,
        batch_size=4,
        precision="fp32",
    )
    diverged = {"RMSNorm, seed 1": "the loss is NaN at step 3"}
    paths = rmsnorm_report(records, trainings, times, diverged, tmp_path, DRAWN)
    assert [path.name for path in paths] == ["training.png", "training.svg"]
    page = (tmp_path / "table.md").read_text()
    assert "RMSNorm is worse" in page
    assert "RMSNorm is faster, as the source says" in page
    assert "- RMSNorm, seed 1 diverged: the loss is NaN at step 3" in page
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    rmsnorm_report(records, trainings, times, diverged, tmp_path, DRAWN)
    assert first == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_records_of_other_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="different documents"):
        differences([record("LayerNorm", 0), record("RMSNorm", 0, data="e")], DRAWN)
    with pytest.raises(InputError, match="nothing to report"):
        rmsnorm_report([], {}, None, {}, tmp_path)


def test_a_record_comes_back_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_classification(path, record("RMSNorm", 0, wrong=1))
    assert read_classification(path) == record("RMSNorm", 0, wrong=1)
    path.write_text(path.read_text().replace('"true":[[0]', '"true":[[7]'))
    with pytest.raises(InputError, match="a document has label 7 of 3"):
        read_classification(path)
    path.unlink()
    with pytest.raises(InputError, match="does not exist"):
        read_classification(path)


def test_where_every_training_diverged_that_is_the_result(tmp_path: Path) -> None:
    said = {"RMSNorm, seed 0": "the loss is nan at step 3"}
    assert rmsnorm_report([], {}, None, said, tmp_path) == []
    page = (tmp_path / "table.md").read_text()
    assert "- RMSNorm, seed 0 diverged: the loss is nan at step 3" in page

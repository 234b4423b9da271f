"""Cells of Vision Transformers: what they train, and that stopping them changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.helpers import write_images
from normattn.errors import InputError
from normattn.lab.stats import measurements, select
from normattn.lab.studies.qknorm import STUDY, collect
from normattn.lab.studies.qknorm.images import SCORES, VisionCell, vision_cells, vision_score
from normattn.lab.studies.qknorm.rows import Trained, rows_of
from normattn.lab.sweep.study import Sweep, SweepConfig
from normattn.settings import Settings
from studies.inprocess import PAGE, files, run, run_killed, write


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model of 8 × 8 noise."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (80, 8, 8), dtype=np.uint8)
    labels = (np.arange(80) % 3).tolist()
    path = write_images(tmp_path_factory.mktemp("images") / "noise", pixels, labels)
    return {
        "steps": 6,
        "batch_size": 8,
        "device": "cpu",
        "checkpoint_seconds": 0,
        "shift": 1,
        "model": {"dim": 8, "layers": 1, "heads": 2, "patch": 4},
        "data": {"source": str(path)},
        "optimiser": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2},
    }


def rows(scores: Sequence[str]) -> Iterable[Trained]:
    return rows_of(scores, {}).values()


def sweep(out: Path, training: dict[str, Any], **choices: Any) -> Sweep:
    cells = vision_cells(training, rows(choices.pop("scores", SCORES)), **choices)
    config = SweepConfig(preset="tests")
    return Sweep(STUDY.name, config, cells, (), out, lambda cell, data: ())


def test_cells_and_their_names(training: dict[str, Any]) -> None:
    cells = vision_cells(training, rows(("KNA", "Baseline")), (0, 3), (1.0, 4.0))
    assert [(cell.variant, cell.seed) for cell in cells] == [
        (f"vision {score}{rate}", seed)
        for seed in (0, 3)
        for rate in ("", "@x4")
        for score in ("KNA", "Baseline")
    ]
    fast = cells[2].training_config
    assert fast.optimiser.lr == pytest.approx(4e-2)
    assert cells[0].training_config.optimiser.lr == pytest.approx(1e-2)
    assert str(fast.model.score) == "KNA-NoPE@5"
    assert (fast.model.height, fast.model.classes, fast.model.positions) == (8, 3, "learned")
    again = VisionCell.model_validate(cells[2].model_dump(mode="json"))
    assert again.training_config == fast
    identity = cells[2].identity("training")
    assert (identity.row, identity.seed) == ("KNA", 0)
    assert identity.factors == {
        "experiment": "images",
        "rate": 4.0,
        "learning_rate": fast.optimiser.lr,
    }


def test_every_row_can_be_trained(training: dict[str, Any]) -> None:
    for cell in vision_cells(training, rows(SCORES)):
        assert cell.training_config.model.positions == "learned"
    assert {"Baseline", "QKBatchNorm", "QKInstanceNorm", "QKNorm2020"} <= set(SCORES)


def test_a_score_has_no_positions_of_its_own_unless_it_names_them() -> None:
    assert vision_score("KNA-logn") == "KNA-logn-NoPE"
    for score in ("KNA-NoPE", "KNA-RoPE", "KNA-ALiBi", "KNA-RoPE(base=100)"):
        assert vision_score(score) == score
    with pytest.raises(InputError, match="holds YaRN, which is applied after training"):
        vision_score("KNA-YaRN(factor=2)")


def test_stopped_anywhere_it_is_the_same(
    tmp_path: Path, training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running statistics of a BatchNorm too."""
    choices: dict[str, Any] = {"scores": ("QKBatchNorm",), "rates": (1.0, 2.0)}
    training = {**training, "inspect_every": 3}
    run(STUDY, sweep(tmp_path / "whole", training, **choices))
    broken = sweep(tmp_path / "broken", training, **choices)
    assert run_killed(STUDY, broken, 4, monkeypatch) > 1
    found = files(tmp_path / "whole")
    assert files(tmp_path / "broken") == found
    assert {"vision.csv", "measurements.parquet"} <= found.keys()
    assert b"vision_by_learning_rate" in found["figures.txt"]
    measured = measurements.read(tmp_path / "whole" / PAGE / measurements.FILE)
    assert not select(measured, {"statistic": "diverged"}).height
    tested = select(measured, {"protocol": "images", "statistic": "accuracy"})
    assert set(tested.select("row", "factor.rate", "score").rows()) == {
        ("QKBatchNorm", rate, "QKBatchNorm-NoPE@5") for rate in (1.0, 2.0)
    }
    shares = select(measured, {"statistic": "entropy_share"})
    assert set(shares["factor.rate"]) == {1.0, 2.0}
    assert set(shares["bin"]) == {1.0, 3.0, 6.0}
    assert all(0 < above / below <= 1 for above, below in shares.select("sum", "of").rows())
    assert select(measured, {"statistic": "largest_logit"}).height == 6


def test_a_training_in_nan_is_a_result(tmp_path: Path, training: dict[str, Any]) -> None:
    wild = {**training, "model": {**training["model"], "init_std": 1e38}}
    asked = sweep(tmp_path / "out", wild, scores=("Baseline",), rates=(4.0,))
    with pytest.raises(AssertionError):
        run(STUDY, asked)
    measured = collect(tmp_path / "out")
    assert not select(measured, {"protocol": "images"}).height
    ended = select(measured, {"statistic": "diverged", "row": "Baseline", "factor.rate": 4.0})
    assert ended.height == 1
    assert ended["unit"][0]
    write(STUDY, tmp_path / "out")
    text = (tmp_path / "out" / "page" / "table.md").read_text()
    step = ended["bin"][0]
    assert f"diverged at step {step:.0f}; the first value that is not finite came from" in text
    assert f"step {step:.0f} (seed 0)" in (tmp_path / "out" / "page" / "vision.csv").read_text()


def test_settings_that_cannot_be(training: dict[str, Any]) -> None:
    assert issubclass(VisionCell, Settings)
    (cell,) = vision_cells({**training, "model": {**training["model"], "patch": 3}}, rows(("KNA",)))
    with pytest.raises(InputError, match=r"settings of vision KNA seed 0: .*patches of 3 × 3"):
        _ = cell.training_config

"""The RealFormer study's statistics from plain records, against sums made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.realformer_claims import findings
from normattn.reports.realformer_grid import GridCell, Panel, grid_panels
from normattn.reports.realformer_records import (
    Depth,
    EncoderRecord,
    Failure,
    Setting,
    read_encoder,
    read_failure,
)
from normattn.reports.realformer_rows import by_layer, encoder_rows, estimated, paired

DOCUMENTS = tuple(f"d{n:02}" for n in range(30))
LAYERS = 4
FEW = Bootstrap(resamples=300)


def setting(row: str = "PostLN", size: str = "small", seed: int = 0, **more: Any) -> Setting:
    fields: dict[str, Any] = {
        "part": "table",
        "row": row,
        "size": size,
        "seed": seed,
        "placement": "PostLN",
        "score": "Baseline",
        "shared": False,
        "layers": LAYERS,
        "dim": 8,
        "parameters": 100,
        "steps": 10,
        "learning_rate": 1e-3,
        "dropout": 0.0,
        "warmup": 5,
    }
    return Setting(**{**fields, **more})


def record(hits: int, noise: int = 0, **who: Any) -> EncoderRecord:
    """Each document has 100 tokens in 2 texts, of which `hits` and a little noise are right."""
    random = np.random.default_rng([noise, 7])
    correct = hits + random.integers(-5, 6, len(DOCUMENTS))
    each = np.full((len(DOCUMENTS), LAYERS), 1.0)
    rising = each * np.arange(1, LAYERS + 1)
    exits = np.linspace(correct - 20, correct, LAYERS, axis=1).astype(int)
    depth = {
        "correct": exits.tolist(),
        "variance": np.pad(rising, ((0, 0), (1, 0))).tolist(),
        "entropy": (2 * each).tolist(),
        "agreement": each[:, 1:].tolist(),
        "agreement_mean": each[:, 1:].tolist(),
        "gradients": rising[:3].tolist(),
        "gradients_start": rising[:3].tolist(),
    }
    grid = who.get("part") == "grid"
    return EncoderRecord(
        setting=setting(**who),
        weights="w",
        data="d",
        train_length=16,
        documents=DOCUMENTS,
        windows=(2,) * len(DOCUMENTS),
        tokens=(100,) * len(DOCUMENTS),
        correct=tuple(correct.tolist()),
        loss=tuple((300.0 - correct).tolist()),
        unigram_loss=(280.0,) * len(DOCUMENTS),
        depth=None if grid else Depth.model_validate(depth),
    )


def test_rows_pool_their_seeds_and_statistics_are_ratios_of_sums() -> None:
    records = [record(40, 1, seed=0), record(50, 2, seed=1), record(30, 3, row="PreLN", seed=1)]
    post, pre = encoder_rows(records)
    assert (post.seeds, pre.seeds) == ((0, 1), (1,))
    found = estimated([(1.0, post.accuracy())], post.counts, FEW)
    right = sum(sum(each.correct) for each in records[:2])
    assert found.value == pytest.approx(100 * right / (2 * 3000))
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high
    assert (found.documents, found.tokens, found.seeds) == (30, 3000, 2)
    a, b = paired(post, pre)
    assert a.seeds == b.seeds == (1,)
    gap = estimated([(1.0, a.accuracy()), (-1.0, b.accuracy())], a.counts, FEW)
    assert gap.value == pytest.approx((sum(records[1].correct) - sum(records[2].correct)) / 30)
    assert [each.value for each in by_layer(post.layers("variance"), post.counts, FEW)] == [
        pytest.approx(n / 2) for n in range(5)
    ]
    gradients = post.gradients("gradients")
    assert gradients is not None
    assert gradients.value() == pytest.approx([1.0, 2.0, 3.0, 4.0])


def test_a_claim_counts_only_beyond_its_interval() -> None:
    records = [
        *(record(hits, 1, row=row) for row, hits in (("PostLN", 40), ("RealFormer", 46))),
        record(46, 1, row="PreLN"),
        *(record(30, 4, row=row, size="wide") for row in ("PostLN", "RealFormer", "PreLN")),
    ]
    found = {
        (each.claim, each.size, each.what): each
        for each in findings(encoder_rows(records), [], FEW)
    }
    better = [each for key, each in found.items() if key[0].startswith("RealFormer is better")]
    assert [(each.size, each.verdict) for each in better] == [
        *(("small", "found"), ("small", "not found")),
        *(("wide", "not found"), ("wide", "not found")),
    ]
    size = [each for key, each in found.items() if key[0].startswith("a larger model")]
    # RealFormer loses 16 points by growing where PostLN loses 10 and PreLN 16.
    assert [each.difference.value for each in size] == [pytest.approx(-6.0), pytest.approx(0.0)]
    assert [each.verdict for each in size] == ["the opposite was found", "not found"]
    variance = next(e for key, e in found.items() if key[0].startswith("PreLN's residual"))
    assert variance.difference.value == pytest.approx((4 - 1) / 2)
    assert variance.verdict == "found"


def test_stability_is_decided_by_settings_that_one_alone_fails() -> None:
    """Six settings that only PostLN fails are sure at 5 %, five are not: 2 / 2⁶ and 2 / 2⁵."""
    learned: Literal["learned"] = "learned"
    stuck: Literal["stuck"] = "stuck"
    for failing, verdict in ((6, "found"), (5, "not found")):
        cells = {
            row: {
                (1e-3 * n, 0.0): GridCell(row, 1e-3 * n, 0.0, 0, None, state)
                for n in range(8)
                for state in [stuck if row == "PostLN" and n < failing else learned]
            }
            for row in ("PostLN", "RealFormer")
        }
        (one,) = findings([], [Panel(row, 0, each) for row, each in cells.items()], FEW)
        assert one.verdict == verdict
        assert one.difference.value == -failing
        assert f"RealFormer 0 − PostLN {failing} of 8" in one.what
        swapped = {"PostLN": cells["RealFormer"], "RealFormer": cells["PostLN"]}
        (one,) = findings([], [Panel(row, 0, each) for row, each in swapped.items()], FEW)
        assert one.verdict == ("the opposite was found" if failing == 6 else "not found")


def test_the_grid_tells_learned_stuck_and_diverged() -> None:
    rate = {"part": "grid", "learning_rate": 1e-2}
    records = [
        record(40, 1, part="grid"),
        record(10, 2, **rate),
        record(40, 1, part="grid", warmup=0),
    ]
    lost = Failure(setting=setting(part="grid", learning_rate=1.0), step=3, where="the loss")
    warm, cold = grid_panels(records, [lost], FEW)
    assert [cell.state for cell in warm.cells.values()] == ["learned", "stuck", "diverged"]
    assert (warm.warmup, warm.failed, cold.warmup, cold.failed) == (5, 2, 0, 0)
    assert warm.best is not None
    assert warm.best.learning_rate == 1e-3


def test_what_does_not_belong_together_is_refused() -> None:
    other = record(40, seed=1).model_copy(update={"data": "another"})
    with pytest.raises(InputError, match="different texts"):
        encoder_rows([record(40), other])
    with pytest.raises(InputError, match="trained differently"):
        encoder_rows([record(40), record(40, seed=1, steps=20)])
    rows = encoder_rows([record(40), record(40, row="PreLN", seed=1)])
    with pytest.raises(InputError, match="share no seed"):
        paired(*rows)


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"format": 1}')
    for read in (read_encoder, read_failure):
        with pytest.raises(InputError, match="no record of the RealFormer study") as refused:
            read(tmp_path / "record.json")
        assert "\n" not in str(refused.value)
        assert "http" not in str(refused.value)

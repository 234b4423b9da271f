"""Generated copying: fresh noise to train on, tiled documents to test on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.lab.data.batches import TrainingBatches
from normattn.lab.data.tokens import CopyTask, DataConfig, prepare_tokens

ADDRESS = "synthetic:copy?low=3&high=6&tokens=5000&documents=7&document_tokens=50"


def test_training_rows_and_test_documents_repeat_with_the_periods(tmp_path: Path) -> None:
    config = DataConfig(corpus=ADDRESS, vocab_size=200, seed=4)
    data = prepare_tokens(config, tmp_path)
    assert data.tokeniser is None
    assert not list(tmp_path.iterdir())
    batches = TrainingBatches(data.train, 24, 32, 0, config.tiling)
    for row in batches.batch(0):
        periods = [p for p in range(3, 7) if (row == np.resize(row[:p], 25)).all()]
        assert periods
    assert len(data.test) == 7
    for number in range(7):
        row = data.test.document(number)
        assert 0 < row.min() <= row.max() < 200
        assert any((row[p:] == row[:-p]).all() for p in range(3, 7))
    assert not np.array_equal(data.test.tokens, data.validation.tokens)
    assert data.train.total == 5001


def test_the_tokens_follow_from_seed_and_vocabulary() -> None:
    task = CopyTask.from_address(ADDRESS)
    made = ((200, 4), (200, 4), (200, 5), (201, 4))
    prints = [task.token_data(*each).fingerprint for each in made]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert task.token_data(70_000, 0).test.tokens.dtype == np.uint32


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("synthetic:sort", "the generated corpus is 'synthetic:copy'"),
        ("synthetic:copy?low=x", "low: .*valid integer"),
        ("synthetic:copy?hgh=4", "hgh: there is no such setting"),
        ("synthetic:copy?low=9&high=3", "expected low ≤ high"),
        ("synthetic:copy?low=4&low=8", "each option once"),
        ("synthetic:copy?documents=0", "documents: .*greater than or equal to 1"),
    ],
)
def test_wrong_addresses_are_refused(address: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare_tokens(DataConfig(corpus=address))

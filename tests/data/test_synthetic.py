"""Generated copying: fresh noise to train on, tiled documents to test on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.lab.data import (
    CopyTask,
    DataConfig,
    TrainingBatches,
    non_repeated_set,
    prepare_tokens,
)

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
    windows = non_repeated_set(data.test, 5, multiple=8)
    assert windows.windows.shape == (7, 41)
    assert 0 < windows.windows.min() <= windows.windows.max() < 200
    for row in windows.windows:
        assert any((row[p:] == row[:-p]).all() for p in range(3, 7))
    assert not np.array_equal(data.test.tokens, data.validation.tokens)
    assert data.train.total == 5001


def test_the_tokens_follow_from_seed_and_vocabulary() -> None:
    task = CopyTask.parse(ADDRESS)
    prints = [
        task.token_data(v, s).fingerprint for v, s in ((200, 4), (200, 4), (200, 5), (201, 4))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert task.token_data(70_000, 0).test.tokens.dtype == np.uint32


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("synthetic:sort", "the generated corpus is 'synthetic:copy'"),
        ("synthetic:copy?low=x", "low: Input should be a valid integer"),
        ("synthetic:copy?hgh=4", "has no option 'hgh'"),
        ("synthetic:copy?low=9&high=3", "expected low ≤ high"),
        ("synthetic:copy?low=4&low=8", "the option 'low' is given more than once"),
        ("synthetic:copy?documents=0", "documents: Input should be greater"),
    ],
)
def test_wrong_addresses_are_refused(address: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare_tokens(DataConfig(corpus=address))

"""Images: what packages hold, splits by hash, and batches that need no state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn import InputError
from normattn.lab.data.images import (
    ImageBatches,
    ImageDataConfig,
    image_shape,
    prepare_images,
    scale_pixels,
    shift_images,
)

from .helpers import make_images


def shape(height: int, width: int, channels: int, classes: int) -> dict[str, int]:
    return {"height": height, "width": width, "channels": channels, "classes": classes}


@pytest.mark.parametrize(("source", "count", "side"), [("digits", 1797, 8), ("mnist5k", 5000, 28)])
def test_sets_that_packages_carry(source: str, count: int, side: int) -> None:
    data = prepare_images(ImageDataConfig(source=source))
    splits = (data.train, data.validation, data.test)
    config = ImageDataConfig(source=source)
    assert data.shape == image_shape(config) == shape(side, side, 1, 10)
    names = [set(each.names) for each in splits]
    assert sum(map(len, names)) == len(set.union(*names)) == count
    assert 0.17 < len(data.test) / count < 0.23
    assert 0.07 < len(data.validation) / count < 0.13
    for each in splits:
        assert set(each.labels.tolist()) == set(range(10))
    assert data.train.pixels.max() == 255
    assert prepare_images(ImageDataConfig(source=source)).fingerprint == data.fingerprint
    other = prepare_images(ImageDataConfig(source=source, seed=1))
    assert other.fingerprint != data.fingerprint
    assert other.test.names != data.test.names


def test_sets_that_are_not_there() -> None:
    for read in (ImageDataConfig.plan_notes, prepare_images, image_shape):
        with pytest.raises(InputError, match="'digit': did you mean digits"):
            read(ImageDataConfig(source="digit"))
    with pytest.raises(InputError, match="test split of digits has no image"):
        prepare_images(ImageDataConfig(source="digits", test_fraction=0))


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_every_image_once_an_epoch(batch: int, steps: int, seed: int) -> None:
    """The stream of steps is one permutation after another, whatever the batch size."""
    batches = ImageBatches(make_images(10), batch, seed)
    seen = np.concatenate([batches.batch(step)[1] for step in range(1, steps + 1)])
    for first in range(0, len(seen) - 9, 10):
        assert sorted(seen[first : first + 10]) == list(range(10))


def test_shifts_move_and_repeat_the_border() -> None:
    pixels = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    moved = shift_images(pixels, np.array([[1, -1]]))[0, ..., 0]
    np.testing.assert_array_equal(moved, [[1, 2, 2], [1, 2, 2], [4, 5, 5]])
    assert (shift_images(pixels, np.array([[0, 0]])) == pixels).all()
    seen = set()
    batches = ImageBatches(make_images(1), 1, 0, shift=1)
    for step in range(1, 60):
        seen.add(batches.batch(step)[0].tobytes())
    every = {
        scale_pixels(shift_images(batches.split.pixels, np.array([move]))).tobytes()
        for move in itertools.product((-1, 0, 1), repeat=2)
    }
    assert seen == every
    with pytest.raises(InputError, match="leaves no pixels of images of 4 × 4"):
        ImageBatches(make_images(1), 1, 0, shift=4)

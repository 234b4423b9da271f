"""Images: what packages and files hold, splits by hash, and batches that need no state."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from normattn import InputError
from normattn.lab.data.images import (
    ImageBatches,
    ImageDataConfig,
    ImageSplit,
    image_shape,
    prepare_images,
    scaled,
    shifted,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 5, 6), dtype=np.uint8)
LABELS = np.arange(40) % 4


def shape(height: int, width: int, channels: int, classes: int) -> dict[str, int]:
    return {"height": height, "width": width, "channels": channels, "classes": classes}


def split(count: int = 10, side: int = 4) -> ImageSplit:
    pixels = np.random.default_rng(1).integers(0, 256, (count, side, side, 1), dtype=np.uint8)
    names = tuple(map(str, range(count)))
    return ImageSplit("train", pixels, np.arange(count, dtype=np.int64), names)


@pytest.mark.parametrize(("source", "count", "side"), [("digits", 1797, 8), ("mnist5k", 5000, 28)])
def test_sets_that_packages_carry(source: str, count: int, side: int) -> None:
    data = prepare_images(ImageDataConfig(source=source))
    splits = (data.train, data.validation, data.test)
    config = ImageDataConfig(source=source)
    assert data.shape == image_shape(config) == shape(side, side, 1, 10)
    assert data.class_names == tuple("0123456789")
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


def test_a_folder_of_one_folder_per_class(tmp_path: Path) -> None:
    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        place = tmp_path / f"class-{label}"
        place.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number}.png")
    data = prepare_images(ImageDataConfig(source=str(tmp_path), seed=3))
    assert data.class_names == ("class-0", "class-1", "class-2", "class-3")
    for name, pixels, label in zip(
        data.test.names, data.test.pixels, data.test.labels, strict=True
    ):
        number = int(Path(name).stem)
        np.testing.assert_array_equal(pixels[..., 0], PIXELS[number])
        assert label == LABELS[number]


def save_classes(folder: Path, *images: Image.Image) -> None:
    """Each image twice for each of two classes."""
    for number, image in enumerate(images * 2):
        for name in ("cat", "dog"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            image.save(folder / name / f"{number}.png")


def grey_levels(folder: Path) -> set[tuple[int, ...]]:
    """The first rows of all images that are read from a folder."""
    data = prepare_images(ImageDataConfig(source=str(folder), test_fraction=0.3))
    rows = (row for each in data for row in each.pixels[:, 0, :, 0].tolist())
    return {tuple(row) for row in rows}


def test_pixels_of_16_bits_keep_their_grey_levels(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None].repeat(2, 0)
    save_classes(tmp_path / "deep", *[Image.fromarray(ramp)] * 20)
    assert grey_levels(tmp_path / "deep") == {tuple(range(256))}
    flat = Image.fromarray(np.arange(256, dtype=np.uint8)[None].repeat(2, 0))
    save_classes(tmp_path / "flat", *[flat] * 20)
    assert grey_levels(tmp_path / "flat") == {tuple(range(256))}
    black_and_white = Image.fromarray(np.array([[False, True]]).repeat(2, 0))
    save_classes(tmp_path / "two", *[black_and_white] * 20)
    assert grey_levels(tmp_path / "two") == {(0, 255)}


def test_a_source_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_classes(tmp_path / "own", *[Image.fromarray(PIXELS[0])] * 20)
    assert image_shape(ImageDataConfig(source="~/own")) == shape(5, 6, 1, 2)


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    def said(source: Path) -> str:
        config = ImageDataConfig(source=str(source))
        for read in (config.look, lambda: prepare_images(config)):
            with pytest.raises(InputError) as caught:
                read()
        return str(caught.value)

    assert "is no folder; expected mnist5k, digits, or a folder" in said(tmp_path / "none")
    assert "holds no such image" in said(tmp_path)
    save_classes(tmp_path, Image.fromarray(PIXELS[0]), Image.fromarray(PIXELS[0, 1:]))
    with pytest.raises(InputError, match=r"1\.png is \(4, 6\), but .*0\.png is \(5, 6\)"):
        prepare_images(ImageDataConfig(source=str(tmp_path)))
    damaged = tmp_path / "dog" / "2.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(InputError, match=r"2\.png cannot be read as an image"):
        prepare_images(ImageDataConfig(source=str(tmp_path)))


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_every_image_once_an_epoch(batch: int, steps: int, seed: int) -> None:
    """The stream of steps is one permutation after another, whatever the batch size."""
    batches = ImageBatches(split(10), batch, seed)
    seen = np.concatenate([batches.batch(step)[1] for step in range(1, steps + 1)])
    for first in range(0, len(seen) - 9, 10):
        assert sorted(seen[first : first + 10]) == list(range(10))


def test_shifts_move_and_repeat_the_border() -> None:
    pixels = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    moved = shifted(pixels, np.array([[1, -1]]))[0, ..., 0]
    np.testing.assert_array_equal(moved, [[1, 2, 2], [1, 2, 2], [4, 5, 5]])
    assert (shifted(pixels, np.array([[0, 0]])) == pixels).all()
    seen = set()
    batches = ImageBatches(split(1), 1, 0, shift=1)
    for step in range(1, 60):
        seen.add(batches.batch(step)[0].tobytes())
    every = {
        scaled(shifted(batches.split.pixels, np.array([move]))).tobytes()
        for move in itertools.product((-1, 0, 1), repeat=2)
    }
    assert seen == every
    with pytest.raises(InputError, match="leaves nothing of images of 4 × 4"):
        ImageBatches(split(1), 1, 0, shift=4)

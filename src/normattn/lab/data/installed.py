"""The files of installed distributions, found without importing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class InstalledFile(NamedTuple):
    """A file by its name in the distribution's record, where it is, and its recorded hash."""

    name: str
    path: Path
    recorded: str | None


def files_of(
    distribution: Distribution, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[InstalledFile]:
    """The wanted files that the record of a distribution lists; none where it keeps no record."""
    for entry in distribution.files or ():
        if wanted(entry):
            recorded = entry.hash.value if entry.hash else None
            yield InstalledFile(entry.as_posix(), Path(str(entry.locate())), recorded)

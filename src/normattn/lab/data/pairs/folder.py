"""A folder in which files are named by split and language: `train.en.gz`, `train.de.gz`, …"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from normattn.errors import InputError
from normattn.files import expanded
from normattn.lab.data.pairs.lines import aligned_lines, stamp
from normattn.lab.data.pairs.source import PAIRS, Languages, Pair, PairSource
from normattn.lab.data.sources import take_options
from normattn.lab.data.splits import SPLITS, SplitName
from normattn.lab.data.text_files import is_packed

_STARTS: tuple[tuple[SplitName, tuple[str, ...]], ...] = (
    ("train", ("train",)),
    ("validation", ("val", "dev")),
    ("test", ("test",)),
)


@dataclass(frozen=True)
class _Part:
    """One split's two files."""

    split: SplitName
    name: str
    source: Path
    target: Path


@PAIRS.register
@dataclass(frozen=True)
class PairFolder(PairSource):
    """Files `NAME.LANGUAGE` or `NAME.LANGUAGE.gz`, NAME starting with train, val (dev) or test.

    A split without files is cut from the training pairs. Of several test sets one is chosen by
    `?test=NAME`.
    """

    folder: Path
    languages: Languages
    test: str | None = None

    kind: ClassVar[str] = "folder"
    summary: ClassVar[str] = "a folder of train, val and test files by language [?test=NAME]"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Every folder."""
        return expanded(body).is_dir()

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str], languages: Languages) -> PairFolder:
        """`FOLDER` or `FOLDER?test=NAME`."""
        test = take_options(body, options, ["test"])["test"]
        return cls(expanded(body), languages, test)

    def pairs(self) -> Iterator[Pair]:
        """Stream the splits one after another; training pairs keep theirs open for cutting."""
        for part in self._parts():
            # A training pair stays open, so that splits without files can be cut from them.
            split = None if part.split == "train" else part.split
            for source, target in aligned_lines(part.source, part.target):
                yield Pair(source, target, split)

    def given(self) -> frozenset[SplitName]:
        """The held-out splits that have files."""
        return frozenset(part.split for part in self._parts() if part.split != "train")

    def fingerprint(self) -> str:
        """By name, size and time of the files that are read."""
        return stamp(path for part in self._parts() for path in (part.source, part.target))

    def _parts(self) -> list[_Part]:
        parts = sorted(self._both_sides(), key=lambda part: (SPLITS.index(part.split), part.name))
        for split in SPLITS:
            names = [part.name for part in parts if part.split == split]
            if split == "test" and self.test is not None:
                if self.test not in names:
                    has = f"it has {', '.join(names)}" if names else "it has none"
                    raise InputError(f"{self.folder} has no test set {self.test!r}: {has}")
                parts = [p for p in parts if p.split != "test" or p.name == self.test]
            elif len(names) > 1:
                how = "; choose one with ?test=NAME" if split == "test" else ""
                raise InputError(f"{self.folder} has several {split} sets: {', '.join(names)}{how}")
        if not any(part.split == "train" for part in parts):
            wanted = f"train.{self.languages.source} and train.{self.languages.target}"
            raise InputError(f"{self.folder} holds no training pairs: it needs {wanted} (or .gz)")
        return parts

    def _both_sides(self) -> Iterator[_Part]:
        sources = self._files(self.languages.source)
        targets = self._files(self.languages.target)
        for name in sorted(sources.keys() | targets.keys()):
            split = next((s for s, starts in _STARTS if name.startswith(starts)), None)
            if split is None:
                continue
            if name not in sources or name not in targets:
                here, lacks = (
                    (self.languages.source, self.languages.target)
                    if name in sources
                    else (self.languages.target, self.languages.source)
                )
                raise InputError(f"{self.folder} has {name} in {here!r} but not in {lacks!r}")
            yield _Part(split, name, sources[name], targets[name])

    def _files(self, language: str) -> dict[str, Path]:
        paths: dict[str, Path] = {}
        for path in sorted(self.folder.iterdir()):
            name, dot, end = (path.stem if is_packed(path) else path.name).rpartition(".")
            if dot and end == language and path.is_file():
                if name in paths:
                    raise InputError(f"{paths[name]} and {path} are the same set twice")
                paths[name] = path
        return paths

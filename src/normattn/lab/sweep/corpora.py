"""The text that a study's models were trained on, as one record: tokens and versions of sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.training.init_from import CORPUS_FILE


@dataclass(frozen=True)
class Corpora:
    """`fingerprints` of the tokens and the `sources` of their text, each with its version.

    Empty for a study that trains on no text, or whose folder was made before this was kept.
    """

    fingerprints: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def below(cls, folder: Path) -> Corpora:
        """What the trainings in the directory of a study left, or what a published folder holds."""
        records = sorted(folder.glob(f"cells/*/*/{CORPUS_FILE}"))
        return cls.joined(map(cls.read, records or folder.glob(CORPUS_FILE)))

    @classmethod
    def read(cls, file: Path) -> Corpora:
        """The record of one run, or of a published folder."""
        stored = read_object(file)
        prints = stored.get("fingerprints", [stored.get("fingerprint")])
        sources = stored.get("sources")
        if not _texts(prints) or not isinstance(sources, dict) or not _texts(sources.values()):
            raise InputError(f"{file} is damaged: expected fingerprints and sources with versions")
        return cls(frozenset(prints), sources)

    @classmethod
    def joined(cls, parts: Iterable[Corpora]) -> Corpora:
        """All of them as one; `InputError` where two hold other versions of one source."""
        prints: frozenset[str] = frozenset()
        sources: dict[str, str] = {}
        for part in parts:
            prints |= part.fingerprints
            for name, version in part.sources.items():
                if sources.setdefault(name, version) != version:
                    raise InputError(
                        f"models of one page were trained on {name} {sources[name]} and {version}: "
                        "prepare the same corpus for all of them"
                    )
        return cls(prints, dict(sorted(sources.items())))

    def write(self, folder: Path) -> None:
        """Leave the record in a folder that is to be published, where there is one."""
        if self.fingerprints:
            record = {"fingerprints": sorted(self.fingerprints), "sources": dict(self.sources)}
            write_json(folder / CORPUS_FILE, record)


def canonical_json(settings: object) -> str:
    """Settings as one text that is equal where they are."""
    return json.dumps(settings, sort_keys=True)


def refuse_changed_text(runs: Iterable[Path], now: Mapping[str, str] | None = None) -> None:
    """`InputError` where two trainings on the same settings of the data read different data.

    `now` has the fingerprint of what was prepared, by its settings (`canonical_json`). Files behind
    an address can change from one training to the next; their models have other tokenisers and were
    tested on other documents.
    """
    seen: dict[str, tuple[object, object]] = {
        settings: ("the corpus as it is", fingerprint)
        for settings, fingerprint in (now or {}).items()
    }
    for run in runs:
        if not ((run / CORPUS_FILE).is_file() and (run / "config.json").is_file()):
            continue
        settings = read_object(run / "config.json").get("config")
        data = settings.get("data") if isinstance(settings, dict) else None
        fingerprint = read_object(run / CORPUS_FILE).get("fingerprint")
        first, known = seen.setdefault(canonical_json(data), (run, fingerprint))
        if fingerprint != known:
            raise InputError(
                f"{first} and what {run} was trained on differ, though by the same settings: the "
                "corpus changed in between; give each text a directory of its own"
            )


def _texts(values: object) -> bool:
    return isinstance(values, Iterable) and all(isinstance(value, str) for value in values)

"""Trainings of other models than language models, on tiny corpora in every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOP: dict[str, Any] = {"steps": 3, "device": "cpu", "schedule": {"warmup_steps": 1}}
MODEL: dict[str, Any] = {"dim": 8, "layers": 1, "heads": 2}


@dataclass(frozen=True)
class Kind:
    """A kind of training: `train` runs a few steps on a corpus into a run directory.

    `corpora` names its corpus formats; `exported`: whether its runs can be exported.
    """

    name: str
    train: Callable[[Path, Path], object]
    corpora: tuple[str, ...]
    exported: bool = False


def _translate(corpus: Path, out: Path) -> None:
    from normattn.lab.training import train_model
    from normattn.lab.training.tasks.translation import TranslationConfig

    data = {"corpus": str(corpus), "vocab_size": 280}
    fields = {**LOOP, "batch_tokens": 1300, "model": MODEL, "data": data}
    train_model(TranslationConfig.parse(fields, "a fault"), out, show_progress=False)


def _classify(corpus: Path, out: Path) -> None:
    from normattn.lab.training import train_model
    from normattn.lab.training.tasks.classification import ClassificationConfig

    data = {"corpus": str(corpus), "vocab_size": 120, "max_tokens": 16}
    fields = {**LOOP, "batch_size": 4, "model": {**MODEL, "labels": 3}, "data": data}
    train_model(ClassificationConfig.parse(fields, "a fault"), out, show_progress=False)


def _pairs_in_lines(folder: Path) -> Path:
    from data.helpers import multi_layout

    return folder if folder.exists() else multi_layout(folder)


def _pairs_in_json(folder: Path) -> Path:
    from data.helpers import sentences

    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"en": a, "de": b}) + "\n" for a, b in sentences(120))
    (folder / "pairs.jsonl").write_text("".join(lines))
    return folder


def _relations(folder: Path) -> Path:
    from data.helpers import write_relations

    if not folder.exists():
        write_relations(folder, count=12)
        numbers = {"born": 0, "lived": 1, "unseen": 2}
        listed = [{str(number): name for name, number in numbers.items()}, numbers]
        (folder / "rel2id.json").write_text(json.dumps(listed))
    return folder


CORPORA: Mapping[str, Callable[[Path], Path]] = {
    "pairs in lines": _pairs_in_lines,
    "pairs in JSON lines": _pairs_in_json,
    "relations": _relations,
}
"""Functions by name that fill a folder and return the corpus path."""

KINDS = (
    Kind("translation", _translate, ("pairs in lines", "pairs in JSON lines")),
    Kind("classifier", _classify, ("relations",), exported=True),
)

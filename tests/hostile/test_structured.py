"""Every reader of JSON, JSON lines and TOML refuses by name what no honest writer writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError

from normattn import io
from normattn.errors import InputError
from normattn.lab.data.corpora import parse_corpus, rows_of
from normattn.lab.data.pair_sources import parse_pairs
from normattn.lab.data.relation_sources import numbered_labels, relation_row
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.runs import RunDirectory, read_metrics, read_status
from normattn.lab.stats import measurements
from normattn.lab.studies import find
from normattn.lab.studies import preset as presets
from normattn.lab.sweep.runner import read_run
from normattn.lab.training.config import read_settings
from normattn.models.pretrained import load_any
from normattn.settings import Settings

DEEP = 100_000
HOSTILE = {
    "deep array": "[" * DEEP + "]" * DEEP,
    "just too deep": '{"kind": ' + "[" * 201 + "]" * 201 + "}",
    "deep inside": '{"step": 1, "loss": ' + "[" * DEEP + "]" * DEEP + "}",
    "long enough an integer": '{"step": ' + "9" * 80 + "}",
    "beyond floats": '{"step": 1, "loss": 1e999}',
    "no number": '{"step": 1, "loss": NaN}',
}


def _first_document(path: Path) -> Any:
    return list(parse_corpus(str(path)).documents())


def _pairs(path: Path) -> Any:
    return list(parse_pairs(str(path), "en", "de").documents())


def _relations(path: Path) -> Any:
    return list(rows_of(relation_row, path.name, path))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "object": ("meta.json", io.read_object),
    "run": ("config.json", lambda path: RunDirectory.existing(path.parent)),
    "status": ("status.json", lambda path: read_status(path.parent)),
    "metrics": ("metrics.jsonl", read_metrics),
    "diagnostics": ("diagnostics.jsonl", read_diagnostics),
    "cell": ("cell.json", lambda path: read_run(path, find("keynorm"))),
    "measurements": (measurements.FILE, measurements.read),
    "settings": ("mine.json", read_settings),
    "model": ("config.json", lambda path: load_any(path.parent)),
    "corpus": ("text.jsonl", _first_document),
    "pairs": ("pairs.jsonl", _pairs),
    "relation lines": ("train.jsonl", _relations),
    "relation array": ("train.json", _relations),
    "labels": ("rel2id.json", numbered_labels),
}


@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_deep_long_or_no_number_is_refused_by_name(
    reader: str, content: str, tmp_path: Path
) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_text(HOSTILE[content] + "\n", "utf-8")
    with pytest.raises(InputError) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_refused_and_nobody_waits(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError) as caught:
        read(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


TOML = {
    "deep": "a = " + "[" * DEEP + "]" * DEEP,
    "dotted": "a" + ".a" * 2000 + " = 1",
    "long integer": "a = " + "9" * 5000,
    "hexadecimal": "a = 0x" + "f" * 5000,
    "no text": "a = \x00",
}


@pytest.mark.parametrize("content", TOML)
@pytest.mark.parametrize("read", [read_settings, lambda path: presets.fields(str(path))])
def test_toml_is_refused_by_name(read: Callable[[Path], Any], content: str, tmp_path: Path) -> None:
    place = tmp_path / "mine.toml"
    place.write_text(TOML[content], "utf-8")
    with pytest.raises(InputError, match=r"mine\.toml"):
        read(place)


def test_a_line_without_an_end_is_refused_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "MAX_BYTES", 1000)
    place = tmp_path / "text.jsonl"
    place.write_text('{"text": "short"}\n{"text": "' + "x" * 2000 + '"}\n')
    with pytest.raises(InputError, match=r"text\.jsonl:2 is longer than 1,000 bytes"):
        list(parse_corpus(str(place)).documents())


class Inner(Settings):
    rate: float | None = 0.1


class Outer(Settings):
    steps: int = 1
    pairs: tuple[tuple[int, float], ...] = ()
    flag: bool = False
    either: int | bool = 0
    label: str | int = ""
    rates: dict[str, float] = Field(default_factory=dict)
    anything: Any = None
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", True),
        ("pairs", [[1, False]]),
        ("label", True),
        ("rates", {"a": True}),
        ("inner", {"rate": True}),
    ],
)
def test_true_is_no_number(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match="expected a number, not true or false"):
        Outer.model_validate({field: value})


def test_true_where_it_is_meant() -> None:
    given = {"flag": True, "either": True, "anything": [True], "inner": {"rate": None}}
    found = Outer.model_validate({**given, "steps": 1.0})
    assert found.model_dump() == {**given, "steps": 1, "pairs": (), "label": "", "rates": {}}

"""Files that no honest writer writes: named at once by every reader, never waited for."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError

import apart
from normattn import io
from normattn.errors import InputError
from normattn.lab.data.corpora import parse_corpus, rows_of
from normattn.lab.data.pair_sources import parse_pairs
from normattn.lab.data.pairs import PairsConfig, prepare_pairs
from normattn.lab.data.relation_sources import numbered_labels, relation_row
from normattn.lab.data.relations import RelationConfig, prepare_relations
from normattn.lab.data.tokens import DataConfig, prepare_tokens
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
    "corpus": ("text.jsonl", lambda path: list(parse_corpus(str(path)).documents())),
    "pairs": ("pairs.jsonl", lambda path: list(parse_pairs(str(path), "en", "de").documents())),
    "relation lines": ("train.jsonl", _relations),
    "relation array": ("train.json", _relations),
    "labels": ("rel2id.json", numbered_labels),
}


@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("reader", READERS)
def test_deep_long_and_no_numbers_are_refused(reader: str, content: str, tmp_path: Path) -> None:
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


def test_an_endless_line_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_true_is_a_number_nowhere_and_stays_where_it_is_meant() -> None:
    wrong = {"steps": True, "pairs": [[1, False]], "label": True}
    for field, value in {**wrong, "rates": {"a": True}, "inner": {"rate": True}}.items():
        with pytest.raises(ValidationError, match="expected a number, not true or false"):
            Outer.model_validate({field: value})
    given = {"flag": True, "either": True, "anything": [True], "inner": {"rate": None}}
    found = Outer.model_validate({**given, "steps": 1.0})
    assert found.model_dump() == {**given, "steps": 1, "pairs": (), "label": "", "rates": {}}


# Corpora.
NAMES = {
    "an unknown user": "~no-such-user-here/books",
    "a long path": "x/" * 3000,
    "a long name that is not ASCII": "ü" * 200,
    "a zero byte": "a\0b",
    "no text": "a\ud800b",
    "a name of nothing known": "\udcff.txt",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_file_has_is_refused(name: str, tmp_path: Path) -> None:
    for prepare in (
        lambda: prepare_tokens(DataConfig(corpus=NAMES[name]), tmp_path),
        lambda: prepare_pairs(PairsConfig(corpus=NAMES[name]), tmp_path),
        lambda: prepare_relations(RelationConfig(corpus=NAMES[name]), tmp_path),
    ):
        with pytest.raises(InputError) as caught:
            prepare()
        assert len(str(caught.value)) < 2500


@pytest.mark.parametrize("place", ["a folder", "itself"])
@pytest.mark.parametrize("kind", ["pipe", "link to a device", "broken link"])
def test_what_is_no_file_is_named(kind: str, place: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "whole.txt").write_text("some text\n" * 100)
    odd = folder / "odd.txt"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to("/dev/zero" if kind == "link to a device" else tmp_path / "nowhere")
    with pytest.raises(InputError, match=odd.name):
        list(parse_corpus(str(odd if place == "itself" else folder)).documents())
    with pytest.raises(InputError, match="zero"):
        list(parse_corpus("/dev/zero").documents())


_MEMORY = """
import resource, sys
from pathlib import Path
from normattn.lab.data.tokens import DataConfig, prepare_tokens
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare_tokens(DataConfig(corpus=sys.argv[1], vocab_size=300), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("form", ["packed", "lines"])
def test_a_line_without_a_space_takes_bounded_memory(form: str, tmp_path: Path) -> None:
    line = "".join(chr(97 + i * i % 23) for i in range(1 << 16)) * 48
    texts = [*(f"some other text {n}" for n in range(200)), line]
    place = tmp_path / ("line.txt.gz" if form == "packed" else "line.jsonl")
    if form == "packed":
        place.write_bytes(gzip.compress(line.encode(), 1))
    else:
        place.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    ran = apart.run(_MEMORY, place, tmp_path / "cache")
    assert ran.code == 0, ran.err
    assert int(ran.out) < 200 * 1024, f"{int(ran.out) / 1024:.0f} MB"

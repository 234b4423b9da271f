"""Files and folders that an honest corpus does not hold: named at once, never waited for."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

import apart
from normattn.errors import InputError
from normattn.lab.data.corpora import parse_corpus
from normattn.lab.data.pairs import PairsConfig, prepare_pairs
from normattn.lab.data.relations import RelationConfig, prepare_relations
from normattn.lab.data.tokens import DataConfig, prepare_tokens

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
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "broken link"])
def test_what_is_no_file_is_named(kind: str, place: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "whole.txt").write_text("some text\n" * 100)
    odd = folder / "odd.txt"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "device":
        odd = Path("/dev/zero")
        place = "itself"
    elif kind == "link to a device":
        odd.symlink_to("/dev/zero")
    else:
        odd.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=odd.name):
        list(parse_corpus(str(odd if place == "itself" else folder)).documents())


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
    if form == "packed":
        place = tmp_path / "line.txt.gz"
        place.write_bytes(gzip.compress(line.encode(), 1))
    else:
        place = tmp_path / "line.jsonl"
        rows = [json.dumps({"text": f"some other text {n}"}) for n in range(200)]
        place.write_text("\n".join([*rows, json.dumps({"text": line})]))
    ran = apart.run(_MEMORY, place, tmp_path / "cache")
    assert ran.code == 0, ran.err
    assert int(ran.out) < 200 * 1024, f"{int(ran.out) / 1024:.0f} MB"

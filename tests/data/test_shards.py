"""Tokens in shards: read as one sequence, written with a bound, resumed after a kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data import (
    Corpus,
    DataConfig,
    Document,
    prepare_tokens,
    tokens,
)
from normattn.lab.data.shards import CannotResumeError, ShardWriter, TokenShards, shard_paths
from normattn.lab.data.tokeniser import Tokeniser

from .helpers import write_folder
from .windows import recorded, windows

U2 = np.dtype("<u2")


def written(folder: Path, values: np.ndarray, shard_length: int) -> TokenShards:
    """The values as shards, appended in uneven pieces."""
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, "t", U2, shard_length)
    for piece in np.array_split(values, 3):
        writer.append(piece)
    writer.close()
    paths = shard_paths(folder, "t", len(values), shard_length)
    assert sorted(folder.glob("t.*")) == paths
    return TokenShards(paths, U2, len(values), shard_length)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.integers(0, 40), shard_length=st.integers(1, 45))
def test_shards_read_as_the_one_array(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, length: int, shard_length: int
) -> None:
    values = np.arange(100, 100 + length, dtype=U2)
    shards = written(tmp_path_factory.mktemp("shards"), values, shard_length)
    assert len(shards) == length
    np.testing.assert_array_equal(np.asarray(shards), values)
    start, stop = data.draw(st.integers(-3, 50)), data.draw(st.integers(-3, 50))
    np.testing.assert_array_equal(shards[start:stop], values[start:stop])
    assert shards[start:stop].dtype == U2
    assert b"".join(part.tobytes() for part in shards.parts()) == values.tobytes()
    again = pickle.loads(pickle.dumps(shards))
    np.testing.assert_array_equal(again[start:stop], values[start:stop])


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_damaged_shard_is_one_sentence(tmp_path: Path, harm: str) -> None:
    shards = written(tmp_path, np.arange(10, dtype=U2), 4)
    path = tmp_path / "t.00001"
    if harm == "cut":
        os.truncate(path, 5)
        message = "t.00001 has 5 bytes instead of 8: these cached tokens are damaged"
    else:
        path.unlink()
        message = "t.00001 does not exist"
    np.testing.assert_array_equal(shards[:4], range(4))
    for read in (lambda: shards[3:5], lambda: shards[5:6], shards.parts):
        with pytest.raises(InputError, match=message):
            list(read())


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 30), kept=st.integers(0, 30), shard_length=st.integers(1, 12))
def test_a_writer_goes_on_behind_what_is_kept(
    tmp_path_factory: pytest.TempPathFactory, length: int, kept: int, shard_length: int
) -> None:
    folder = tmp_path_factory.mktemp("writer")
    values = np.arange(40, dtype=U2)
    written(folder, values[:length], shard_length)
    if kept > length:
        with pytest.raises(CannotResumeError, match=r"t\.\d{5} has \d+ bytes instead of"):
            ShardWriter(folder, "t", U2, shard_length, kept)
        return
    writer = ShardWriter(folder, "t", U2, shard_length, kept)
    writer.append(values[kept:])
    writer.close()
    paths = shard_paths(folder, "t", 40, shard_length)
    assert sorted(folder.glob("t.*")) == paths
    assert b"".join(path.read_bytes() for path in paths) == values.tobytes()


def test_the_windows_are_the_recorded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Recorded before there were shards. 700 bytes make some thirty of them.
    for size in (tokens.SHARD_BYTES, 700):
        monkeypatch.setattr(tokens, "SHARD_BYTES", size)
        drawn, record = windows(tmp_path / str(size)), recorded()
        if drawn["tokenizers"] != record["tokenizers"]:
            del drawn["fingerprint"], record["fingerprint"]
        del drawn["tokenizers"], record["tokenizers"]
        assert drawn == record
    shards = list((tmp_path / "700" / "cache").glob("tokens-*/train.tokens.*"))
    assert len(shards) > 5
    assert max(path.stat().st_size for path in shards) == 700


def config(corpus: object, **changes: Any) -> DataConfig:
    values = {"vocab_size": 300, "test_fraction": 0.3, "validation_fraction": 0.2, **changes}
    return DataConfig(corpus=str(corpus), **values)


def files(data_folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data_folder.iterdir()}


@dataclass(frozen=True)
class Deadly(Corpus):
    """A corpus of 300 documents that ends its process where document `fatal` would begin."""

    fatal: int | None
    log: Path
    kind: ClassVar[str] = "deadly"
    summary: ClassVar[str] = "generated"

    @classmethod
    def claims(cls, body: str) -> bool:
        return False

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> Deadly:
        raise NotImplementedError

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        passes = self.log.with_suffix(".passes")
        second = passes.exists()
        passes.touch()
        for i in range(300):
            if second and i == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            yield Document(f"d{i}", "" if i % 50 == 7 else f"{i} lorem ipsum " * 30)

    def fingerprint(self) -> str:
        return "the same, killed or not"

    def total_bytes(self) -> int | None:
        return None

    def __str__(self) -> str:
        return "deadly"


def _prepare(corpus: Deadly, cache: Path, shard_bytes: int = 4000) -> None:
    tokens.SHARD_BYTES = shard_bytes
    setattr(tokens, "parse_corpus", lambda text: corpus)  # noqa: B010 — in a process of its own
    encode = Tokeniser.encode_arrays

    def counting(self: Any, texts: Any) -> Any:
        with corpus.log.open("a") as log:
            log.write("t" * len(texts))
        return encode(self, texts)

    setattr(Tokeniser, "encode_arrays", counting)  # noqa: B010
    with warnings.catch_warnings(record=True) as said:
        prepare_tokens(config("deadly"), cache)
    corpus.log.with_suffix(".said").write_text("\n".join(str(warning.message) for warning in said))


def apart(corpus: Deadly, cache: Path, shard_bytes: int = 4000) -> int | None:
    """How a process of its own ends that prepares the corpus."""
    process = multiprocessing.get_context("fork").Process(
        target=_prepare, args=(corpus, cache, shard_bytes)
    )
    process.start()
    process.join(60)
    return process.exitcode


def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    assert apart(Deadly(None, tmp_path / "whole"), tmp_path / "one") == 0
    (one,) = (tmp_path / "one").glob("tokens-*[!k]")
    log = tmp_path / "log"
    for fatal in (0, 150, 290):
        assert apart(Deadly(fatal, log), tmp_path / "two") == -signal.SIGKILL
    assert not list((tmp_path / "two").glob("tokens-*[!k]"))
    (begun,) = (path for path in (tmp_path / "two").iterdir() if path.is_dir())
    kept = json.loads((begun / "index.json").read_text(encoding="utf-8"))
    assert 100 < kept["documents"] < 290
    log.write_text("")
    assert apart(Deadly(None, log), tmp_path / "two") == 0
    assert log.read_text() == "t" * (294 - kept["documents"])
    assert files(tmp_path / "two" / one.name) == files(one)
    assert len(files(one)) > 20
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        one.name,
        f"{one.name}.lock",
    ]


@pytest.mark.parametrize("harm", ["index", "shard", "documents"])
def test_what_does_not_fit_together_is_said_and_made_anew(tmp_path: Path, harm: str) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    assert apart(Deadly(None, tmp_path / "whole"), tmp_path / "one") == 0
    (one,) = (tmp_path / "one").glob("tokens-*[!k]")
    assert apart(Deadly(250, log), cache) == -signal.SIGKILL
    (begun,) = (path for path in cache.iterdir() if path.is_dir())
    index = json.loads((begun / "index.json").read_text(encoding="utf-8"))
    said = "is damaged"
    if harm == "index":
        (begun / "index.json").write_text("{}")
    elif harm == "shard":
        (begun / "train.tokens.00002").unlink()
        said = "train.tokens.00002 has 0 bytes instead of 4,000"
    else:
        index["last"], said = "another", "is 'another' no longer"
        (begun / "index.json").write_text(json.dumps(index))
    assert apart(Deadly(None, log), cache) == 0
    warning = log.with_suffix(".said").read_text()
    assert re.search(rf"\.begun was begun, but .*{re.escape(said)}.*; it is made anew$", warning)
    assert files(cache / one.name) == files(one)


CUT_WHILE_READ = """
import os, sys
from pathlib import Path
import numpy as np
from normattn.errors import InputError
from normattn.lab.data import DataConfig, TrainingBatches, by_position_set, prepare_tokens

data = prepare_tokens(DataConfig(corpus=sys.argv[1], vocab_size=300), Path(sys.argv[2]))
batches = TrainingBatches(data.train, 16, 4, 0)
batches.batch(0), data.train.document(0), data.train.names[0]
for path in Path(sys.argv[2]).glob(f"tokens-*/{sys.argv[3]}*"):
    os.truncate(path, 0)
for read in (lambda: batches.batch(1), lambda: data.train.document(1), lambda: data.train.names[1]):
    try:
        read()
    except InputError as error:
        print(error)
"""


@pytest.mark.parametrize("column", ["train.tokens"])
def test_a_file_cut_while_it_is_read_is_one_sentence(tmp_path: Path, column: str) -> None:
    """Reading past the end of a mapped file ends a process with SIGBUS."""
    folder = write_folder(tmp_path / "text", 40)
    command = [sys.executable, "-c", CUT_WHILE_READ, str(folder), str(tmp_path / "cache"), column]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all(re.search(r"train\.\w+\.00000 has 0 bytes instead of", line) for line in said)

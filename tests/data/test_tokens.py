"""From text to cached tokens: split by document, built once, whole or absent."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ValidationError

from normattn.errors import InputError
from normattn.io import sha256_of
from normattn.lab.data import (
    Corpus,
    DataConfig,
    Document,
    TokenData,
    prepare_tokens,
    tokens,
)
from normattn.lab.data import cache as cache_module
from normattn.lab.data.shards import TokenShards
from normattn.lab.data.tokens import build_tokens

from .helpers import write_folder


def config(corpus: object, **changes: Any) -> DataConfig:
    values = {"vocab_size": 300, "test_fraction": 0.3, "validation_fraction": 0.2, **changes}
    return DataConfig(corpus=str(corpus), **values)


def splits(data: TokenData) -> dict[str, set[str]]:
    return {name: set(data.split(name).names) for name in ("train", "validation", "test")}


def test_tokens_decode_to_the_documents(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")
    data = prepare_tokens(config(folder), tmp_path / "cache")
    assert data.tokeniser is not None
    seen = set()
    for split in (data.train, data.validation, data.test):
        assert split.total == sum(split.lengths + 1) == len(split.tokens)
        assert split.text_bytes == sum((folder / n).stat().st_size for n in split.names)
        for i, name in enumerate(split.names):
            text = (folder / name).read_text(encoding="utf-8")
            assert data.tokeniser.decode(split.document(i)) == text
            assert split.window(i, len(split.document(i)), 1) == [0]
            assert split.lengths[i] == len(split.document(i))
            seen.add(name)
    assert len(seen) == 40
    assert isinstance(data.train.tokens, TokenShards)
    assert not data.train.tokens[:8].flags.writeable


def test_splits_share_no_document_and_move_only_with_the_seed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")
    first = splits(prepare_tokens(config(folder), tmp_path / "cache"))
    assert all(first.values())
    assert not first["train"] & first["test"]
    assert not first["train"] & first["validation"]
    assert not first["validation"] & first["test"]
    write_folder(folder, 60)
    grown = splits(prepare_tokens(config(folder), tmp_path / "cache"))
    assert all(first[name] <= grown[name] for name in first)
    other = splits(prepare_tokens(config(folder, seed=1), tmp_path / "cache"))
    assert other["test"] != grown["test"]
    larger = splits(prepare_tokens(config(folder, test_fraction=0.5), tmp_path / "cache"))
    assert grown["test"] < larger["test"]


def test_equal_texts_stand_in_one_split(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")
    alone = splits(prepare_tokens(config(folder), tmp_path / "cache"))
    for path in sorted(folder.iterdir()):
        for copy in range(3):
            (folder / f"z{copy}-{path.name}").write_bytes(path.read_bytes())
    data = prepare_tokens(config(folder), tmp_path / "cache")
    for name, own in alone.items():
        copies = {f"z{copy}-{one}" for copy in range(3) for one in own}
        assert splits(data)[name] == own | copies


def test_the_tokeniser_learns_from_training_documents_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")
    first = prepare_tokens(config(folder), tmp_path / "cache")
    for name in first.test.names:
        (folder / name).write_text("qqqq " * 500, encoding="utf-8")
    second = prepare_tokens(config(folder), tmp_path / "cache")
    assert first.tokeniser is not None
    assert second.tokeniser is not None
    assert first.tokeniser.fingerprint == second.tokeniser.fingerprint
    assert first.fingerprint != second.fingerprint


def test_the_cache_is_used_again_and_its_key_sees_every_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "text")
    built = []
    real = build_tokens

    def counted(*args: Any) -> None:
        built.append(1)
        real(*args)

    monkeypatch.setattr(tokens, "build_tokens", counted)
    same = [config(folder), config(folder), config(folder, tiled_fraction=0.3)]
    found = {prepare_tokens(c, tmp_path / "cache").fingerprint for c in same}
    assert (len(found), len(built)) == (1, 1)
    for change in ({"vocab_size": 290}, {"seed": 3}, {"test_fraction": 0.1}, {"max_bytes": 9000}):
        prepare_tokens(config(folder, **change), tmp_path / "cache")
    assert len(built) == 5
    os.utime(folder / "f000.txt", ns=(1, 1))
    assert prepare_tokens(config(folder), tmp_path / "cache").fingerprint in found
    assert len(built) == 6


@pytest.mark.parametrize(
    "harm", ["cut", "flip", "remove", "manifest", "no manifest", "empty manifest", "less manifest"]
)
@pytest.mark.parametrize("hashed_bytes", [cache_module.HASHED_BYTES, 0])
def test_a_damaged_cache_is_named_and_built_again(
    tmp_path: Path, harm: str, hashed_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "HASHED_BYTES", hashed_bytes)
    folder = write_folder(tmp_path / "text", 10)
    good = prepare_tokens(config(folder), tmp_path / "cache")
    expected = np.array(good.train.tokens)
    (cached,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    file = cached / "train.tokens.00000"
    content = file.read_bytes()
    if harm == "cut":
        file.write_bytes(content[:-7])
    elif harm == "flip":
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif harm == "remove":
        file.unlink()
    elif harm == "no manifest":
        (cached / "manifest.json").unlink()
    elif harm == "less manifest":
        stored = json.loads((cached / "manifest.json").read_text(encoding="utf-8"))
        del stored["train.tokens.00000"]
        (cached / "manifest.json").write_text(json.dumps(stored), encoding="utf-8")
    else:
        written = {"manifest": '{"train', "empty manifest": "{}"}[harm]
        (cached / "manifest.json").write_text(written, encoding="utf-8")
    named = "manifest.json" if "manifest" in harm else "train.tokens.00000"
    with pytest.warns(UserWarning, match=rf"tokens-\w+ is damaged \(.*{named}"):
        again = prepare_tokens(config(folder), tmp_path / "cache")
    np.testing.assert_array_equal(again.train.tokens, expected)
    assert again.fingerprint == good.fingerprint


def test_a_large_cache_is_read_whole_once_and_again_when_it_was_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "text", 10)
    monkeypatch.setattr(cache_module, "HASHED_BYTES", 0)
    prepare_tokens(config(folder), tmp_path / "cache")
    (cached,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    read: list[str] = []
    hashed = sha256_of

    def noting(path: Path) -> str:
        read.append(path.name)
        return hashed(path)

    monkeypatch.setattr("normattn.lab.data.cache.sha256_of", noting)
    prepare_tokens(config(folder), tmp_path / "cache")
    assert read == []  # it was read whole when it was built
    shutil.copytree(cached, tmp_path / "copy" / cached.name)
    prepare_tokens(config(folder), tmp_path / "copy")
    assert set(read) == {path.name for path in cached.iterdir()} - {"manifest.json"}
    read.clear()
    prepare_tokens(config(folder), tmp_path / "copy")
    assert read == []
    file = cached / "train.tokens.00000"
    before = file.stat()
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.warns(UserWarning, match=r"the content of train\.tokens\.00000 has changed"):
        prepare_tokens(config(folder), tmp_path / "cache")
    assert file.read_bytes() == content


@pytest.mark.parametrize("failing", ["connection", "disk"])
def test_a_build_that_fails_keeps_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The next call goes on behind the last full shard, and ends with the same tokens."""
    rows = [{"text": f"row {i} of the quick brown fox {i * i} " * 20} for i in range(300)]
    datasets, readings, syncs, fsync = ModuleType("datasets"), [0], [0], os.fsync

    def load(*_: Any, **__: Any) -> Iterator[dict[str, str]]:
        readings[0] += 1  # the first one is the tokeniser's
        for number, row in enumerate(rows):
            if failing == "connection" and readings[0] == 2 and number == 290:
                raise ConnectionError("reset by peer")
            yield row

    def full(handle: int) -> None:
        syncs[0] += 1
        if failing == "disk" and syncs[0] == 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    datasets.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr(tokens, "SHARD_BYTES", 4000)
    made = config(f"hf:me/data?revision={'a' * 40}")
    cache, first, second = tmp_path / "cache", list[int](), list[int]()
    with pytest.raises(InputError, match=r"reset by peer|no space left on the disk"):
        prepare_tokens(made, cache, lambda done, _: first.append(done))
    data = prepare_tokens(made, cache, lambda done, _: second.append(done))
    assert readings[0] == 3, "the tokeniser is kept"
    assert first[0] < first[-1] * 0.75 < second[0]
    assert data.fingerprint == prepare_tokens(made, tmp_path / "other").fingerprint
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.lock"}


def _prepare(folder: Path, cache: Path, log: Path, barrier: Any) -> None:
    real = build_tokens

    def noted(*args: Any) -> None:
        with log.open("a") as file:
            file.write("built\n")
        real(*args)

    setattr(tokens, "build_tokens", noted)  # noqa: B010 — this process ends with the function
    barrier.wait()
    data = prepare_tokens(config(folder), cache)
    with log.open("a") as file:
        file.write(data.fingerprint + "\n")


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text", 30)
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    arguments = (folder, tmp_path / "cache", log, barrier)
    processes = [context.Process(target=_prepare, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    lines = log.read_text().split()
    assert lines.count("built") == 1
    assert len(lines) == 4
    assert len(set(lines) - {"built"}) == 1


@dataclass(frozen=True)
class Flowing(Corpus):
    """A corpus that makes its text as it is read."""

    count: int
    kind: ClassVar[str] = "flowing"
    summary: ClassVar[str] = "generated"

    @classmethod
    def claims(cls, body: str) -> bool:
        return False

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> Flowing:
        raise NotImplementedError

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        for i in range(self.count):
            yield Document(f"d{i}", f"{i} " + "lorem ipsum dolor " * 600)

    def fingerprint(self) -> str:
        return str(self.count)

    def total_bytes(self) -> int | None:
        return None

    def __str__(self) -> str:
        return f"flowing-{self.count}"


def test_text_streams_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "parse_corpus", lambda text: Flowing(int(text)))
    monkeypatch.setattr(tokens, "SAMPLE_BYTES", 1)
    monkeypatch.setattr("normattn.lab.data.tokeniser.SAMPLE_BYTES", 1)
    peaks = []
    for count in (50, 250):
        tracemalloc.start()
        data = prepare_tokens(config(count), tmp_path / "cache")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(len(data.split(name)) for name in ("train", "validation", "test")) == count
    # 0.5 MB and 2.7 MB of text; the batches in hand are the same.
    assert peaks[1] < 1.5 * peaks[0]


def test_bad_corpora_and_places_are_sentences_and_leave_no_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    empty = tmp_path / "empty.txt"
    empty.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"empty\.txt' is empty"):
        prepare_tokens(config(empty), cache)
    with pytest.raises(InputError, match="does not exist"):
        prepare_tokens(config(tmp_path / "none"), cache)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    text = write_folder(tmp_path / "text", 3)
    with pytest.raises(InputError, match=r"empty\.txt"):
        prepare_tokens(config(text), empty / "inside")
    with pytest.raises(InputError, match="there is no split 'dev'"):
        prepare_tokens(config(text), cache).split("dev")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 256}, "vocab_size must be at least 257"),
        ({"test_fraction": 0.6, "validation_fraction": 0.4}, "leave no training text"),
        ({"tiled_low": 9, "tiled_high": 8}, "must not exceed tiled_high"),
        ({"tiled_fraction": 1.5}, "less than or equal to 1"),
        ({"vocabulary": 300}, "Extra inputs are not permitted"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**changes)

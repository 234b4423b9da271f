"""From text to cached tokens: split by document, built once, resumed; by which tokenisers."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from normattn.errors import InputError
from normattn.lab.data import store, tokeniser, tokens
from normattn.lab.data.batches import MaskedBatches, Masking, TrainingBatches
from normattn.lab.data.sources import Corpus, Document
from normattn.lab.data.tokeniser import (
    SEPARATOR,
    SEPARATOR_ID,
    Tokeniser,
    WordPieces,
    train_tokeniser,
    train_word_pieces,
)
from normattn.lab.data.tokens import CopyTask, DataConfig, prepare_tokens

from .helpers import write_folder


def config(corpus: object, **changes: Any) -> DataConfig:
    values = {"vocab_size": 300, "test_fraction": 0.3, "validation_fraction": 0.2, **changes}
    return DataConfig(corpus=str(corpus), **values)


def cached(place: Path) -> Path:
    (folder,) = (path for path in place.iterdir() if path.is_dir())
    return folder


def test_tokens_decode_to_the_documents(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")
    data = prepare_tokens(config(folder), tmp_path / "cache")
    assert data.tokeniser is not None
    seen = set[str]()
    for split in data:
        assert split.total == sum(split.lengths + 1) == len(split.tokens)
        assert split.token_counts(300).sum() == split.total
        for i, name in enumerate(split.names):
            text = (folder / name).read_text(encoding="utf-8")
            assert data.tokeniser.decode(split.document(i)) == text
            assert split.window(i, len(split.document(i)), 1) == [0]
            assert split.lengths[i] == len(split.document(i))
        seen |= set(split.names)
    assert len(seen) == 40
    assert not data.train.tokens[:9].flags.writeable
    with pytest.raises(InputError, match="there is no split 'dev'"):
        data.split("dev")


FINGERPRINT = "704b46a25fe084fb6f9563304286729f016390551dfef61180788d02ee0e0b5d"
WINDOWS = {
    "plain": "e57f5efe96f824837ea7403e12a0e519c8bcd13a9ce4a64f282968ee9fdf7df4",
    "tiled": "77b88e18e380c1fe838a89b1b2e92230abfa2336b86315342f88121ae0571dab",
    "masked": "220325fe28c5c9f332580ab09b551b30f4449aee2805055976570fce9c971b83",
}


def test_the_windows_are_those_that_published_models_were_trained_on(tmp_path: Path) -> None:
    """A change here is a change of what every preset is trained on."""
    made = config(write_folder(tmp_path / "text"), tiled_fraction=0.3)
    data = prepare_tokens(made, tmp_path / "cache")
    if tokenizers.__version__ == "0.23.3":
        assert data.fingerprint == FINGERPRINT
    plain = TrainingBatches(data.train, 64, 16, 11)
    tiled = TrainingBatches(data.train, 64, 16, 12, made.tiling)
    batches: dict[str, Any] = {"plain": plain, "tiled": tiled}
    batches["masked"] = MaskedBatches(plain, Masking(), 300)
    for kind, drawn in batches.items():
        rows = [drawn.batch(step) for step in (0, 1, 7, 1_000_000)]
        ids = [getattr(each, "ids", each).astype("<i8").tobytes() for each in rows]
        assert hashlib.sha256(b"".join(ids)).hexdigest() == WINDOWS[kind], kind


def test_splits_share_no_document_and_move_only_with_the_seed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")

    def splits(**changes: Any) -> dict[str, set[str]]:
        data = prepare_tokens(config(folder, **changes), tmp_path / "cache")
        return {name: set(data.split(name).names) for name in ("train", "validation", "test")}

    first = splits()
    assert all(first.values())
    assert len(set.union(*first.values())) == sum(map(len, first.values()))
    for path in sorted(folder.iterdir()):  # equal texts stand in one split
        (folder / f"z-{path.name}").write_bytes(path.read_bytes())
    grown = splits()
    assert grown == {name: own | {f"z-{one}" for one in own} for name, own in first.items()}
    if sys.platform.startswith("linux"):  # Other systems have no such names.
        (folder / os.fsdecode(b"\xff.txt")).write_text("a name that is not UTF-8")
        assert "\\udcff.txt" in set.union(*splits().values())
    assert splits(seed=1)["test"] != grown["test"] < splits(test_fraction=0.5)["test"]


def test_the_tokeniser_learns_from_training_documents_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")
    first = prepare_tokens(config(folder), tmp_path / "cache")
    for name in first.test.names:
        (folder / name).write_text("qqqq " * 500, encoding="utf-8")
    second = prepare_tokens(config(folder), tmp_path / "cache")
    prints = [made.tokeniser and made.tokeniser.fingerprint for made in (first, second)]
    assert prints[0] == prints[1] is not None
    assert first.fingerprint != second.fingerprint


def test_the_cache_is_used_again_and_its_key_sees_every_setting(tmp_path: Path) -> None:
    folder, cache = write_folder(tmp_path / "text"), tmp_path / "cache"

    def folders(*configs: DataConfig) -> int:
        for each in configs:
            prepare_tokens(each, cache)
        return sum(path.is_dir() for path in cache.iterdir())

    assert folders(config(folder), config(folder), config(folder, tiled_fraction=0.3)) == 1
    changes: list[dict[str, Any]] = [{"vocab_size": 290}, {"seed": 3}, {"max_bytes": 9000}]
    assert folders(*(config(folder, **change) for change in changes)) == 4
    os.utime(folder / "f000.txt", ns=(1, 1))
    assert folders(config(folder)) == 5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train.tokens", lambda content: content[:-7]),
        ("train.tokens", lambda content: bytes([content[0] ^ 1]) + content[1:]),
        ("train.tokens", None),
        ("manifest.json", None),
        ("manifest.json", lambda content: content.replace(b"train.tokens", b"tokens")),
        ("manifest.json", lambda content: content.replace(b"[", b'["", ')),
    ],
)
def test_a_damaged_cache_is_named_and_built_again(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes] | None
) -> None:
    folder = write_folder(tmp_path / "text", 10)
    good = prepare_tokens(config(folder), tmp_path / "cache")
    expected = np.array(good.train.tokens)
    file = cached(tmp_path / "cache") / name
    before = file.stat()
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # which shows nothing
    with pytest.warns(UserWarning, match=rf"tokens-\w+ is damaged \(.*{name}"):
        again = prepare_tokens(config(folder), tmp_path / "cache")
    np.testing.assert_array_equal(again.train.tokens, expected)
    assert again.fingerprint == good.fingerprint


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disconnect() -> None:
    raise InputError("reset by peer")


def fill_the_disk() -> None:
    def full(fd: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.fsync = full


def generated(
    count: int, fatal: int | None = None, fails: Path | None = None, fault: Any = kill
) -> Corpus:
    """Documents that are made as they are read; at `fatal` there is a fault."""

    def documents(limit: int | None = None) -> Iterator[Document]:
        second = fails is not None and fails.exists()
        if fails is not None:
            fails.touch()  # the first reading is the tokeniser's
        for i in range(count):
            if second and i == fatal:
                fault()
            yield Document(f"d{i}", "" if i % 50 == 7 else f"{i} lorem ipsum " * 30)

    return Corpus(documents, lambda: str(count))


def _prepare(corpus: Corpus, cache: Path, log: Path) -> None:
    store.CHECKPOINT_BYTES = 4000
    setattr(tokens, "parse_corpus", lambda text: corpus)  # noqa: B010 — in a process of its own
    encode = Tokeniser.encode_batch

    def counting(self: Any, texts: Any) -> Any:
        with log.open("a") as file:
            file.write("t" * len(texts))
        return encode(self, texts)

    setattr(Tokeniser, "encode_batch", counting)  # noqa: B010
    try:
        prepare_tokens(config("generated"), cache)
    except InputError as error:
        raise SystemExit(str(error)) from error


def code_of_builders(corpus: Corpus, cache: Path, log: Path, count: int = 1) -> set[int | None]:
    """How processes of their own end that prepare the corpus at once."""
    context = multiprocessing.get_context("fork")
    arguments = corpus, cache, log
    processes = [context.Process(target=_prepare, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return {process.exitcode for process in processes}


def files(folder: Path) -> dict[str, bytes]:
    """The content of all files but the manifest, which holds their times."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"}


def test_a_preparation_that_is_killed_or_fails_goes_on_to_the_same_bytes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    assert code_of_builders(generated(300), tmp_path / "one", log) == {0}
    one = cached(tmp_path / "one")
    for fatal, fault, code, said in (
        (0, kill, -signal.SIGKILL, ""),
        (100, disconnect, 1, "reset by peer"),
        (200, fill_the_disk, 1, "no space left on the disk"),
        (290, kill, -signal.SIGKILL, ""),
    ):
        failing = generated(300, fatal, tmp_path / "fails", fault)
        assert code_of_builders(failing, tmp_path / "two", log) == {code}
        assert said in capfd.readouterr().err
    kept = json.loads((cached(tmp_path / "two") / "progress.json").read_text())["items"]
    assert 200 <= kept < 290
    log.write_text("")
    assert code_of_builders(generated(300), tmp_path / "two", log) == {0}
    assert log.read_text() == "t" * (294 - kept)
    assert files(tmp_path / "two" / one.name) == files(one)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {one.name, f"{one.name}.lock"}


def test_processes_at_once_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert code_of_builders(generated(100), tmp_path / "cache", log, 3) == {0}
    assert log.read_text() == "t" * 98


def test_text_streams_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "parse_corpus", lambda text: generated(int(text)))
    monkeypatch.setattr("normattn.lab.data.tokeniser._sample", lambda texts: ["lorem ipsum "])
    peaks = []
    for count in (400, 1600):
        tracemalloc.start()
        data = prepare_tokens(config(count), tmp_path / "cache")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(map(len, data)) == count - count // 50
    assert peaks[1] < 1.5 * peaks[0]  # the batches in hand are the same


def test_bad_corpora_and_places_are_sentences_and_leave_no_cache(tmp_path: Path) -> None:
    cache, empty = tmp_path / "cache", tmp_path / "empty.txt"
    empty.write_text("", encoding="utf-8")
    for place, said in ((empty, r"empty\.txt' is empty"), (tmp_path / "none", "does not exist")):
        with pytest.raises(InputError, match=said):
            prepare_tokens(config(place), cache)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    with pytest.raises(InputError, match=r"empty\.txt"):
        prepare_tokens(config(write_folder(tmp_path / "text", 3)), empty / "inside")


# Generated copying: fresh noise to train on, tiled documents to test on.

ADDRESS = "synthetic:copy?low=3&high=6&tokens=5000&documents=7&document_tokens=50"


def test_training_rows_and_test_documents_repeat_with_the_periods(tmp_path: Path) -> None:
    made = DataConfig(corpus=ADDRESS, vocab_size=200, seed=4)
    data = prepare_tokens(made, tmp_path)
    assert data.tokeniser is None
    assert not list(tmp_path.iterdir())
    batches = TrainingBatches(data.train, 24, 32, 0, made.tiling)
    for row in batches.batch(0):
        periods = [p for p in range(3, 7) if (row == np.resize(row[:p], 25)).all()]
        assert periods
    assert len(data.test) == 7
    for number in range(7):
        row = data.test.document(number)
        assert 0 < row.min() <= row.max() < 200
        assert any((row[p:] == row[:-p]).all() for p in range(3, 7))
    assert not np.array_equal(data.test.tokens, data.validation.tokens)
    assert data.train.total == 5001


def test_the_tokens_follow_from_seed_and_vocabulary() -> None:
    task = CopyTask.from_address(ADDRESS)
    made = ((200, 4), (200, 4), (200, 5), (201, 4))
    prints = [task.token_data(*each).fingerprint for each in made]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert task.token_data(70_000, 0).test.tokens.dtype == np.uint32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 256}, "vocab_size must be at least 257"),
        ({"test_fraction": 0.6, "validation_fraction": 0.4}, "leave nothing to train on"),
        ({"tiled_low": 9, "tiled_high": 8}, "must not exceed tiled_high"),
        *(
            ({"corpus": "synthetic:copy", name: value}, f"{name} has no meaning")
            for name, value in {"tiled_fraction": 0.5, "tiled_low": 9, "max_bytes": 9}.items()
        ),
        ({"corpus": "synthetic:copy", "test_fraction": 0.5}, "test_fraction has no meaning"),
        ({"corpus": "synthetic:sort"}, "the generated corpus is 'synthetic:copy'"),
        ({"corpus": "synthetic:copy?low=x"}, "low: .*valid integer"),
        ({"corpus": "synthetic:copy?hgh=4"}, "hgh: there is no such setting"),
        ({"corpus": "synthetic:copy?low=9&high=3"}, "expected low ≤ high"),
        ({"corpus": "synthetic:copy?low=4&low=8"}, "each option once"),
        ({"corpus": "synthetic:copy?documents=0"}, "documents: .*greater than or equal to 1"),
    ],
)
def test_wrong_settings_and_addresses_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((InputError, ValidationError), match=said):
        prepare_tokens(DataConfig(**changes))


# Byte-level BPE, lossless and deterministic; word pieces as BERT's and transformers' are.

# Many pairs with equal counts: a tie decides nearly every merge.
TIES = ["ab cd ef gh ij kl mn op", "ba dc fe hg ji lk nm po", "xyz zyx"] * 3
TOKENISER = train_tokeniser(TIES, 300)


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = TOKENISER.encode(text)
    assert TOKENISER.decode(ids) == text
    assert SEPARATOR_ID not in ids


def test_the_separator_is_id_0_and_text_cannot_forge_it() -> None:
    assert TOKENISER.decode([SEPARATOR_ID]) == SEPARATOR
    forged = f"a{SEPARATOR}b"
    reloaded = Tokeniser(TOKENISER._json)
    assert SEPARATOR_ID not in reloaded.encode(forged)
    assert reloaded.decode(reloaded.encode(forged)) == forged


TRAIN = """
import json, sys
from normattn.lab.data.tokeniser import train_tokeniser, train_word_pieces
texts = json.loads(sys.argv[1])
pieces = train_word_pieces(texts, 90, True)
print(json.dumps([train_tokeniser(texts, 300).fingerprint, pieces.entries]))
"""


def test_training_gives_the_same_under_any_hash_seed_and_threads() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", TRAIN, json.dumps(TIES)]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    entries = [*train_word_pieces(TIES, 90, lower_case=True).entries]
    assert json.loads(other.stdout) == [train_tokeniser(TIES, 300).fingerprint, entries]


def test_saving_loading_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokeniser.json"
    TOKENISER.save(file)
    assert Tokeniser.load(file).fingerprint == TOKENISER.fingerprint
    file.write_text("{{", encoding="utf-8")
    with pytest.raises(InputError, match=r"tokeniser\.json is damaged"):
        Tokeniser.load(file)
    with pytest.raises(InputError, match="does not exist"):
        Tokeniser.load(tmp_path / "none.json")
    monkeypatch.setattr(tokeniser, "MAX_BYTES", 1)
    with pytest.raises(InputError, match=r"tokeniser\.json is larger than 1 bytes"):
        Tokeniser.load(file)


# Word pieces.

WORD_TEXTS = [
    "The Quick brown fox, naïve as ever, jumps.",
    "unaffable foxes jumped over 1,000 naive quick-witted dogs!",
    "中文 and 1 . FC Köln: [UNK] [PAD] ##ing",
]


def test_a_given_vocabulary_splits_as_bert_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "un", "##aff", "##able", "fox"]
    entries += ["##es", "jump", "##ed", ",", ".", "!", "1", "##0", "##00", "naive", "quick", "中"]
    (tmp_path / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")
    ours = WordPieces.load(tmp_path / "vocab.txt", lower_case=True)
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    theirs = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=True)
    # Their special words in a text are special; ours are letters, as text is only text.
    texts = [*WORD_TEXTS[:2], "中文 the unaffable fox"]
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert ours.encode(texts) == expected
    assert (ours.vocab_size, ours.pad_id) == (len(entries), 0)


def test_a_learned_vocabulary_covers_its_texts_and_prefers_long_pieces() -> None:
    pieces = train_word_pieces(["born born born birth"] * 3, 40, lower_case=True)
    [ids] = pieces.encode(["born BIRTH"])
    assert len(ids) == 2
    [unknown] = pieces.encode(["xyz"])
    assert unknown == [1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a\nb\n", r"the entry \[PAD\] is missing"),
        ("[PAD]\na\n", r"the entry \[UNK\] is missing"),
        ("[PAD]\n[UNK]\na\nb\na\n", "line 5: 'a' is an entry before"),
    ],
)
def test_a_bad_vocabulary_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "vocab.txt").write_text(content)
    with pytest.raises(InputError, match=said):
        WordPieces.load(tmp_path / "vocab.txt", lower_case=True)

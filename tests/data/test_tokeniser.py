"""Byte-level BPE, lossless and deterministic; word pieces as BERT's and transformers' are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data import tokeniser
from normattn.lab.data.tokeniser import (
    SEPARATOR,
    SEPARATOR_ID,
    Tokeniser,
    WordPieces,
    train_tokeniser,
    train_word_pieces,
)

# Many pairs with equal counts: a tie decides nearly every merge.
TEXTS = ["ab cd ef gh ij kl mn op", "ba dc fe hg ji lk nm po", "xyz zyx"] * 3
TOKENISER = train_tokeniser(TEXTS, 300)


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
    command = [sys.executable, "-c", TRAIN, json.dumps(TEXTS)]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    entries = [*train_word_pieces(TEXTS, 90, lower_case=True).entries]
    assert json.loads(other.stdout) == [train_tokeniser(TEXTS, 300).fingerprint, entries]


def test_saving_loading_and_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

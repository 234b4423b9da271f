"""BERT's word pieces, against its algorithm and the reference tokeniser of transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from normattn.errors import InputError
from normattn.lab.data.tokeniser import WordPieces, train_word_pieces

TEXTS = [
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
    texts = [*TEXTS[:2], "中文 the unaffable fox"]
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert ours.encode(texts) == expected
    assert (ours.vocab_size, ours.pad) == (len(entries), 0)


def test_a_learned_vocabulary_covers_its_texts_and_prefers_long_pieces() -> None:
    pieces = train_word_pieces(["born born born birth"] * 3, 40, lower_case=True)
    [ids] = pieces.encode(["born BIRTH"])
    assert len(ids) == 2
    [unknown] = pieces.encode(["xyz"])
    assert unknown == [1]


def test_the_same_texts_give_the_same_vocabulary_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from normattn.lab.data.tokeniser import train_word_pieces\n"
        "texts = [pathlib.Path(sys.argv[1]).read_text()]\n"
        "train_word_pieces(texts, 400, True).save(pathlib.Path(sys.argv[2]))\n"
    )
    for name in ("a", "b"):
        command = [sys.executable, "-c", code, __file__, str(tmp_path / name)]
        subprocess.run(command, check=True, timeout=120)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_saved_vocabulary_comes_back(tmp_path: Path) -> None:
    pieces = train_word_pieces(TEXTS, 300, lower_case=False)
    pieces.save(tmp_path / "vocab.txt")
    again = WordPieces.load(tmp_path / "vocab.txt", lower_case=False)
    assert again.encode(TEXTS) == pieces.encode(TEXTS)


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

"""Tokenisers: byte-level BPE, from which every text comes back unchanged, and BERT's WordPiece."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import SupportsInt

import numpy as np
from jaxtyping import UInt32
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from normattn import io
from normattn.errors import InputError
from normattn.io import MOST_BYTES, read_bytes
from normattn.lab.data.text_files import read_text

SEPARATOR = "<|doc|>"
SEPARATOR_ID = 0
SAMPLE_BYTES = 32 << 20
RUN_CHARACTERS = 1 << 15
RUNS_LEARNED = 1 << 20
"""Characters of runs without a space that a tokeniser is trained on, at most: each piece of one is
a word of its own to the trainer, which takes hundreds of bytes a character for it."""
_PIECE_CHARACTERS = 1 << 18
_RUN = re.compile(rf"\S{{{RUN_CHARACTERS + 1},}}")
_SPACE = re.compile(r"(?<=\S)[ \n\t\r](?=\S)")
_WHITE = re.compile(r"\s")
# The library's own threads warn and deadlock when a process forks later.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokeniser:
    """A trained byte-level BPE with special tokens at its first ids; by default `<|doc|>`, id 0.

    Text that happens to contain `<|doc|>` is encoded as the letters it is written with: only the
    end of a document makes a separator.
    """

    def __init__(self, serialised: str) -> None:
        self._json = serialised
        self._bpe = Tokenizer.from_str(serialised)
        # Not part of the serialised form: it has to be set again at every start.
        self._bpe.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """Entries, separator included; fewer than asked for when the text was small."""
        return int(self._bpe.get_vocab_size())

    @property
    def fingerprint(self) -> str:
        """sha256 of the serialised tokeniser."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, without a separator."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[UInt32[np.ndarray, "_"]]:
        """The token ids of several texts of any length; one piece is in the library at a time."""
        return [
            np.concatenate(
                [
                    np.array(encoding.ids, np.uint32)
                    for piece in cut_pieces(text)
                    for encoding in self._bpe.encode_batch_fast([piece], add_special_tokens=False)
                ]
            )
            for text in texts
        ]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of token ids; separators are shown, a half character becomes U+FFFD."""
        return str(self._bpe.decode([int(i) for i in ids], skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """Write the tokeniser as the JSON of the `tokenizers` library."""
        io.write_text(path, self._json)

    @classmethod
    def load(cls, path: Path) -> Tokeniser:
        """Read what `save` wrote; `InputError` when it is missing or damaged."""
        try:
            return cls(read_bytes(path, MOST_BYTES).decode())
        except InputError as error:
            raise InputError(f"tokeniser {error}") from error
        except Exception as error:  # tokenizers raises bare Exception for anything it dislikes
            raise InputError(f"tokeniser {path} is damaged: {error}") from error


def train_tokeniser(
    texts: Iterable[str],
    vocab_size: int,
    sample_bytes: int = SAMPLE_BYTES,
    specials: Sequence[str] = (SEPARATOR,),
) -> Tokeniser:
    """Train a byte-level BPE on the first `sample_bytes` (default 32 MiB) of `texts`.

    The result depends on the texts and sizes only: ties between merges are ordered by the pair.
    `vocab_size` counts the `specials` (ids 0, 1, …; default the separator alone) and the 256 bytes.
    Raises `InputError` for fewer entries than those.
    """
    least = 256 + len(specials)
    if vocab_size < least:
        raise InputError(
            f"a byte-level vocabulary needs at least {least} entries (256 bytes and "
            f"{', '.join(specials)}), got {vocab_size}"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample(texts, sample_bytes), trainer)
    return Tokeniser(bpe.to_str())


def cut_runs(text: str) -> list[str]:
    """The text in pieces none of which has a run of more than 32,768 characters without a space.

    The whole text in one piece, but for such a run: to a byte pair encoding it is one word, whose
    merges take memory and time out of all proportion.
    """
    cuts = [
        end
        for run in _RUN.finditer(text)
        for end in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS)
    ]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def cut_pieces(text: str) -> Iterator[str]:
    """Pieces of about 256,000 characters that have the same tokens one by one as together.

    Cut before a single space, tab or line end between two other characters: no word reaches
    across. A run without a space is cut as by `cut_runs`.
    """
    for part in cut_runs(text):
        start = 0
        while len(part) - start > _PIECE_CHARACTERS:
            space = _SPACE.search(part, start + _PIECE_CHARACTERS)
            if space is None:
                break
            yield part[start : space.start()]
            start = space.start()
        yield part[start:]


def _sample(texts: Iterable[str], sample_bytes: int) -> Iterator[str]:
    taken = runs = 0
    for text in texts:
        for piece in cut_runs(text):
            long = len(piece) >= RUN_CHARACTERS and _WHITE.search(piece) is None
            runs += len(piece) if long else 0
            if not long or runs <= RUNS_LEARNED:
                yield piece
        taken += len(text.encode())
        if taken >= sample_bytes:
            return


# BERT's word pieces: from a given vocab.txt, or a vocabulary trained on the texts.

PAD, UNKNOWN = "[PAD]", "[UNK]"
_LONGEST_WORD = 100
# A word that occurs once is better read from its pieces.
_LEAST_COUNT = 2


class WordPieces:
    """Text as BERT splits it: cleaned, cut at blanks and punctuation, then the longest pieces.

    A piece inside a word begins with `##`; a word that cannot be made of pieces, or of more than
    100 characters, is `[UNK]`. `lower_case` also drops accents. No `[CLS]` or `[SEP]` is added.
    `tokeniser` is the same as an object of the library tokenizers, `entries` are the pieces in the
    order of their ids, and `pad` is the id that fills a row. Source: arXiv 1810.04805.
    """

    def __init__(self, vocabulary: Mapping[str, int], lower_case: bool) -> None:
        model = models.WordPiece(
            vocab=dict(vocabulary), unk_token=UNKNOWN, max_input_chars_per_word=_LONGEST_WORD
        )
        self.tokeniser = Tokenizer(model)
        self.tokeniser.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        self.tokeniser.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.entries = tuple(vocabulary)
        self.pad = vocabulary[PAD]
        self._unknown = vocabulary[UNKNOWN]

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return len(self.entries)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, `[UNK]` alone for one without anything to read."""
        encodings = self.tokeniser.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids or [self._unknown] for encoding in encodings]

    def save(self, path: Path) -> None:
        """Write a vocab.txt: one entry a line, in the order of the ids."""
        io.write_text(path, "".join(f"{entry}\n" for entry in self.entries))

    @classmethod
    def load(cls, path: Path, lower_case: bool) -> WordPieces:
        """Read a vocab.txt; `InputError` names what is wrong with it."""
        entries = read_text(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
        ids: dict[str, int] = {}
        for number, entry in enumerate(entries):
            if ids.setdefault(entry, number) != number:
                raise InputError(f"{path}, line {number + 1}: {entry!r} is an entry before")
        for entry in (PAD, UNKNOWN):
            if entry not in ids:
                raise InputError(
                    f"{path} is no WordPiece vocabulary: the entry {entry} is missing; expected "
                    "one entry a line, as in BERT's vocab.txt"
                )
        return cls(ids, lower_case)


def train_word_pieces(texts: Collection[str], vocab_size: int, lower_case: bool) -> WordPieces:
    """Learn at most `vocab_size` pieces from `texts`: merges of pairs that occur at least twice.

    The same texts give the same vocabulary. Raises `InputError` when `vocab_size` does not hold
    the characters of the texts, once at the start of a word and once inside.
    """
    normaliser = normalizers.BertNormalizer(lowercase=lower_case)
    letters = sorted({c for text in texts for c in normaliser.normalize_str(text)})
    letters = [letter for letter in letters if not letter.isspace()]
    # Given from the start: left to the trainer, pieces inside words come in the order of a hash.
    given = [PAD, UNKNOWN, *letters, *(f"##{letter}" for letter in letters)]
    if vocab_size < len(given):
        raise InputError(
            f"data.vocab_size is {vocab_size:,}, but the training texts alone are written with "
            f"{len(letters):,} different characters; give at least {len(given):,}"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=_LEAST_COUNT,
        special_tokens=given,
        show_progress=False,
    )
    learner = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    learner.normalizer = normaliser
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    learner.train_from_iterator(texts, trainer)
    vocabulary = learner.get_vocab()
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    return WordPieces({entry: vocabulary[entry] for entry in ordered}, lower_case)

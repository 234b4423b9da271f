"""Tokenisers: lossless byte-level BPE, and BERT's WordPiece."""

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
from normattn.io import MAX_BYTES, read_bytes
from normattn.lab.data.text_files import read_text

SEPARATOR = "<|doc|>"
SEPARATOR_ID = 0
PAD, UNKNOWN = "[PAD]", "[UNK]"
SAMPLE_BYTES = 32 << 20
RUN_CHARACTERS = 1 << 15
MAX_RUN_SAMPLE = 1 << 20
"""The most characters of long runs to train on: they take hundreds of bytes a character."""
_RUN = re.compile(rf"\S{{{RUN_CHARACTERS + 1},}}")
# The library's threads warn and deadlock if the process forks later.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokeniser:
    """A trained byte-level BPE whose first ids are special tokens; by default `<|doc|>`, id 0.

    `<|doc|>` inside a text is encoded as ordinary characters, never as the separator.
    """

    def __init__(self, serialised: str) -> None:
        self._json = serialised
        self._bpe = Tokenizer.from_str(serialised)
        # Not serialised, so it must be set each time.
        self._bpe.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """Number of entries, separator included; may be fewer than configured for small texts."""
        return int(self._bpe.get_vocab_size())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the serialised tokeniser."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without a separator."""
        return list(self.encode_batch([text])[0].tolist())

    def encode_batch(self, texts: Sequence[str]) -> list[UInt32[np.ndarray, "_"]]:
        """Return the token ids of several texts."""
        encoded = []
        for text in texts:
            pieces = (
                self._bpe.encode_batch_fast([piece], add_special_tokens=False)[0]
                for piece in cut_runs(text)
            )
            encoded.append(np.concatenate([np.array(piece.ids, np.uint32) for piece in pieces]))
        return encoded

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of token ids. Separators are shown; partial characters become U+FFFD."""
        return str(self._bpe.decode([int(i) for i in ids], skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """Write the tokeniser as the JSON of the `tokenizers` library."""
        io.write_text(path, self._json)

    @classmethod
    def load(cls, path: Path) -> Tokeniser:
        """Read what `save` wrote; `InputError` if it is missing or damaged."""
        try:
            return cls(read_bytes(path, MAX_BYTES).decode())
        except InputError as error:
            raise InputError(f"tokeniser {error}") from error
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(f"tokeniser {path} is damaged: {error}") from error


def train_tokeniser(
    texts: Iterable[str], vocab_size: int, specials: Sequence[str] = (SEPARATOR,)
) -> Tokeniser:
    """Train a byte-level BPE on the first `SAMPLE_BYTES` of `texts`.

    Deterministic: ties between merges are ordered by the pair. `vocab_size` includes the `specials`
    (ids 0, 1, …; default the separator) and the 256 bytes.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample(texts), trainer)
    return Tokeniser(bpe.to_str())


def cut_runs(text: str) -> list[str]:
    """Cut runs of over 32,768 characters without a space, which BPE would merge as one word."""
    cuts = [
        end
        for run in _RUN.finditer(text)
        for end in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS)
    ]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _sample(texts: Iterable[str]) -> Iterator[str]:
    """Yield the first `SAMPLE_BYTES` of the texts, with a limit on long runs without a space."""
    sampled = run_characters = 0
    for text in texts:
        for piece in cut_runs(text):
            is_run = len(piece) >= RUN_CHARACTERS and not re.search(r"\s", piece)
            run_characters += len(piece) if is_run else 0
            if not is_run or run_characters <= MAX_RUN_SAMPLE:
                yield piece
        sampled += len(text.encode())
        if sampled >= SAMPLE_BYTES:
            return


class WordPieces:
    """BERT's tokeniser: text is split at white space and punctuation, then into longest pieces.

    A piece inside a word begins with `##`. A word that has no pieces, or more than 100 characters,
    is `[UNK]`. `lower_case` also drops accents. No `[CLS]` or `[SEP]` is added. `tokenizer` is the
    object of the library tokenizers, `entries` are the pieces in the order of their ids, and
    `pad_id` is the padding. Source: arXiv 1810.04805.
    """

    def __init__(self, vocabulary: Mapping[str, int], lower_case: bool) -> None:
        model = models.WordPiece(
            vocab=dict(vocabulary), unk_token=UNKNOWN, max_input_chars_per_word=100
        )
        self.tokenizer = Tokenizer(model)
        self.tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        self.tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.entries = tuple(vocabulary)
        self.pad_id = vocabulary[PAD]
        self._unknown = vocabulary[UNKNOWN]

    @property
    def vocab_size(self) -> int:
        """Number of entries."""
        return len(self.entries)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; `[UNK]` alone for an empty one."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids or [self._unknown] for encoding in encodings]

    def save(self, path: Path) -> None:
        """Write a vocab.txt, one entry a line in the order of the ids."""
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
    """Learn at most `vocab_size` pieces from `texts`, by merging pairs that occur at least twice.

    Deterministic. Raises `InputError` if `vocab_size` is too small for the characters of the texts,
    each once for the start of a word and once for inside.
    """
    normaliser = normalizers.BertNormalizer(lowercase=lower_case)
    used = {letter for text in texts for letter in normaliser.normalize_str(text)}
    letters = sorted(letter for letter in used if not letter.isspace())
    # Listed first, because the trainer orders pieces inside words by a hash.
    initial = [PAD, UNKNOWN, *letters, *(f"##{letter}" for letter in letters)]
    if vocab_size < len(initial):
        raise InputError(
            f"data.vocab_size is {vocab_size:,}, but the training texts alone are written with "
            f"{len(letters):,} different characters; give at least {len(initial):,}"
        )
    # A word that occurs once is better encoded as pieces.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=initial, show_progress=False
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normaliser
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return WordPieces(dict(vocabulary), lower_case)

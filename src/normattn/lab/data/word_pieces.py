"""BERT's WordPiece tokenisation: from a given vocab.txt, or a vocabulary trained on the texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from normattn import io
from normattn.errors import InputError
from normattn.lab.data.text_files import read_text
from normattn.lab.data.tokeniser import one_thread

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
        with one_thread():
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
    with one_thread():
        learner.train_from_iterator(texts, trainer)
    vocabulary = learner.get_vocab()
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    return WordPieces({entry: vocabulary[entry] for entry in ordered}, lower_case)

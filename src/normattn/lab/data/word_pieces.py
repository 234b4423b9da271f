"""BERT's WordPiece tokenisation: from a given vocab.txt, or a vocabulary trained on the texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    Source: arXiv 1810.04805.
    """

    def __init__(self, vocabulary: Mapping[str, int], lower_case: bool) -> None:
        self._vocabulary = dict(vocabulary)
        model = models.WordPiece(
            vocab=self._vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=_LONGEST_WORD
        )
        self._tokeniser = Tokenizer(model)
        self._tokeniser.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        self._tokeniser.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return len(self._vocabulary)

    @property
    def tokeniser(self) -> Tokenizer:
        """The same as an object of the library tokenizers."""
        return self._tokeniser

    @property
    def entries(self) -> tuple[str, ...]:
        """The pieces, in the order of their ids."""
        return tuple(self._vocabulary)

    @property
    def pad(self) -> int:
        """The id that fills a row."""
        return self._vocabulary[PAD]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, `[UNK]` alone for one without anything to read."""
        with one_thread():
            encodings = self._tokeniser.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids or [self._vocabulary[UNKNOWN]] for encoding in encodings]

    def save(self, path: Path) -> None:
        """Write a vocab.txt: one entry a line, in the order of the ids."""
        io.write_text(path, "".join(f"{entry}\n" for entry in self._vocabulary))

    @classmethod
    def load(cls, path: Path, lower_case: bool) -> WordPieces:
        """Read a vocab.txt; `InputError` names what is wrong with it."""
        entries = read_text(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
        counted = Counter(entries)
        for entry in (PAD, UNKNOWN):
            if entry not in counted:
                raise InputError(
                    f"{path} is no WordPiece vocabulary: the entry {entry} is missing; expected "
                    "one entry a line, as in BERT's vocab.txt"
                )
        twice = next((entry for entry, count in counted.items() if count > 1), None)
        if twice is not None:
            line = len(entries) - entries[::-1].index(twice)
            raise InputError(f"{path}, line {line}: the entry {twice!r} stands there before")
        return cls({entry: number for number, entry in enumerate(entries)}, lower_case)


def train_word_pieces(texts: Iterable[str], vocab_size: int, lower_case: bool) -> WordPieces:
    """Learn at most `vocab_size` pieces from `texts`: merges of pairs that occur at least twice.

    The same texts give the same vocabulary. Raises `InputError` when `vocab_size` does not hold
    the characters of the texts, once at the start of a word and once inside.
    """
    texts = list(texts)
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

"""How a fact is stated and asked for: as lines of source code, or as bare tokens.

A statement is `name`, a link and a source (a value, or another name). Asking repeats the statement
up to its source, so a model answers by continuing as the text did before: by copying. All pieces
are encoded apart and joined as tokens, so the name that is asked for has the very tokens of the
name that was stated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np
from jaxtyping import Bool

from normattn.errors import InputError
from normattn.lab.data.token_data import TokenData
from normattn.lab.data.tokeniser import Tokeniser

Ids = tuple[int, ...]

_CONSONANTS = "bcdfghjkmnpqrstvwxz"
_NAME_TOKENS, _VALUE_TOKENS, _LINK = 3, 4, 1


class Statements(ABC):
    """Names, values and the statements made of them, as token ids."""

    @abstractmethod
    def name(self, random: np.random.Generator) -> Ids:
        """A name drawn at random."""

    @abstractmethod
    def value(self, random: np.random.Generator) -> Ids:
        """A value drawn at random."""

    @abstractmethod
    def question(self, name: Ids) -> Ids:
        """What comes before the source in the statement of `name`."""

    @abstractmethod
    def breaks(self, filler: np.ndarray) -> Bool[np.ndarray, "n"]:
        """Before which tokens of the filler a statement stands well."""

    def state(self, name: Ids, source: Ids) -> Ids:
        """The statement that `name` is `source`."""
        return self.question(name) + source


class CodeStatements(Statements):
    r"""Assignments on lines of their own: `\nqx7=4711`.

    A name is two consonants and a digit (3,610 of them), a value four digits. There are no spaces,
    because after one a name would have other tokens than at the beginning of a line.
    """

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._tokeniser = tokeniser
        self._newline, self._equals = self._ids("\n"), self._ids("=")

    def name(self, random: np.random.Generator) -> Ids:
        """Two consonants and a digit."""
        letters = "".join(_CONSONANTS[i] for i in random.integers(len(_CONSONANTS), size=2))
        return self._ids(letters) + self._ids(str(random.integers(10)))

    def value(self, random: np.random.Generator) -> Ids:
        """Four digits, the first of them not 0."""
        return self._ids(str(random.integers(1000, 10000)))

    def question(self, name: Ids) -> Ids:
        r"""`\nname=`."""
        return self._newline + name + self._equals

    def breaks(self, filler: np.ndarray) -> Bool[np.ndarray, "n"]:
        """Where a line ends."""
        return np.asarray(self._line_ends[filler])

    @cached_property
    def _line_ends(self) -> Bool[np.ndarray, "vocabulary"]:
        texts = (self._tokeniser.decode([i]) for i in range(self._tokeniser.vocab_size))
        return np.array([text.startswith("\n") for text in texts])

    def _ids(self, text: str) -> Ids:
        return tuple(self._tokeniser.encode(text))


class TokenStatements(Statements):
    """For generated tokens that have no text: a name is 3 tokens, a value 4.

    Token 1 links a name to its source: without it, the name in `b = a` and the one in `c = b` could
    not be told apart. Names and values are made of the tokens from 2 on.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 4:
            raise InputError(f"retrieval needs a vocabulary of at least 4, got {vocab_size}")
        self._vocab_size = vocab_size

    def name(self, random: np.random.Generator) -> Ids:
        """Three tokens."""
        return self._draw(random, _NAME_TOKENS)

    def value(self, random: np.random.Generator) -> Ids:
        """Four tokens."""
        return self._draw(random, _VALUE_TOKENS)

    def question(self, name: Ids) -> Ids:
        """The name and the link."""
        return (*name, _LINK)

    def breaks(self, filler: np.ndarray) -> Bool[np.ndarray, "n"]:
        """Everywhere."""
        return np.ones(len(filler), dtype=bool)

    def _draw(self, random: np.random.Generator, count: int) -> Ids:
        return tuple(int(token) for token in random.integers(_LINK + 1, self._vocab_size, count))


def statements_for(data: TokenData) -> Statements:
    """Code where the data has a tokeniser, bare tokens where it was generated."""
    if data.tokeniser is None:
        return TokenStatements(data.vocab_size)
    return CodeStatements(data.tokeniser)

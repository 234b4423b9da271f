"""What each retrieval task states in a text and asks for at its end, as tokens.

- `passkey`: one statement at a said depth, then the question.
- `multi_key`: four statements, the asked one at the depth, the others anywhere.
- `variable_tracking`: a chain of three (a = value, b = a, c = b) that begins at the depth; asked
  for c, then for what c is, and so to the value: every link must be found.
- `key_value`: nothing but statements, as many as fill the text; one of them is asked for, and all
  others are its distractors (as in "Lost in the middle", arXiv 2307.03172).
- `copy`: one statement of a passage four values long, to be repeated whole.

A statement is a name, a link and a source (a value, or another name). Asking repeats the statement
up to its source, so a model answers by continuing as the text did before: by copying. All pieces
are encoded apart and joined as tokens, so the name that is asked for has the very tokens of the
name that was stated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool

from normattn.errors import InputError
from normattn.lab.data.token_data import TokenData
from normattn.lab.data.tokeniser import Tokeniser

Ids = tuple[int, ...]

KEYS, LINKS, PASSAGE = 4, 3, 4
# So often in a row a pair is drawn that was drawn before: the names are used up.
_MISSES = 50
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


@dataclass(frozen=True)
class Facts:
    """`statements[0]` stands at the depth, `ordered` ones behind it in turn, others anywhere.

    `asked` are the questions at the end, each with its answer; `words` are the names, values and
    questions that may stand nowhere but where they are put. `filling` statements are themselves
    the text: they follow each other, the first of them at its share of their number.
    """

    statements: tuple[Ids, ...]
    asked: tuple[tuple[Ids, Ids], ...]
    words: tuple[Ids, ...]
    ordered: bool = False
    filling: bool = False

    @property
    def size(self) -> int:
        """The tokens of all statements, questions and answers."""
        return sum(map(len, self.statements)) + len(self.end)

    @property
    def end(self) -> Ids:
        """Questions and answers as they stand at the end of the text."""
        return tuple(token for pair in self.asked for part in pair for token in part)

    @property
    def scored(self) -> list[bool]:
        """Which tokens of the end are an answer's."""
        return [part == 1 for pair in self.asked for part in (0, 1) for _ in pair[part]]


def _passkey(write: Statements, random: np.random.Generator, room: int) -> Facts:
    return _keys(write, random, 1)


def _multi_key(write: Statements, random: np.random.Generator, room: int) -> Facts:
    return _keys(write, random, KEYS)


def _keys(write: Statements, random: np.random.Generator, count: int) -> Facts:
    names = [write.name(random) for _ in range(count)]
    values = [write.value(random) for _ in range(count)]
    stated = tuple(write.state(*pair) for pair in zip(names, values, strict=True))
    words = (*names, *values, *(write.question(name) for name in names))
    return Facts(stated, ((write.question(names[0]), values[0]),), words)


def _variable_tracking(write: Statements, random: np.random.Generator, room: int) -> Facts:
    names = [write.name(random) for _ in range(LINKS)]
    value = write.value(random)
    sources = [value, *names[:-1]]
    stated = tuple(write.state(*pair) for pair in zip(names, sources, strict=True))
    links = zip(names[::-1], sources[::-1], strict=True)
    asked = tuple((write.question(name), source) for name, source in links)
    words = (*names, value, *(question for question, _ in asked))
    return Facts(stated, asked, words, ordered=True)


def _key_value(write: Statements, random: np.random.Generator, room: int) -> Facts:
    """Pairs until the text is full, or until there are no more names."""
    asked_name, asked_value = write.name(random), write.value(random)
    question = write.question(asked_name)
    stated = [write.state(asked_name, asked_value)]
    names, values, left = {asked_name}, {asked_value}, room - 2 * len(stated[0])
    misses = 0
    while misses < _MISSES:
        name, value = write.name(random), write.value(random)
        misses = misses + 1 if name in names or value in values else 0
        if misses:
            continue
        statement = write.state(name, value)
        left -= len(statement)
        if left < 1:
            break
        names.add(name)
        values.add(value)
        stated.append(statement)
    words = (asked_name, asked_value, question)
    return Facts(tuple(stated), ((question, asked_value),), words, filling=True)


def _copy(write: Statements, random: np.random.Generator, room: int) -> Facts:
    """One statement whose value is a passage."""
    name, parts = write.name(random), [write.value(random) for _ in range(PASSAGE)]
    passage, question = tuple(token for part in parts for token in part), write.question(name)
    return Facts((write.state(name, passage),), ((question, passage),), (name, passage, question))


FACTS: dict[str, Callable[[Statements, np.random.Generator, int], Facts]] = {
    "passkey": _passkey,
    "multi_key": _multi_key,
    "variable_tracking": _variable_tracking,
    "key_value": _key_value,
    "copy": _copy,
}
TASKS = tuple(FACTS)

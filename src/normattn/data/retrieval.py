"""Retrieval: facts stated somewhere in a long text and asked for at its end; made here.

- `passkey`: one statement at a said depth, then the question.
- `multi_key`: four statements, the asked one at the depth, the others anywhere.
- `variable_tracking`: a chain of three (a = value, b = a, c = b) that begins at the depth; asked
  for c, then for what c is, and so to the value: every link must be found.

Around the statements stands held-out text, one document's. The last answer is the end of the
window, so a window of `length` targets reads `length` tokens to give its last one. Source: needle
tests as in RULER (arXiv 2404.06654), whose sentences are here lines of code or bare tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64

from normattn.data.evaluation_sets import choose_places, window_length
from normattn.data.retrieval_statements import Ids, Statements, statements_for
from normattn.data.token_data import TokenData
from normattn.errors import InputError

TASKS = ("passkey", "multi_key", "variable_tracking")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS, LINKS = 4, 3
_TRIES = 100
# A statement may be moved by this share of the text, so that it stands at the end of a line.
_SLACK = 1 / 16


@dataclass(frozen=True)
class RetrievalSet:
    """Samples of one task at one length, each at every depth.

    `windows` (n, D, length + 1): sample n with its asked statement at depth d (0: at the
    beginning, 1: right before the question); one sample has the same filler, names and values at
    every depth. `documents` (n): where the filler is from. `scored` (n, length): the targets that
    are tokens of an answer; target t is token t + 1. `places` (n, D): at which token the asked
    statement (of a chain: the first) begins.
    """

    task: str
    length: int
    train_length: int
    windows: Int32[np.ndarray, "n d length_1"]
    documents: list[str]
    scored: Bool[np.ndarray, "n length"]
    places: Int64[np.ndarray, "n d"]
    depths: tuple[float, ...] = DEPTHS
    protocol: Literal["retrieval"] = "retrieval"

    def __len__(self) -> int:
        return len(self.windows)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the windows and of what is scored in them."""
        digest = hashlib.sha256()
        described = (self.protocol, self.task, self.length, self.train_length)
        digest.update(repr((*described, self.depths, self.documents)).encode())
        digest.update(np.ascontiguousarray(self.windows, dtype="<i4").tobytes())
        digest.update(np.packbits(self.scored, axis=1).tobytes())
        return digest.hexdigest()


def retrieval_set(
    data: TokenData,
    task: str,
    train_length: int,
    multiple: int = 8,
    max_windows: int = 125,
    seed: int = 0,
    split: str = "test",
) -> RetrievalSet:
    """One task at `multiple`·L tokens: as many samples as give `max_windows` windows, at least 1.

    A pure function of its arguments. Raises `InputError` for an unknown task, where no document of
    the split is as long as a window, and where a window is too short for the statements.
    """
    if task not in _FACTS:
        raise InputError(f"no retrieval task is called {task!r}: there are {', '.join(TASKS)}")
    length, count = window_length(train_length, multiple), max(1, max_windows // len(DEPTHS))
    if max_windows < 1:
        raise InputError(f"an evaluation set needs at least 1 window, got {max_windows}")
    held_out, statements = data.split(split), statements_for(data)
    # A document may give several samples, each with other names, where long ones are few.
    found = choose_places(held_out, length + 1, count, seed)
    windows: Int32[np.ndarray, "n d length_1"]
    windows = np.zeros((count, len(DEPTHS), length + 1), dtype=np.int32)
    places = np.zeros((count, len(DEPTHS)), dtype=np.int64)
    scored, documents = np.zeros((count, length), dtype=bool), []
    for sample in range(count):
        document, first = (int(value) for value in found[sample % len(found)])
        text = held_out.document(document)[first : first + length + 1].astype(np.int64)
        random = np.random.default_rng([seed, TASKS.index(task), length, sample])
        made = _sample(task, statements, text, random, held_out.names[document])
        windows[sample], places[sample], tail = made
        scored[sample, length - len(tail) :] = tail
        documents.append(held_out.names[document])
    return RetrievalSet(task, length, train_length, windows, documents, scored, places)


@dataclass(frozen=True)
class _Facts:
    """`statements[0]` stands at the depth, `ordered` ones behind it in turn, others anywhere.

    `asked` are the questions at the end, each with its answer; `words` all names and values, and
    all that could be asked.
    """

    statements: tuple[Ids, ...]
    asked: tuple[tuple[Ids, Ids], ...]
    words: tuple[Ids, ...]
    ordered: bool = False

    @property
    def size(self) -> int:
        return sum(map(len, self.statements)) + len(self.end)

    @property
    def end(self) -> Ids:
        """Questions and answers as they stand at the end of the text."""
        return tuple(token for pair in self.asked for part in pair for token in part)

    @property
    def scored(self) -> list[bool]:
        """Which tokens of the end are an answer's."""
        return [part == 1 for pair in self.asked for part in (0, 1) for _ in pair[part]]


def _passkey(write: Statements, random: np.random.Generator) -> _Facts:
    return _keys(write, random, 1)


def _multi_key(write: Statements, random: np.random.Generator) -> _Facts:
    return _keys(write, random, KEYS)


def _keys(write: Statements, random: np.random.Generator, count: int) -> _Facts:
    names = [write.name(random) for _ in range(count)]
    values = [write.value(random) for _ in range(count)]
    stated = tuple(write.state(*pair) for pair in zip(names, values, strict=True))
    words = (*names, *values, *(write.question(name) for name in names))
    return _Facts(stated, ((write.question(names[0]), values[0]),), words)


def _variable_tracking(write: Statements, random: np.random.Generator) -> _Facts:
    names = [write.name(random) for _ in range(LINKS)]
    value = write.value(random)
    sources = [value, *names[:-1]]
    stated = tuple(write.state(*pair) for pair in zip(names, sources, strict=True))
    links = zip(names[::-1], sources[::-1], strict=True)
    asked = tuple((write.question(name), source) for name, source in links)
    words = (*names, value, *(question for question, _ in asked))
    return _Facts(stated, asked, words, ordered=True)


_FACTS: dict[str, Callable[[Statements, np.random.Generator], _Facts]] = {
    "passkey": _passkey,
    "multi_key": _multi_key,
    "variable_tracking": _variable_tracking,
}


def _sample(
    task: str,
    write: Statements,
    text: Int64[np.ndarray, "length_1"],
    random: np.random.Generator,
    document: str,
) -> tuple[np.ndarray, list[int], list[bool]]:
    """The windows (D, length + 1) of one sample, its statement's places, what its end scores."""
    for _ in range(_TRIES):
        facts = _FACTS[task](write, random)
        if facts.size >= len(text):
            raise InputError(
                f"a text of {len(text) - 1} tokens is too short for {task.replace('_', '-')}: its "
                f"statements, questions and answers alone take {facts.size}; use a longer length"
            )
        filler = text[: len(text) - facts.size]
        elsewhere = random.random(len(facts.statements) - 1)
        made = [_write(facts, filler, write, depth, elsewhere) for depth in DEPTHS]
        if all(_unmistakable(facts, window) for window, _ in made):
            windows = np.stack([window for window, _ in made])
            return windows, [place for _, place in made], facts.scored
    raise InputError(
        f"{_TRIES} times the names and values drawn for {task.replace('_', '-')} already stood in "
        f"the text of {document}; use a larger vocabulary or a shorter length"
    )


def _write(
    facts: _Facts,
    filler: Int64[np.ndarray, "f"],
    write: Statements,
    depth: float,
    elsewhere: np.ndarray,
) -> tuple[np.ndarray, int]:
    """Filler with the statements in their places and the question behind; and the asked place."""
    breaks = np.append(write.breaks(filler), True)
    first = _break_near(breaks, depth)
    if facts.ordered:
        shares = depth + np.sort(elsewhere) * (1 - depth)
        others = [max(first, _break_near(breaks, share)) for share in shares]
    else:
        others = [_break_near(breaks, share) for share in elsewhere]
    offsets = np.array([first, *others])
    pieces: list[np.ndarray] = []
    start = place = 0
    for index in np.argsort(offsets, kind="stable"):
        pieces.append(filler[start : offsets[index]])
        if index == 0:
            place = sum(map(len, pieces))
        pieces.append(np.array(facts.statements[index], dtype=np.int64))
        start = int(offsets[index])
    end = np.array(facts.end, dtype=np.int64)
    return np.concatenate([*pieces, filler[start:], end]), place


def _break_near(breaks: np.ndarray, share: float) -> int:
    """The break nearest to a share of the filler; that very place where none is near."""
    last = len(breaks) - 1
    wanted = round(share * last)
    candidates = np.flatnonzero(breaks)
    nearest = int(candidates[np.abs(candidates - wanted).argmin()])
    return nearest if abs(nearest - wanted) <= last * _SLACK else wanted


def _unmistakable(facts: _Facts, window: np.ndarray) -> bool:
    """Whether every name, value and question stands just where it was put, all of them different.

    A statement and the filler around it could make another one between them.
    """
    if len(set(facts.words)) < len(facts.words):
        return False
    pieces = [np.array(piece, dtype=np.int64) for piece in (*facts.statements, facts.end)]
    return all(
        _occurrences(window, word) == sum(_occurrences(piece, word) for piece in pieces)
        for word in facts.words
    )


def _occurrences(text: np.ndarray, word: Ids) -> int:
    if len(word) > len(text):
        return 0
    views = np.lib.stride_tricks.sliding_window_view(text, len(word))
    return int((views == np.array(word)).all(axis=1).sum())

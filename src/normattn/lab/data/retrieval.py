"""Retrieval: facts stated somewhere in a long text and asked for at its end; made here.

`data.retrieval_facts` says which facts a task states. Around the statements stands held-out text,
one document's. The last answer is the end of the window, so a window of `length` targets reads
`length` tokens to give its last one. Source: needle tests as in RULER (arXiv 2404.06654), whose
sentences are here lines of code or bare tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64

from normattn.errors import InputError, unknown
from normattn.lab.data.retrieval_facts import (
    FACTS,
    TASKS,
    Facts,
    Ids,
    Statements,
    statements_for,
)
from normattn.lab.data.token_data import TokenData
from normattn.lab.data.windows import choose_places, window_length

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
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
    if task not in FACTS:
        raise unknown("retrieval task", task, TASKS)
    length, count = window_length(train_length, multiple), max(1, max_windows // len(DEPTHS))
    if max_windows < 1:
        raise InputError(f"an evaluation set needs at least 1 window, got {max_windows}")
    held_out, statements = data.split(split), statements_for(data)
    # A document may give several samples, each with other names, where long ones are few.
    starts = choose_places(held_out, length + 1, count, seed)
    windows: Int32[np.ndarray, "n d length_1"]
    windows = np.zeros((count, len(DEPTHS), length + 1), dtype=np.int32)
    places = np.zeros((count, len(DEPTHS)), dtype=np.int64)
    scored, documents = np.zeros((count, length), dtype=bool), []
    for sample in range(count):
        document, first = (int(value) for value in starts[sample % len(starts)])
        text = held_out.document(document)[first : first + length + 1].astype(np.int64)
        random = np.random.default_rng([seed, TASKS.index(task), length, sample])
        made = _sample(task, statements, text, random, held_out.names[document])
        windows[sample], places[sample], tail = made
        scored[sample, length - len(tail) :] = tail
        documents.append(held_out.names[document])
    return RetrievalSet(task, length, train_length, windows, documents, scored, places)


def _sample(
    task: str,
    write: Statements,
    text: Int64[np.ndarray, "length_1"],
    random: np.random.Generator,
    document: str,
) -> tuple[np.ndarray, list[int], list[bool]]:
    """The windows (D, length + 1) of one sample, its statement's places, what its end scores."""
    for _ in range(_TRIES):
        facts = FACTS[task](write, random, len(text))
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
            return windows, [position for _, position in made], facts.scored
    raise InputError(
        f"{_TRIES} times the names and values drawn for {task.replace('_', '-')} already stood in "
        f"the text of {document}; use a larger vocabulary or a shorter length"
    )


def _write(
    facts: Facts,
    filler: Int64[np.ndarray, "f"],
    write: Statements,
    depth: float,
    elsewhere: np.ndarray,
) -> tuple[np.ndarray, int]:
    """Filler with the statements in their places and the question behind; and the asked place."""
    order, offsets = _arranged(facts, filler, write, depth, elsewhere)
    pieces: list[np.ndarray] = []
    start = position = 0
    for index in order:
        pieces.append(filler[start : offsets[index]])
        if index == 0:
            position = sum(map(len, pieces))
        pieces.append(np.array(facts.statements[index], dtype=np.int64))
        start = int(offsets[index])
    end = np.array(facts.end, dtype=np.int64)
    return np.concatenate([*pieces, filler[start:], end]), position


def _arranged(
    facts: Facts,
    filler: Int64[np.ndarray, "f"],
    write: Statements,
    depth: float,
    elsewhere: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The order of the statements, and before which token of the filler each of them stands."""
    if facts.filling:
        others = np.arange(1, len(facts.statements))
        order = np.insert(others, round(depth * len(others)), 0)
        return order, np.full(len(order), len(filler))
    breaks = np.append(write.breaks(filler), True)
    first = _break_near(breaks, depth)
    if facts.ordered:
        shares = depth + np.sort(elsewhere) * (1 - depth)
        places = [max(first, _break_near(breaks, share)) for share in shares]
    else:
        places = [_break_near(breaks, share) for share in elsewhere]
    offsets = np.array([first, *places])
    return np.argsort(offsets, kind="stable"), offsets


def _break_near(breaks: np.ndarray, share: float) -> int:
    """The break nearest to a share of the filler; that very place where none is near."""
    last = len(breaks) - 1
    wanted = round(share * last)
    candidates = np.flatnonzero(breaks)
    nearest = int(candidates[np.abs(candidates - wanted).argmin()])
    return nearest if abs(nearest - wanted) <= last * _SLACK else wanted


def _unmistakable(facts: Facts, window: np.ndarray) -> bool:
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

"""Retrieval: facts stated somewhere in a long text and asked for at its end; made here.

- `passkey`: one statement at a given depth, then the question.
- `multi_key`: four statements, the asked one at the depth, the others anywhere.
- `variable_tracking`: a chain of three (a = value, b = a, c = b) that begins at the depth; asked
  for c, then for what c is, and so to the value: every link must be found.
- `key_value`: nothing but statements, as many as fill the text; one of them is asked for, and all
  others are its distractors (as in "Lost in the middle", arXiv 2307.03172).
- `copy`: one statement of a passage four values long, to be repeated whole.

A statement is a name, a link and a source (a value, or another name). Asking repeats the statement
up to its source, so a model answers by continuing as the text did before: by copying. Around the
statements is held-out text of one document's. The last answer is the end of the window, so a
window of `length` targets reads `length` tokens to give its last one. Source: needle tests as in
RULER (arXiv 2404.06654), whose sentences are here lines of code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from normattn.errors import InputError, unknown_name
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import TokenData
from normattn.lab.data.windows import choose_places, digest_of, window_length

TASKS = ("passkey", "multi_key", "variable_tracking", "key_value", "copy")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS, LINKS, PASSAGE = 4, 3, 4
Ids = tuple[int, ...]
Random = np.random.Generator

_TRIES = 100
# So often in a row a pair is drawn that was drawn before: the names are used up.
_MISSES = 50
# A statement may be moved by this share of the text, so that it is at the end of a line.
_SLACK = 1 / 16
_CONSONANTS = "bcdfghjkmnpqrstvwxz"


@dataclass(frozen=True)
class RetrievalSet:
    """Samples of one task at one length, each at every depth.

    `windows` (n, D, length + 1): sample n with its asked statement at depth d (0: at the
    beginning, 1: right before the question); one sample has the same filler, names and values at
    every depth. `documents` (n): where the filler is from. `scored` (n, length): the targets that
    are tokens of an answer; target t is token t + 1.
    """

    task: str
    length: int
    train_length: int
    windows: Int32[np.ndarray, "n d length_1"]
    documents: list[str]
    scored: Bool[np.ndarray, "n length"]
    depths: tuple[float, ...] = DEPTHS
    protocol: ClassVar[str] = "retrieval"

    def __len__(self) -> int:
        return len(self.windows)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the windows and of what is scored in them."""
        described = (self.protocol, self.task, self.length, self.train_length)
        scored = np.packbits(self.scored, axis=1)
        return digest_of((*described, self.depths, self.documents), self.windows, scored)


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

    A pure function of its arguments. Raises `InputError` for an unknown task, for generated tokens,
    where no document of the split is as long as a window, and where a window is too short for the
    statements.
    """
    if task not in TASKS:
        raise unknown_name("retrieval task", task, TASKS)
    if data.tokeniser is None:
        raise InputError("retrieval writes lines of text, and generated tokens have none")
    length = window_length(train_length, multiple)
    count = min(max_windows, max(1, max_windows // len(DEPTHS)))
    held_out, write = data.split(split), Writer(data.tokeniser)
    # A document may give several samples, each with other names, where long ones are few.
    starts = choose_places(held_out, length + 1, count, seed)
    windows, documents = np.zeros((count, len(DEPTHS), length + 1), dtype=np.int32), []
    scored = np.zeros((count, length), dtype=bool)
    for sample in range(count):
        document, first = (int(value) for value in starts[sample % len(starts)])
        text = held_out.window(document, first, length + 1).astype(np.int64)
        random = np.random.default_rng([seed, TASKS.index(task), length, sample])
        documents.append(held_out.names[document])
        windows[sample], answers = _sample(task, write, text, random, documents[-1])
        scored[sample, length - len(answers) :] = answers
    return RetrievalSet(task, length, train_length, windows, documents, scored)


class Writer:
    r"""Assignments on lines of their own, as token ids: `\nqx7=4711`, between two lines.

    A name is two consonants and a digit (3,610 of them), a value four digits. There are no spaces,
    because after one a name would have other tokens than at the beginning of a line. All pieces
    are encoded apart and joined as tokens, so a name has the same tokens where it is stated and
    asked.
    """

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._encode = tokeniser.encode
        texts = (tokeniser.decode([i]) for i in range(tokeniser.vocab_size))
        self._line_ends = np.array([text.startswith("\n") for text in texts])

    def name(self, random: Random) -> Ids:
        """Draw a name."""
        letters = "".join(_CONSONANTS[i] for i in random.integers(len(_CONSONANTS), size=2))
        return (*self._encode(letters), *self._encode(str(random.integers(10))))

    def value(self, random: Random) -> Ids:
        """Draw a value."""
        return tuple(self._encode(str(random.integers(1000, 10000))))

    def question(self, name: Ids) -> Ids:
        """What comes before the source in a statement."""
        return (*self._encode("\n"), *name, *self._encode("="))

    def breaks(self, filler: Int64[np.ndarray, "f"]) -> np.ndarray:
        """Say before which tokens of the filler a statement may be inserted."""
        return np.asarray(self._line_ends[filler])


# What each task states and asks for.


class Facts(NamedTuple):
    """The statements in a text: the queried one first, those of a chain in their order.

    `asked` are the questions at the end, each with its answer; `words` are the names, values and
    questions that may occur nowhere but where they are put.
    """

    statements: list[Ids]
    asked: list[tuple[Ids, Ids]]
    words: list[Ids]

    @property
    def end(self) -> Ids:
        """Questions and answers at the end of the text."""
        return tuple(token for pair in self.asked for part in pair for token in part)

    @property
    def size(self) -> int:
        """The tokens of all statements, questions and answers."""
        return sum(map(len, self.statements)) + len(self.end)

    def are_unmistakable(self, window: np.ndarray) -> bool:
        """Whether every name, value and question occurs only where it was inserted, all different.

        A statement and the filler around it could make another one between them.
        """
        pieces = [np.array(piece, dtype=np.int64) for piece in (*self.statements, self.end)]
        return len(set(self.words)) == len(self.words) and all(
            _occurrences(window, word) == sum(_occurrences(piece, word) for piece in pieces)
            for word in self.words
        )


def _facts(task: str, write: Writer, random: Random, room: int) -> Facts:
    """Draw the names and values of one sample, and state them as the task says."""
    if task == "key_value":
        return _key_value(write, random, room)
    chain = task == "variable_tracking"
    count = {"multi_key": KEYS, "variable_tracking": LINKS}.get(task, 1)
    names = [write.name(random) for _ in range(count)]
    if chain:
        sources = [write.value(random), *names[:-1]]
    else:  # The value of a copied statement is a passage.
        pieces = PASSAGE if task == "copy" else 1
        sources = [sum((write.value(random) for _ in range(pieces)), ()) for _ in names]
    questions = [write.question(name) for name in names]
    pairs = list(zip(questions, sources, strict=True))
    words = [*names, *(sources[:1] if chain else sources), *questions]
    stated = [question + source for question, source in pairs]
    return Facts(stated, pairs[::-1] if chain else pairs[:1], words)


def _key_value(write: Writer, random: Random, room: int) -> Facts:
    """Pairs until the text is full, or until there are no more names."""
    name, value = write.name(random), write.value(random)
    question = write.question(name)
    stated, names, values = [question + value], {name}, {value}
    left, misses = room - 2 * len(stated[0]), 0
    while misses < _MISSES:
        other, source = write.name(random), write.value(random)
        if other in names or source in values:
            misses += 1
            continue
        misses, statement = 0, write.question(other) + source
        left -= len(statement)
        if left < 1:
            break
        names.add(other)
        values.add(source)
        stated.append(statement)
    return Facts(stated, [(question, value)], [name, value, question])


# Where it is written.


def _sample(
    task: str, write: Writer, text: Int64[np.ndarray, "length_1"], random: Random, document: str
) -> tuple[Int64[np.ndarray, "d length_1"], list[bool]]:
    """The windows of one sample, and which tokens of their end are an answer's."""
    shown = task.replace("_", "-")
    for _ in range(_TRIES):
        facts = _facts(task, write, random, len(text))
        if facts.size >= len(text):
            raise InputError(
                f"a text of {len(text) - 1} tokens is too short for {shown}: its statements, "
                f"questions and answers alone take {facts.size}; use a longer length"
            )
        filler = text[: len(text) - facts.size]
        elsewhere = random.random(len(facts.statements) - 1)
        made = [_written(task, facts, filler, write, depth, elsewhere) for depth in DEPTHS]
        if all(map(facts.are_unmistakable, made)):
            answers = [part == 1 for pair in facts.asked for part in (0, 1) for _ in pair[part]]
            return np.stack(made), answers
    raise InputError(
        f"{_TRIES} times the names and values drawn for {shown} already occurred in the text of "
        f"{document}; use a larger vocabulary or a shorter length"
    )


def _written(
    task: str,
    facts: Facts,
    filler: Int64[np.ndarray, "f"],
    write: Writer,
    depth: float,
    elsewhere: np.ndarray,
) -> Int64[np.ndarray, "length_1"]:
    """Filler with the statements in their places, and the questions behind.

    The first statement is at the depth, those of a chain behind it in turn, others anywhere: each
    at the nearest break between lines, or at that very place where no break is near. Statements
    that are themselves the text follow each other, the first at its share of them.
    """
    size = len(filler)
    if task == "key_value":
        others = np.arange(1, len(facts.statements))
        order = np.insert(others, round(depth * len(others)), 0)
        offsets = np.full(len(order), size)
    else:
        chain = task == "variable_tracking"
        breaks = np.flatnonzero(np.append(write.breaks(filler), True))
        shares = depth + np.sort(elsewhere) * (1 - depth) if chain else elsewhere
        wanted = [round(share * size) for share in (depth, *shares)]
        nearest = [int(breaks[np.abs(breaks - place).argmin()]) for place in wanted]
        near = [abs(n - w) <= size * _SLACK for n, w in zip(nearest, wanted, strict=True)]
        offsets = np.where(near, nearest, wanted)
        if chain:
            offsets = np.maximum(offsets, offsets[0])
        order = np.argsort(offsets, kind="stable")
    *before, rest = np.split(filler, offsets[order])
    pieces: list[np.ndarray] = []
    for index, part in zip(order, before, strict=True):
        pieces += [part, np.array(facts.statements[index], dtype=np.int64)]
    return np.concatenate([*pieces, rest, np.array(facts.end, dtype=np.int64)])


def _occurrences(text: np.ndarray, word: Ids) -> int:
    if len(word) > len(text):
        return 0
    views = np.lib.stride_tricks.sliding_window_view(text, len(word))
    return int((views == np.array(word)).all(axis=1).sum())

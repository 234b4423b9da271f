"""Generated retrieval tasks: statements inside a long text, with questions at its end.

- `passkey`: one statement at a given depth.
- `multi_key`: four statements, the queried one at the depth, the others anywhere.
- `variable_tracking`: a chain of three (a = value, b = a, c = b) that begins at the depth. The
  questions follow it from c to the value, so every link must be found.
- `key_value`: a text of statements only. One is queried (as in arXiv 2307.03172).
- `copy`: one statement of a passage of four values, to be repeated as a whole.

A statement assigns a source (a value or another name) to a name. A question is the statement up to
its source, so a model answers by copying. The filler around statements is held-out text of one
document. The last answer ends the window. Source: RULER (arXiv 2404.06654), in lines of code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from normattn.errors import InputError, unknown_name
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import TokenData
from normattn.lab.data.windows import choose_windows, digest_of, window_length

TASKS = ("passkey", "multi_key", "variable_tracking", "key_value", "copy")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS, LINKS, PASSAGE = 4, 3, 4
Ids = tuple[int, ...]
Random = np.random.Generator

_MAX_TRIES = 100
_MAX_REPEATS = 50  # After so many repeated draws in a row, the names count as used up.
_MAX_SHIFT = 1 / 16  # A statement may move by this share of the text to the end of a line.
_CONSONANTS = "bcdfghjkmnpqrstvwxz"


@dataclass(frozen=True)
class RetrievalSet:
    """Samples of one task at one length, each at every depth.

    `windows` (n, D, length + 1): sample n with its queried statement at depth d (0: the beginning,
    1: right before the question). A sample has the same filler, names and values at every depth.
    `documents` (n): the source of the filler. `scored` (n, length): the targets that are tokens of
    an answer; target t is token t + 1.
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
        """SHA-256 of the windows and their scored targets."""
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
    """Return a task at `multiple`·L tokens: at most `max_windows` windows, at least one sample.

    A pure function of its arguments. Raises `InputError` for an unknown task, for generated tokens,
    or if a window is longer than every document or too short for the statements.
    """
    if task not in TASKS:
        raise unknown_name("retrieval task", task, TASKS)
    if data.tokeniser is None:
        raise InputError("retrieval writes lines of text, and generated tokens have none")
    length = window_length(train_length, multiple)
    count = min(max_windows, max(1, max_windows // len(DEPTHS)))
    held_out, encoder = data.split(split), StatementEncoder(data.tokeniser)
    # If long documents are few, each has several samples with other names.
    starts = choose_windows(held_out, length + 1, count, seed)
    windows, documents = np.zeros((count, len(DEPTHS), length + 1), dtype=np.int32), []
    scored = np.zeros((count, length), dtype=bool)
    for sample in range(count):
        document, first = (int(value) for value in starts[sample % len(starts)])
        text = held_out.window(document, first, length + 1).astype(np.int64)
        random = np.random.default_rng([seed, TASKS.index(task), length, sample])
        documents.append(held_out.names[document])
        windows[sample], answers = _make_sample(task, encoder, text, random, documents[-1])
        scored[sample, length - len(answers) :] = answers
    return RetrievalSet(task, length, train_length, windows, documents, scored)


class StatementEncoder:
    r"""Encodes assignments such as `\nqx7=4711`, each on its own line.

    A name is two consonants and a digit (3,610 names), a value four digits. There are no spaces,
    because a name after a space would have other tokens than at the beginning of a line. Pieces are
    encoded separately, so a name has the same tokens in statements and questions. `line_ends` are
    the tokens that begin with a line end: a statement may be inserted before one.
    """

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._encode = tokeniser.encode
        texts = (tokeniser.decode([i]) for i in range(tokeniser.vocab_size))
        self.line_ends = np.array([text.startswith("\n") for text in texts])

    def name(self, random: Random) -> Ids:
        """Draw a name."""
        letters = "".join(_CONSONANTS[i] for i in random.integers(len(_CONSONANTS), size=2))
        return (*self._encode(letters), *self._encode(str(random.integers(10))))

    def value(self, random: Random) -> Ids:
        """Draw a value."""
        return tuple(self._encode(str(random.integers(1000, 10000))))

    def question(self, name: Ids) -> Ids:
        """Return the tokens of a statement before its source."""
        return (*self._encode("\n"), *name, *self._encode("="))


class Facts(NamedTuple):
    """The statements of a sample: the queried one first, a chain in its order.

    `queries` are the questions at the end with their answers. `words` are the names, values and
    questions, which may occur only where they are inserted.
    """

    statements: list[Ids]
    queries: list[tuple[Ids, Ids]]
    words: list[Ids]


def _make_sample(
    task: str, encoder: StatementEncoder, text: np.ndarray, random: Random, document: str
) -> tuple[Int64[np.ndarray, "d length_1"], list[bool]]:
    """Return the windows of one sample, and which of their last tokens belong to an answer."""
    task_name = task.replace("_", "-")
    draw = _draw_key_value if task == "key_value" else partial(_draw_facts, task)
    for _ in range(_MAX_TRIES):
        facts = draw(encoder, random, len(text))
        end = [token for query in facts.queries for ids in query for token in ids]
        inserted = [np.array(ids, dtype=np.int64) for ids in (*facts.statements, end)]
        size = sum(map(len, inserted))
        if size >= len(text):
            raise InputError(
                f"a text of {len(text) - 1} tokens is too short for {task_name}: its statements, "
                f"questions and answers alone take {size}; use a longer length"
            )
        filler = text[: len(text) - size]
        depths = random.random(len(facts.statements) - 1)
        windows = [
            _insert(task, inserted, filler, encoder.line_ends[filler], depth, depths)
            for depth in DEPTHS
        ]
        # A statement and the filler next to it could form another word together.
        words = set(facts.words)
        expected = {word: sum(_occurrences(ids, word) for ids in inserted) for word in words}
        if len(words) == len(facts.words) and all(
            _occurrences(window, word) == expected[word] for window in windows for word in words
        ):
            answers = [i == 1 for query in facts.queries for i in (0, 1) for _ in query[i]]
            return np.stack(windows), answers
    raise InputError(
        f"{_MAX_TRIES} times the names and values drawn for {task_name} already occurred in the "
        f"text of {document}; use a larger vocabulary or a shorter length"
    )


def _draw_facts(task: str, encoder: StatementEncoder, random: Random, max_tokens: int) -> Facts:
    chain = task == "variable_tracking"
    count = {"multi_key": KEYS, "variable_tracking": LINKS}.get(task, 1)
    names = [encoder.name(random) for _ in range(count)]
    if chain:
        sources = [encoder.value(random), *names[:-1]]
    else:
        values = PASSAGE if task == "copy" else 1
        sources = [sum((encoder.value(random) for _ in range(values)), ()) for _ in names]
    questions = [encoder.question(name) for name in names]
    pairs = list(zip(questions, sources, strict=True))
    words = [*names, *(sources[:1] if chain else sources), *questions]
    statements = [question + source for question, source in pairs]
    return Facts(statements, pairs[::-1] if chain else pairs[:1], words)


def _draw_key_value(encoder: StatementEncoder, random: Random, max_tokens: int) -> Facts:
    """Draw statements until the text is full or the names are used up."""
    name, value = encoder.name(random), encoder.value(random)
    question = encoder.question(name)
    statements, names, values = [question + value], {name}, {value}
    free, repeats = max_tokens - 2 * len(statements[0]), 0
    while repeats < _MAX_REPEATS:
        distractor, source = encoder.name(random), encoder.value(random)
        if distractor in names or source in values:
            repeats += 1
            continue
        repeats, statement = 0, encoder.question(distractor) + source
        free -= len(statement)
        if free < 1:
            break
        names.add(distractor)
        values.add(source)
        statements.append(statement)
    return Facts(statements, [(question, value)], [name, value, question])


def _insert(
    task: str,
    inserted: list[np.ndarray],
    filler: np.ndarray,
    line_ends: np.ndarray,
    depth: float,
    depths: np.ndarray,
) -> Int64[np.ndarray, "length_1"]:
    """Insert the statements into the filler, and append the last of `inserted`, the questions.

    The first statement is at `depth`, the others at `depths`; a chain follows the first in order.
    A statement moves to the nearest line end if one is near. In `key_value` the statements are the
    text, and the first is at its share of them.
    """
    *statements, end = inserted
    size = len(filler)
    if task == "key_value":
        distractors = np.arange(1, len(statements))
        order = np.insert(distractors, round(depth * len(distractors)), 0)
        offsets = np.full(len(order), size)
    else:
        chain = task == "variable_tracking"
        candidates = np.flatnonzero(np.append(line_ends, True))
        others = depth + np.sort(depths) * (1 - depth) if chain else depths
        exact = [round(share * size) for share in (depth, *others)]
        nearest = [int(candidates[np.abs(candidates - offset).argmin()]) for offset in exact]
        near = [abs(n - e) <= size * _MAX_SHIFT for n, e in zip(nearest, exact, strict=True)]
        offsets = np.where(near, nearest, exact)
        if chain:
            offsets = np.maximum(offsets, offsets[0])
        order = np.argsort(offsets, kind="stable")
    *before, last = np.split(filler, offsets[order])
    pieces: list[np.ndarray] = []
    for index, piece in zip(order, before, strict=True):
        pieces += [piece, statements[index]]
    return np.concatenate([*pieces, last, end])


def _occurrences(text: np.ndarray, word: Ids) -> int:
    if len(word) > len(text):
        return 0
    views = np.lib.stride_tricks.sliding_window_view(text, len(word))
    return int((views == np.array(word)).all(axis=1).sum())

"""What each retrieval task states in a text and asks for at its end.

- `passkey`: one statement at a said depth, then the question.
- `multi_key`: four statements, the asked one at the depth, the others anywhere.
- `variable_tracking`: a chain of three (a = value, b = a, c = b) that begins at the depth; asked
  for c, then for what c is, and so to the value: every link must be found.
- `key_value`: nothing but statements, as many as fill the text; one of them is asked for, and all
  others are its distractors (as in "Lost in the middle", arXiv 2307.03172).
- `copy`: one statement of a passage four values long, to be repeated whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from normattn.lab.data.retrieval_statements import Ids, Statements

KEYS, LINKS, PASSAGE = 4, 3, 4
# So often in a row a pair is drawn that was drawn before: the names are used up.
_MISSES = 50


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

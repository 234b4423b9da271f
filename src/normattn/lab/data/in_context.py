r"""Many-shot classification in context: labelled texts, then one whose label is asked for.

A shot is a text of a relation corpus, `\n=>` and its label; prompts of any length end in the same
question behind ever more of the same shots, the labels balanced. A model answers by what the shots
show, so accuracy that rises with the length is learning in context. Source: many-shot in-context
learning (arXiv 2404.11018); the texts are the corpus's own (`data.relations`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64

from normattn.errors import InputError
from normattn.lab.data.evaluation_sets import window_length
from normattn.lab.data.relations import PYTHON_IMPORTS, RelationConfig, read_corpus
from normattn.lab.data.relations.documents import RelationCorpus, RelationDocument
from normattn.lab.data.splits import SplitName
from normattn.lab.data.tokeniser import SEPARATOR_ID, Tokeniser

Ids = tuple[int, ...]
LABELS = 4


@lru_cache(maxsize=1)
def labelled_texts(address: str = PYTHON_IMPORTS) -> RelationCorpus:
    """The texts of a relation corpus, read once a process; the default needs no download."""
    return read_corpus(RelationConfig(corpus=address))


@dataclass(frozen=True)
class Prompt:
    """`shots` labelled texts and a question, `context`; the `answers` there are, one `right`."""

    context: Ids
    answers: tuple[Ids, ...]
    right: int
    shots: int
    name: str


@dataclass(frozen=True)
class InContextSet:
    """Prompts at one length, each with every answer.

    `windows` (n, C, length + 1): sample n ended by answer c, filled up with separators behind it;
    `scored` (n, C, length): the targets that are tokens of that answer (target t is token t + 1).
    `right` (n): which answer is; `shots` (n): how many labelled texts stand before the question;
    `documents` (n): where the question is from.
    """

    length: int
    train_length: int
    windows: Int32[np.ndarray, "n c length_1"]
    scored: Bool[np.ndarray, "n c length"]
    right: Int64[np.ndarray, "n"]
    shots: Int64[np.ndarray, "n"]
    documents: list[str]
    protocol: Literal["in_context"] = "in_context"

    def __len__(self) -> int:
        return len(self.windows)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the windows, of what is scored in them and of what is right."""
        digest = hashlib.sha256()
        digest.update(repr((self.protocol, self.length, self.train_length)).encode())
        digest.update(repr((self.right.tolist(), self.documents)).encode())
        digest.update(np.ascontiguousarray(self.windows, dtype="<i4").tobytes())
        digest.update(np.packbits(self.scored, axis=2).tobytes())
        return digest.hexdigest()


def in_context_set(
    corpus: RelationCorpus,
    tokeniser: Tokeniser,
    train_length: int,
    multiple: int = 8,
    samples: int = 100,
    labels: int = LABELS,
    seed: int = 0,
    split: SplitName = "test",
) -> InContextSet:
    """`samples` prompts of at most `multiple`·L tokens. Arguments and errors: `prompts`."""
    length = window_length(train_length, multiple)
    made = prompts(corpus, tokeniser, length, samples, labels, seed, split)
    windows = np.full((len(made), labels, length + 1), SEPARATOR_ID, dtype=np.int32)
    scored = np.zeros((len(made), labels, length), dtype=bool)
    for sample, prompt in enumerate(made):
        start = len(prompt.context)
        for which, answer in enumerate(prompt.answers):
            end = start + len(answer)
            windows[sample, which, :end] = prompt.context + answer
            scored[sample, which, start - 1 : end - 1] = True
    return InContextSet(
        length,
        train_length,
        windows,
        scored,
        np.array([prompt.right for prompt in made], dtype=np.int64),
        np.array([prompt.shots for prompt in made], dtype=np.int64),
        [prompt.name for prompt in made],
    )


def prompts(
    corpus: RelationCorpus,
    tokeniser: Tokeniser,
    length: int,
    samples: int,
    labels: int = LABELS,
    seed: int = 0,
    split: SplitName = "test",
) -> list[Prompt]:
    """Questions of `split`, each behind as many shots of the training split as `length` + 1 hold.

    The `labels` most frequent labels take part, with the documents that have one label alone; both
    questions and shots have them in equal shares. A pure function of its arguments; with another
    length a sample has the same question and, from the question backwards, the same shots. No text
    is cut. Raises `InputError` where the corpus has too few such documents, and where a shot of
    each label, the question and the longest answer are more than the length.
    """
    if labels < 2 or samples < 1:
        raise InputError(f"many-shot needs 2 labels and 1 sample or more, got {labels}, {samples}")
    shown, asked = _single(corpus.splits["train"]), _single(corpus.splits[split])
    count = Counter({label: len(documents) for label, documents in shown.items() if label in asked})
    chosen = [label for label, _ in sorted(count.items(), key=lambda entry: (-entry[1], entry[0]))]
    if len(chosen) < labels:
        raise InputError(
            f"many-shot needs {labels} labels that documents of the train and {split} splits have "
            f"as their only one; the corpus has {len(chosen)}"
        )
    chosen = sorted(chosen[:labels])
    answers = tuple(_ids(tokeniser, f" {label}\n") for label in chosen)
    questions = {label: _shuffled(asked[label], [seed, at]) for at, label in enumerate(chosen)}
    made = []
    for sample in range(samples):
        right, turn = sample % labels, sample // labels
        about = questions[chosen[right]]
        question = about[turn % len(about)]
        end = _question(tokeniser, question)
        room = length + 1 - len(end) - max(map(len, answers))
        order = _order({label: shown[label] for label in chosen}, [seed, labels, sample])
        shots: list[Ids] = []
        for which, document in order:
            shot = _question(tokeniser, document) + answers[which] + _ids(tokeniser, "\n")
            room -= len(shot)
            if room < 0:
                break
            shots.insert(0, shot)
        if len(shots) < labels:
            raise InputError(
                f"a text of {length} tokens is too short for many-shot: it holds {len(shots)} "
                f"shots before the question {question.name}, and one of each of {labels} labels "
                "is the least; use a longer length"
            )
        context = (*(token for shot in shots for token in shot), *end)
        made.append(Prompt(context, answers, right, len(shots), question.name))
    return made


def _single(documents: Sequence[RelationDocument]) -> Mapping[str, list[RelationDocument]]:
    """The documents that have one label alone, by label."""
    by_label: dict[str, list[RelationDocument]] = {}
    for document in documents:
        if len(document.labels) == 1:
            by_label.setdefault(document.labels[0], []).append(document)
    return by_label


def _order(
    shown: Mapping[str, Sequence[RelationDocument]], seed: Sequence[int]
) -> Iterator[tuple[int, RelationDocument]]:
    """Rounds of one document of each label, until a label has none left."""
    random = np.random.default_rng(seed)
    left = [iter(_shuffled(documents, [*seed, at])) for at, documents in enumerate(shown.values())]
    for _ in range(min(map(len, shown.values()))):
        for which in random.permutation(len(left)):
            yield int(which), next(left[which])


def _shuffled(documents: Sequence[RelationDocument], seed: Sequence[int]) -> list[RelationDocument]:
    order = np.random.default_rng(seed).permutation(len(documents))
    return [documents[at] for at in order]


def _question(tokeniser: Tokeniser, document: RelationDocument) -> Ids:
    return _ids(tokeniser, f"{document.text}\n=>")


def _ids(tokeniser: Tokeniser, text: str) -> Ids:
    return tuple(tokeniser.encode(text))

"""Windows of a user's own text in a model's own tokens, and the pass key hidden in them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from normattn.errors import InputError
from normattn.lab.data.corpora import parse_corpus
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.data.tokeniser import cut_runs
from normattn.lab.data.windows import EvaluationSet

DEFAULT_TEXT = ("python-source",)
_BYTES_PER_TOKEN = 16  # More than any text of a language has; the whole is read where it is not.
_QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Texts:
    """Stretches of text, W of them, and what the tokeniser puts before every text.

    ids (W, longest + 1): window by window; a shorter length is a window's end, so that the last
    tokens are the same at every length.
    """

    ids: Int64[np.ndarray, "w t"]
    prefix: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def digest(self) -> str:
        """sha256 of the windows."""
        start = repr((self.prefix, self.ids.shape)).encode()
        return hashlib.sha256(start + np.ascontiguousarray(self.ids, "<i8").tobytes()).hexdigest()

    def window(self, index: int, length: int) -> Int64[np.ndarray, "length_1"]:
        """`length` + 1 tokens, the tokeniser's own first."""
        kept = length + 1 - len(self.prefix)
        return np.concatenate([np.array(self.prefix, np.int64), self.ids[index, -kept:]])

    def sets(self, index: int, length: int, train_length: int, segment: int) -> list[EvaluationSet]:
        """One window by every protocol that its length serves: last segment, all, by position."""
        windows, named = self.window(index, length)[None], [f"window {index}"]
        last = EvaluationSet(
            "last_segment", length, train_length, windows, named, start=length - segment
        )
        sets = [last]
        if length == train_length:
            sets.append(EvaluationSet("train_length", length, train_length, windows, named))
        if length == self.ids.shape[1] - 1:
            sets.append(EvaluationSet("by_position", length, train_length, windows, named))
        return sets


def prepare_texts(
    tokeniser: Any, text: Sequence[str], lengths: Sequence[int], windows: int, seed: int
) -> tuple[Texts, tuple[int, ...], tuple[str, ...]]:
    """(windows, the lengths that they can have, sentences on what there was no room for).

    The texts are joined and cut into windows of the longest length that they hold, chosen by the
    seed, none overlapping. Raises `InputError` where they are shorter than the shortest length.
    """
    ids = _encoded(tokeniser, text, windows * (lengths[-1] + 1))
    fitting = tuple(length for length in lengths if length < len(ids))
    if not fitting:
        raise InputError(
            f"the text ({', '.join(text)}) has {len(ids):,} tokens, and the shortest length, "
            f"{lengths[0]:,}, needs {lengths[0] + 1:,}: give more text with --text, or shorter "
            "--lengths"
        )
    size, notes = fitting[-1] + 1, []
    if len(fitting) < len(lengths):
        left = ", ".join(f"{length:,}" for length in lengths[len(fitting) :])
        notes.append(f"left out, because the text has {len(ids):,} tokens: --lengths {left}")
    count = min(windows, len(ids) // size)
    if count < windows:
        notes.append(
            f"{count} instead of {windows} windows: the text has {len(ids):,} tokens, and a window "
            f"takes {size:,}"
        )
    random = np.random.default_rng(seed)
    gaps = np.sort(random.integers(0, len(ids) - count * size + 1, count))
    starts = gaps + size * np.arange(count)
    rows = np.stack([ids[start : start + size] for start in starts])
    return Texts(rows, _prefix(tokeniser)), fitting, tuple(notes)


def passkey_set(
    tokeniser: Any, texts: Texts, index: int, length: int, train_length: int, seed: int
) -> RetrievalSet:
    """One window with a pass key of five digits in it, asked for at its end.

    The depth is the window's share: with W windows the middles of W equal parts. Raises
    `InputError` where the length has no room for it.
    """
    key = str(np.random.default_rng([seed, length, index]).integers(10000, 100000))
    stated = _plain(tokeniser, f"\nThe pass key is {key}. Remember it: the pass key is {key}.\n")
    end = _plain(tokeniser, f"{_QUESTION} {key}")
    asked = len(_common(end, _plain(tokeniser, _QUESTION)))
    room = length + 1 - len(texts.prefix) - len(stated) - len(end)
    if room < 1:
        raise InputError(
            f"a length of {length:,} tokens has no room for the pass key, which takes "
            f"{length + 2 - room}: take longer --lengths, or --no-passkey"
        )
    filler = texts.ids[index, -room:].tolist()
    depth = (index + 0.5) / len(texts)
    position = round(depth * room)
    ids = [*texts.prefix, *filler[:position], *stated, *filler[position:], *end]
    scored = np.arange(length) >= length - (len(end) - asked)
    return RetrievalSet(
        task="passkey",
        length=length,
        train_length=train_length,
        windows=np.array(ids, np.int32)[None, None],
        documents=[f"window {index}"],
        scored=scored[None],
        places=np.array([[len(texts.prefix) + position]]),
        depths=(depth,),
    )


def _encoded(tokeniser: Any, text: Sequence[str], wanted: int) -> Int64[np.ndarray, "n"]:
    """The tokens of all texts joined, at least as many as wanted where there are so many."""
    corpora = [parse_corpus(address) for address in text]
    for limit in (wanted * _BYTES_PER_TOKEN, None):
        ids: list[int] = []
        for corpus in corpora:
            for document in corpus.documents(limit):
                for piece in cut_runs(document.text):
                    ids += _plain(tokeniser, piece)
        if len(ids) >= wanted:
            break
    return np.array(ids, np.int64)


def _plain(tokeniser: Any, text: str) -> list[int]:
    # verbose=False: transformers would warn that a long text is longer than the model reads.
    ids: list[int] = tokeniser(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _prefix(tokeniser: Any) -> tuple[int, ...]:
    """What the tokeniser puts before a text: the beginning-of-text token of many models."""
    plain, whole = _plain(tokeniser, "a"), tokeniser("a")["input_ids"]
    places = [k for k in range(len(whole)) if whole[k : k + len(plain)] == plain]
    return tuple(whole[: places[0]]) if plain and places else ()


def _common(a: Sequence[int], b: Sequence[int]) -> Sequence[int]:
    """The tokens that both begin with."""
    count = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a[: min(len(a), len(b))] if count is None else a[:count]

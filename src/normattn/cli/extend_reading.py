"""Windows of a text in a model's own tokens, and what one window at one length gives.

Measured are losses, the pass key, seconds and memory.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from jaxtyping import Int64

from normattn.cli.extend_settings import ExtensionSettings
from normattn.errors import InputError
from normattn.hf.model_parts import model_parts
from normattn.lab.data.corpora import parse_corpus
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.data.tokeniser import cut_runs
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation.language_model import evaluate_cell
from normattn.lab.evaluation.retrieval import evaluate_retrieval
from normattn.lab.evaluation.scorer import Remembering, TokenScorer, identity
from normattn.lab.runs.environment import peak, resident
from normattn.lab.stats import Identity, digest, fact, identified, joined
from normattn.lab.studies.extend import KIND, PEAK, PREFILL, SECONDS

DEFAULT_TEXT = ("python-source",)
_BYTES_PER_TOKEN = 16  # More than any text of a language has; the whole is read where it is not.
_QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Texts:
    """Windows of text, W of them, and what the tokeniser puts before every text.

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
        """One window by each protocol of its length: last segment, all tokens, by position."""
        starts = {"last_segment": length - segment}
        if length == train_length:
            starts["train_length"] = 0
        if length == self.ids.shape[1] - 1:
            starts["by_position"] = 0
        window, named = self.window(index, length)[None], [f"window {index}"]
        return [
            EvaluationSet(protocol, length, train_length, window, named, start=start)
            for protocol, start in starts.items()
        ]


def prepare_texts(
    tokeniser: Any, text: Sequence[str], lengths: Sequence[int], windows: int, seed: int
) -> tuple[Texts, tuple[int, ...], tuple[str, ...]]:
    """(windows, the lengths that they can have, sentences on what there was no room for).

    The texts are joined and cut into windows of the longest length that they hold, chosen by the
    seed, none overlapping. Raises `InputError` where they are shorter than the shortest length.
    """
    ids = _tokens(tokeniser, text, windows * (lengths[-1] + 1))
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


def _tokens(tokeniser: Any, text: Sequence[str], wanted: int) -> Int64[np.ndarray, "n"]:
    """The tokens of all texts joined, at least as many as wanted where there are so many."""
    corpora = [parse_corpus(address) for address in text]
    for limit in (wanted * _BYTES_PER_TOKEN, None):
        documents = (document for corpus in corpora for document in corpus.documents(limit))
        pieces = (piece for document in documents for piece in cut_runs(document.text))
        ids = [token for piece in pieces for token in _plain(tokeniser, piece)]
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


def passkey_set(
    tokeniser: Any, texts: Texts, index: int, length: int, train_length: int, seed: int
) -> RetrievalSet:
    """One window with a pass key of five digits in it, asked for at its end.

    Of W windows, window k has the key in the middle of the k-th of W equal parts. Raises
    `InputError` where the length has no room for it.
    """
    key = str(np.random.default_rng([seed, length, index]).integers(10000, 100000))
    stated = _plain(tokeniser, f"\nThe pass key is {key}. Remember it: the pass key is {key}.\n")
    question, end = (_plain(tokeniser, text) for text in (_QUESTION, f"{_QUESTION} {key}"))
    # The answer is what follows the tokens that the question has with and without it.
    pairs = enumerate(zip(question, end, strict=False))
    asked = next((k for k, (a, b) in pairs if a != b), min(len(question), len(end)))
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
        depths=(depth,),
    )


class Unit(NamedTuple):
    """One piece of work: a window's text or its pass key ("key"), at a length, under a method."""

    kind: str
    method: str
    length: int
    window: int

    @property
    def key(self) -> str:
        """The name of its record."""
        return digest(*self)


@dataclass
class Reader:
    """Evaluates windows with a model in its present state, extended or not.

    `scorer` maps ids (1, T + 1) to losses; `tokeniser` writes the pass key.
    """

    model: Any
    tokeniser: Any
    scorer: TokenScorer
    texts: Texts
    settings: ExtensionSettings
    _resident: int = field(init=False)

    def __post_init__(self) -> None:
        gc.collect()
        self._resident = resident(self.model.device)

    def read(self, unit: Unit, whose: Identity) -> pl.DataFrame:
        """The measurements of a unit, whose data are all windows of the text.

        Raises `NormattnError` where a loss is not finite.
        """
        rows = self._key(unit, whose) if unit.kind == "key" else self._text(unit, whose)
        return rows.with_columns(
            pl.lit(KIND).alias("study"), pl.lit(self.settings.tokens).alias("data")
        )

    def _text(self, unit: Unit, whose: Identity) -> pl.DataFrame:
        settings, device = self.settings, self.model.device
        sets = self.texts.sets(unit.window, unit.length, settings.train_length, settings.segment)
        scorer, seconds = Remembering(self.scorer), list[float]()
        with peak(device, self._resident) as grown, _timed(self.model, seconds):
            frames = [evaluate_cell(scorer, each, whose) for each in sets]
        window = sets[0].documents[0]
        costs = [fact(SECONDS, seconds[0], unit=window)]
        costs += [fact(PEAK, most, unit=window) for most in grown]
        on: dict[str, str | int] = {"device": str(device), "threads": torch.get_num_threads()}
        prefill = replace(identity(whose, sets[0], **on), protocol=PREFILL)
        return joined([*frames, identified(prefill, costs)])

    def _key(self, unit: Unit, whose: Identity) -> pl.DataFrame:
        hidden = self.hidden(unit.length, unit.window)
        rows = evaluate_retrieval(self.scorer, hidden, whose)
        # Each window has a depth of its own: no axis that windows share, but a fact of the window.
        return rows.with_columns(
            pl.lit("").alias("axis"),
            pl.lit(None, pl.Float64).alias("bin"),
            pl.lit(None, pl.Float64).alias("bin_end"),
            pl.lit(hidden.documents[0]).alias("unit"),
            pl.lit(hidden.depths[0]).alias("factor.depth"),
        )

    def hidden(self, length: int, index: int) -> RetrievalSet:
        """A window with its pass key; `InputError` where the length has no room for it."""
        train_length, seed = self.settings.train_length, self.settings.seed
        return passkey_set(self.tokeniser, self.texts, index, length, train_length, seed)


@contextmanager
def _timed(model: Any, seconds: list[float]) -> Iterator[None]:
    """Append the seconds of every pass of the decoder."""
    decoder, begun = model_parts(model).decoder, [0.0]

    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    def before(*_: object) -> None:
        begun[0] = now()

    def after(*_: object) -> None:
        seconds.append(now() - begun[0])

    hooks = (decoder.register_forward_pre_hook(before), decoder.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

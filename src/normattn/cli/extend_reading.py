"""Windows of text in a model's tokens, and the evaluation of one: losses, pass key and cost."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from normattn.lab.evaluation.language_model import evaluate_cell, evaluate_retrieval
from normattn.lab.evaluation.scorer import CachedScorer, TokenScorer, set_identity
from normattn.lab.runs.environment import allocated_memory, record_peak_memory
from normattn.lab.stats import Identity, concat, digest, scalar, with_identity
from normattn.lab.studies.extend import KIND, PEAK, PREFILL, SECONDS

DEFAULT_TEXT = ("python-source",)
_BYTES_PER_TOKEN = 16  # an upper bound for natural text; if it is too low, the whole text is read
_QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Texts:
    """W windows of text, and the tokens that the tokeniser puts before every text.

    `ids` are (W, longest + 1). A shorter length uses the end of a window, so that the last tokens
    are the same at every length.
    """

    ids: Int64[np.ndarray, "w t"]
    prefix: tuple[int, ...]

    @property
    def digest(self) -> str:
        """sha256 of the windows."""
        start = repr((self.prefix, self.ids.shape)).encode()
        return hashlib.sha256(start + np.ascontiguousarray(self.ids, "<i8").tobytes()).hexdigest()

    def window(self, index: int, length: int) -> Int64[np.ndarray, "length_1"]:
        """`length` + 1 tokens, beginning with the prefix."""
        count = length + 1 - len(self.prefix)
        return np.concatenate([np.array(self.prefix, np.int64), self.ids[index, -count:]])


def prepare_texts(
    tokeniser: Any, text: Sequence[str], lengths: Sequence[int], windows: int, seed: int
) -> tuple[Texts, tuple[int, ...], tuple[str, ...]]:
    """(windows, the lengths that fit, notes on lengths and windows that do not fit).

    The texts are joined, and windows of the longest fitting length are drawn by the seed, without
    overlap. Raises `InputError` where the text is shorter than the shortest length.
    """
    ids = _tokens(tokeniser, text, windows * (lengths[-1] + 1))
    fitting = tuple(length for length in lengths if length < len(ids))
    if not fitting:
        raise InputError(
            f"the text ({', '.join(text)}) has {len(ids):,} tokens, and the shortest length, "
            f"{lengths[0]:,}, needs {lengths[0] + 1:,}: give more text with --text, or a "
            "shorter length"
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
    # The tokens before a text, such as a beginning-of-text token.
    letter, full = _encode(tokeniser, "a"), tokeniser("a")["input_ids"]
    places = [k for k in range(len(full)) if full[k : k + len(letter)] == letter]
    prefix = tuple(full[: places[0]]) if letter and places else ()
    return Texts(rows, prefix), fitting, tuple(notes)


def _tokens(tokeniser: Any, text: Sequence[str], wanted: int) -> Int64[np.ndarray, "n"]:
    """The tokens of all texts joined, at least `wanted` if there are as many."""
    corpora = [parse_corpus(address) for address in text]
    for limit in (wanted * _BYTES_PER_TOKEN, None):
        documents = (document for corpus in corpora for document in corpus.documents(limit))
        pieces = (piece for document in documents for piece in cut_runs(document.text))
        ids = [token for piece in pieces for token in _encode(tokeniser, piece)]
        if len(ids) >= wanted:
            break
    return np.array(ids, np.int64)


def _encode(tokeniser: Any, text: str) -> list[int]:
    # verbose=False: transformers would warn that a long text is longer than the model reads.
    ids: list[int] = tokeniser(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def passkey_set(
    tokeniser: Any, texts: Texts, index: int, length: int, train_length: int, seed: int
) -> RetrievalSet:
    """One window with a pass key of five digits and a question for it at the end.

    Window k of W has the key in the middle of the k-th of W equal parts. Raises `InputError` where
    the length is too short.
    """
    key = str(np.random.default_rng([seed, length, index]).integers(10000, 100000))
    stated = _encode(tokeniser, f"\nThe pass key is {key}. Remember it: the pass key is {key}.\n")
    question, end = (_encode(tokeniser, text) for text in (_QUESTION, f"{_QUESTION} {key}"))
    # The answer begins where the tokens with and without it differ.
    pairs = enumerate(zip(question, end, strict=False))
    answer = next((k for k, (a, b) in pairs if a != b), min(len(question), len(end)))
    room = length + 1 - len(texts.prefix) - len(stated) - len(end)
    if room < 1:
        raise InputError(
            f"a length of {length:,} tokens has no room for the pass key, which takes "
            f"{length + 2 - room}: take longer --lengths, or --no-passkey"
        )
    filler, depth = texts.ids[index, -room:].tolist(), (index + 0.5) / len(texts.ids)
    position = round(depth * room)
    ids = [*texts.prefix, *filler[:position], *stated, *filler[position:], *end]
    scored = np.arange(length) >= length - (len(end) - answer)
    return RetrievalSet(
        task="passkey",
        length=length,
        train_length=train_length,
        windows=np.array(ids, np.int32)[None, None],
        documents=[f"window {index}"],
        scored=scored[None],
        depths=(depth,),
    )


class Cell(NamedTuple):
    """One evaluation: a window's text ("text") or pass key ("key"), at a length, with a method."""

    kind: str
    method: str
    length: int
    window: int

    @property
    def key(self) -> str:
        """The key of its stored measurements."""
        return digest(*self)


class Evaluator:
    """Evaluates windows with a model in its current state, extended or not.

    `scorer` maps ids (1, T + 1) to losses; `tokeniser` encodes the pass key.
    """

    def __init__(
        self,
        model: Any,
        tokeniser: Any,
        scorer: TokenScorer,
        texts: Texts,
        settings: ExtensionSettings,
    ) -> None:
        self.model, self.tokeniser, self.scorer = model, tokeniser, scorer
        self.texts, self.settings = texts, settings
        gc.collect()
        self._resident = allocated_memory(model.device)

    def evaluate(self, cell: Cell, identity: Identity) -> pl.DataFrame:
        """The measurements of a cell; raises `NormattnError` where a loss is not finite."""
        if cell.kind == "text":
            measured = self._evaluate_text(cell, identity)
        else:
            window = self.passkey_window(cell.length, cell.window)
            # Each window has another depth, so depth is a factor and not an axis that they share.
            measured = evaluate_retrieval(self.scorer, window, identity).with_columns(
                pl.lit("").alias("axis"),
                pl.lit(None, pl.Float64).alias("bin"),
                pl.lit(None, pl.Float64).alias("bin_end"),
                pl.lit(window.documents[0]).alias("unit"),
                pl.lit(window.depths[0]).alias("factor.depth"),
            )
        return measured.with_columns(
            pl.lit(KIND).alias("study"), pl.lit(self.settings.tokens).alias("data")
        )

    def _evaluate_text(self, cell: Cell, identity: Identity) -> pl.DataFrame:
        """The last segment, at the training length all tokens, at the longest by position; cost."""
        settings, device, length = self.settings, self.model.device, cell.length
        starts = {"last_segment": length - settings.segment}
        if length == settings.train_length:
            starts["train_length"] = 0
        if length == settings.passes[-1]:
            starts["by_position"] = 0
        ids, unit = self.texts.window(cell.window, length)[None], f"window {cell.window}"
        sets = [
            EvaluationSet(protocol, length, settings.train_length, ids, [unit], start=start)
            for protocol, start in starts.items()
        ]
        scorer, seconds = CachedScorer(self.scorer), list[float]()
        with record_peak_memory(device, self._resident) as peaks, _timed(self.model, seconds):
            frames = [evaluate_cell(scorer, each, identity) for each in sets]
        costs = [scalar(SECONDS, seconds[0], unit=unit)]
        costs += [scalar(PEAK, size, unit=unit) for size in peaks]
        place: dict[str, str | int] = {"device": str(device), "threads": torch.get_num_threads()}
        prefill = replace(set_identity(identity, sets[0], **place), protocol=PREFILL)
        return concat([*frames, with_identity(prefill, costs)])

    def passkey_window(self, length: int, index: int) -> RetrievalSet:
        """A window with its pass key; `InputError` where the length is too short."""
        train_length, seed = self.settings.train_length, self.settings.seed
        return passkey_set(self.tokeniser, self.texts, index, length, train_length, seed)


@contextmanager
def _timed(model: Any, seconds: list[float]) -> Iterator[None]:
    """Append the seconds of every forward of the decoder."""

    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    def before(*_: object) -> None:
        seconds.append(-now())

    def after(*_: object) -> None:
        seconds[-1] += now()

    decoder = model_parts(model).decoder
    hooks = (decoder.register_forward_pre_hook(before), decoder.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

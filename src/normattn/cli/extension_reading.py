"""One window read at one length: losses, the pass key, seconds and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

from normattn.cli.extension_settings import ExtensionSettings
from normattn.cli.extension_texts import Texts, passkey_set
from normattn.errors import NormattnError
from normattn.hf.model_parts import model_parts
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.evaluation import TokenScorer, evaluate_cell, evaluate_retrieval
from normattn.lab.evaluation.scorer import identity
from normattn.lab.runs.environment import peak, resident
from normattn.lab.stats import Identity, digest, fact, identified, joined
from normattn.lab.studies.extend import KIND, PEAK, PREFILL, SECONDS

_MEMORY_WORDS = ("not enough memory", "out of memory", "can't allocate memory")


class OutOfMemoryError(NormattnError):
    """A length did not fit into the memory."""


class Unit(NamedTuple):
    """Which unit: a window's text or its pass key ("key"), at a length, under a method."""

    kind: str
    method: str
    length: int
    window: int

    @property
    def key(self) -> str:
        """Under which its measurements are kept."""
        return digest(*self)


@dataclass
class Reader:
    """Reads windows with a model as it is when it is called, extended or not.

    `scorer` maps ids (1, T + 1) to losses; `tokeniser` writes the pass key.
    """

    model: Any
    tokeniser: Any
    scorer: TokenScorer
    texts: Texts
    settings: ExtensionSettings
    _held: int | None = field(init=False)

    def __post_init__(self) -> None:
        gc.collect()
        self._held = resident(self.model.device)

    def read(self, unit: Unit, whose: Identity) -> pl.DataFrame:
        """The measurements of a unit, whose data are all windows of the text.

        Raises `OutOfMemoryError`, and `NormattnError` where a loss is not finite.
        """
        with _out_of_memory():
            rows = self._key(unit, whose) if unit.kind == "key" else self._text(unit, whose)
        return rows.with_columns(
            pl.lit(KIND).alias("study"), pl.lit(self.settings.tokens).alias("data")
        )

    def _text(self, unit: Unit, whose: Identity) -> pl.DataFrame:
        settings, device = self.settings, self.model.device
        sets = self.texts.sets(unit.window, unit.length, settings.train_length, settings.segment)
        scorer, seconds = _once(self.scorer), list[float]()
        with peak(device, self._held) as grown, _timed(self.model, seconds):
            frames = [evaluate_cell(scorer, evaluation_set, whose) for evaluation_set in sets]
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


def _once(scorer: TokenScorer) -> TokenScorer:
    """The protocols of one window ask for the same tokens: they are read once."""
    known: list[Any] = []

    def score(ids: Tensor) -> Any:
        if not known or not torch.equal(known[0], ids):
            known[:] = [ids, scorer(ids)]
        return known[1]

    return score


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

    hooks: list[Callable[[], object]] = [
        decoder.register_forward_pre_hook(before).remove,
        decoder.register_forward_hook(after).remove,
    ]
    try:
        yield
    finally:
        for remove in hooks:
            remove()


@contextmanager
def _out_of_memory() -> Iterator[None]:
    """Every way in which memory ends, as one error."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemoryError("out of memory") from error
    except RuntimeError as error:
        # torch's allocator of the processor has no type of its own for this.
        if not any(words in str(error).lower() for words in _MEMORY_WORDS):
            raise
        raise OutOfMemoryError("out of memory") from error

"""Two small trained models, shipped with the package, read eight times their training length.

One has plain RoPE, the other normalises its keys as well (KeyNorm). They differ in nothing else:
six layers, one head of 128, 1.4 million parameters, trained on 128 tokens at a time. The text is a
snapshot of this package's source, which neither has seen. `normattn demo` prints what `read`
measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from normattn.errors import InputError
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.report.figures import Curves, Line, Panel, Point
from normattn.lab.report.page import PageContext
from normattn.lab.report.tables import Cell, Column, FilledTable, Row
from normattn.lab.stats import Estimate
from normattn.models import CausalLM, load_model

FOLDER = Path(__file__).parent / "demo_models"
TRAINED = 128
LENGTH = 8 * TRAINED
MODELS = {"Baseline": "plain RoPE", "KNA": "KeyNorm"}
METHODS = {"": "unmodified", "YaRN(factor=8)": "YaRN", "ReRoPE": "ReRoPE"}
_BIN = TRAINED // 2


@dataclass(frozen=True)
class Reading:
    """Which next tokens one model predicted right, in windows of `LENGTH` tokens."""

    model: str
    method: str
    correct: Bool[np.ndarray, "windows length"]

    @property
    def label(self) -> str:
        """The model and the method as a label."""
        method = METHODS[self.method]
        return f"{MODELS[self.model]}, {method if not self.method else f'with {method}'}"

    @property
    def near(self) -> float:
        """Accuracy in % over the first `TRAINED` tokens."""
        return 100 * float(self.correct[:, :TRAINED].mean())

    @property
    def far(self) -> float:
        """Accuracy in % over the last `TRAINED` tokens."""
        return 100 * float(self.correct[:, -TRAINED:].mean())


def demo_model(name: str) -> CausalLM:
    """A shipped model by the name of its score, "Baseline" or "KNA", in float32 and eval mode."""
    if name not in MODELS:
        raise InputError(f"there is no demo model {name!r}; there are {' and '.join(MODELS)}")
    return load_model(FOLDER / name).float().eval()


def demo_windows(text: str | None = None, windows: int = 24) -> Int64[np.ndarray, "windows tokens"]:
    """The first disjoint windows of `LENGTH` + 1 tokens of a text (default: the shipped text).

    Raises `InputError` where the text is shorter than one window.
    """
    tokeniser = Tokeniser.load(FOLDER / "tokeniser.json")
    ids = tokeniser.encode(demo_text() if text is None else text)
    count = min(windows, len(ids) // (LENGTH + 1))
    if count < 1:
        raise InputError(
            f"the text has {len(ids):,} tokens; a window needs {LENGTH + 1:,} "
            f"(about {4 * LENGTH:,} characters)"
        )
    return np.asarray(ids[: count * (LENGTH + 1)], dtype=np.int64).reshape(count, LENGTH + 1)


def demo_text() -> str:
    """The shipped text: Python source of this package, 24 windows long."""
    return (FOLDER / "text.txt").read_text(encoding="utf-8")


def read(
    windows: Int64[np.ndarray, "windows tokens"],
    progress: Callable[[Reading], None] = lambda reading: None,
) -> list[Reading]:
    """Evaluate both models on the windows: unmodified, with YaRN, and with ReRoPE."""
    readings = []
    for name in MODELS:
        model = demo_model(name)
        for method in METHODS:
            readings.append(Reading(name, method, correct_tokens(model, method, windows)))
            progress(readings[-1])
    return readings


def correct_tokens(
    model: CausalLM, method: str, windows: Int64[np.ndarray, "windows tokens"]
) -> Bool[np.ndarray, "windows length"]:
    """Which next tokens the model predicts right under a method ("": unmodified)."""
    spec = model.config.score.with_method(method).resolve(train_length=TRAINED)
    rows = []
    with torch.inference_mode(), model.using(spec):
        for row in torch.from_numpy(windows):
            predicted = model(row[None, :-1])[0].argmax(-1)
            rows.append((predicted == row[1:]).numpy())
    return np.stack(rows)


def in_short(readings: Sequence[Reading]) -> tuple[str, ...]:
    """Summarise the six rows in sentences."""
    far = {(row.model, row.method): row.far for row in readings}
    near = {row.model: row.near for row in readings if not row.method}
    yarn, rerope = list(METHODS)[1:]
    plain, keys = MODELS
    return (
        f"Plain RoPE, trained on {TRAINED} tokens, predicts {near[plain]:.0f} % of the first "
        f"{TRAINED} tokens right, and {far[plain, '']:.0f} % of the last {TRAINED} of {LENGTH:,}.",
        f"With YaRN it predicts {far[plain, yarn]:.0f} % of the last tokens right, with ReRoPE "
        f"{far[plain, rerope]:.0f} %.",
        f"KeyNorm does not collapse without a method: {near[keys]:.0f} % at the start, "
        f"{far[keys, '']:.0f} % at the end. With YaRN it has {far[keys, yarn]:.0f} %: later tokens "
        "are easier where a model can use the text before them.",
    )


def page(readings: Sequence[Reading], text: str, command: str) -> PageContext:
    """The report: the sentences, the curves by position, and the table of six rows."""
    return PageContext(
        title="Past the training length",
        question=f"What happens when a model trained on {TRAINED} tokens is given {LENGTH:,}, and "
        "what rescues it?",
        summary=in_short(readings),
        settings={
            "models": "six layers, one head of 128, 1.4 million parameters, one seed",
            "text": text,
            "tokens": f"{len(readings[0].correct)} × {LENGTH:,}",
        },
        tables=(_table(readings),),
        figures=(_curves(readings),),
        notes=("One model of each kind: an example, not a measurement with error bars.",),
        command=command,
    )


def _table(readings: Sequence[Reading]) -> FilledTable:
    columns = (
        Column("model", "model"),
        Column("near", f"tokens 1 to {TRAINED}, % right"),
        Column("far", f"tokens {LENGTH - TRAINED + 1} to {LENGTH:,}, % right"),
    )
    rows = tuple(Row(r.label, {"row": r.model}) for r in readings)
    cells = tuple((Cell(r.label), _percent(r.near), _percent(r.far)) for r in readings)
    return FilledTable("demo", "Next tokens predicted right", "", (), columns, rows, cells)


def _percent(value: float) -> Cell:
    return Cell(f"{value:.1f}", Estimate(value, value, value, units=1))


def _curves(readings: Sequence[Reading]) -> Curves:
    panels = [
        Panel(
            label,
            tuple(
                Line(METHODS[r.method], tuple(_points(r.correct)), METHODS[r.method])
                for r in readings
                if r.model == name
            ),
            "position in the text",
            "next tokens right, %",
            train_length=TRAINED,
        )
        for name, label in MODELS.items()
    ]
    title = f"Accuracy by position, trained on {TRAINED} tokens"
    return Curves("demo", title, tuple(panels), first=tuple(METHODS.values()))


def _points(correct: NDArray[np.bool_]) -> Iterator[Point]:
    """The accuracy of every `_BIN` tokens, at their middle."""
    for start in range(0, correct.shape[1], _BIN):
        yield Point(start + _BIN / 2, 100 * float(correct[:, start : start + _BIN].mean()))

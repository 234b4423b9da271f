"""What to take for longer texts, in plain words, with the numbers that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normattn.reports.cells import RowKey
from normattn.reports.extension_cells import LAST_LOSS, Readings
from normattn.reports.markdown import shown
from normattn.reports.metrics import Estimate

LEAST_GAIN = 0.01
"""Nats per token, 1 % of perplexity: a smaller gain is no reason to change a model."""


@dataclass(frozen=True)
class Advice:
    """`sentences` to be read in turn; `method` as it was asked for, None for the model as it is."""

    sentences: tuple[str, ...]
    method: str | None


@dataclass(frozen=True)
class _Best:
    """The lowest loss at a length, and whether it is better than the model's as it is."""

    length: int
    row: RowKey
    loss: Estimate
    gain: Estimate | None
    rivals: tuple[RowKey, ...]

    @property
    def better(self) -> bool:
        """Surely lower, and by enough to matter."""
        return self.sure and self.gain is not None and self.gain.value <= -LEAST_GAIN

    @property
    def sure(self) -> bool:
        """Surely lower, by however little."""
        return self.gain is not None and self.gain.below_zero


def advise(readings: Readings, lengths: Sequence[int]) -> Advice:
    """The method with the lowest loss on the last segment, for the longest length that was read and
    then length by length.

    It is better than the model as it is where the interval of their paired difference lies below 0
    and the difference is at least `LEAST_GAIN`.
    """
    plain = readings.plain
    found = [best for best in (_best(readings, length) for length in lengths) if best is not None]
    if plain is None or not found:
        return Advice(("No length was read by the model as it is: nothing can be advised.",), None)
    last = found[-1]
    sentences = [_headline(readings, found)]
    sentences += [_sentence(readings, best) for best in found]
    if last.gain is not None and last.gain.low is None:
        sentences.append(
            "One window has no interval: this is one reading, not a finding; take more --windows."
        )
    if last.better:
        sentences += _cost(readings, last.row)
    return Advice(tuple(sentences), readings.methods[last.row] if last.better else None)


def name_of(row: RowKey) -> str:
    """The method with its parameters, as it can be typed."""
    return row.spec


def spoken(length: int) -> str:
    """8192 as `8k`, 12000 as `12,000`."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def _best(readings: Readings, length: int) -> _Best | None:
    losses = {row: readings.value(row, LAST_LOSS, length) for row in readings.rows}
    known = {row: loss for row, loss in losses.items() if loss is not None}
    if not known:
        return None
    row = min(known, key=lambda each: known[each].value)
    rivals = []
    for other in known:
        apart = readings.against(other, row, LAST_LOSS, length)
        if other != row and apart is not None and not apart.above_zero:
            rivals.append(other)
    gain = readings.against(row, readings.plain, LAST_LOSS, length) if row.method else None
    return _Best(length, row, known[row], gain, tuple(rivals))


def _headline(readings: Readings, found: Sequence[_Best]) -> str:
    last = found[-1]
    if not last.better:
        return (
            f"No method is clearly better than the model as it is at {spoken(last.length)} tokens."
        )
    span = _span(found, last.row.train_length)
    return f"{name_of(last.row)}: {span} tokens; {_tax(readings, last.row)}."


def _span(found: Sequence[_Best], train_length: int) -> str:
    """At which lengths the method that is best at the last of `found` is so without a gap."""
    last = found[-1]
    others = [best.length for best in found if best.row != last.row or not best.better]
    since = [best.length for best in found if best.length > max(others, default=0)]
    # Within the training length nobody needs a method: "up to" is said of what lies beyond it.
    if max(others, default=0) <= train_length:
        return f"best up to {spoken(last.length)}"
    if len(since) == 1:
        return f"best at {spoken(last.length)}"
    return f"best from {spoken(since[0])} to {spoken(last.length)}"


def _tax(readings: Readings, row: RowKey) -> str:
    tax, at = readings.tax(row), spoken(row.train_length)
    if tax is None:
        return f"what it costs at {at} was not read"
    if tax.above_zero:
        return f"costs {tax.value:.1f} % of loss at {at}"
    if tax.below_zero:
        return f"costs nothing at {at}, where the loss falls by {-tax.value:.1f} %"
    if tax.low is None:
        return f"the loss at {at} changes by {tax.value:+.1f} % in one window"
    return f"costs nothing that is sure at {at} (loss {shown(tax, signed=True)} %)"


def _sentence(readings: Readings, best: _Best) -> str:
    start = f"At {spoken(best.length)} tokens "
    plain = readings.plain
    if plain is None or (own := readings.value(plain, LAST_LOSS, best.length)) is None:
        return (
            f"{start}the model as it is was not read; lowest: {name_of(best.row)}, "
            f"{shown(best.loss, digits=3)} nats."
        )
    if best.gain is None:
        return f"{start}no method is better than the model as it is, {shown(own, digits=3)} nats."
    numbers = (
        f"{shown(best.loss, digits=3)} nats against {shown(own, digits=3)} as it is, "
        f"difference {shown(best.gain, signed=True, digits=3)}"
    )
    if not best.better:
        why = f"by less than {LEAST_GAIN:g} nats" if best.sure else "but not surely lower"
        return f"{start}the lowest loss is {name_of(best.row)}'s, {why}: {numbers}."
    others = [name_of(row) for row in best.rivals if row.method]
    tied = f" Not told apart from it: {', '.join(others)}." if others else ""
    return f"{start}{name_of(best.row)} is best: {numbers}.{tied}"


def _cost(readings: Readings, row: RowKey) -> list[str]:
    tax = readings.tax(row)
    if tax is None or not tax.above_zero:
        return []
    at = spoken(row.train_length)
    return [
        f"Texts of up to {at} tokens are read better by the model as it is: switch it off there."
    ]

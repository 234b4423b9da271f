"""Recommend a method for longer text, in sentences with the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from normattn.lab.report.tables import format_estimate
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.estimate import LEAST_UNITS
from normattn.lab.studies.lm_report import ranked
from normattn.score.spec import UNMODIFIED

LEAST_GAIN = 0.01
"""The smallest gain that justifies changing a model: nats per token, 1 % of perplexity."""
LAST, TRAIN = "last_segment", "train_length"
LOSS = Metric("loss")


@dataclass(frozen=True)
class Advice:
    """The recommendation as sentences; `method` as typed, None for the unmodified model."""

    sentences: tuple[str, ...]
    method: str | None


@dataclass(frozen=True)
class _Best:
    length: int
    method: str
    loss: Estimate
    gain: Estimate | None

    @property
    def better(self) -> bool:
        """Whether the interval of the gain is below 0, and the gain at least `LEAST_GAIN`."""
        return self.gain is not None and self.gain.below_zero and self.gain.value <= -LEAST_GAIN


def advise(view: View) -> Advice:
    """Recommend the method with the lowest loss on the same final tokens at the longest length.

    A method is better than the unmodified model where the interval of their paired difference is
    below 0 and the gain is at least `LEAST_GAIN`. More sentences name the best method per length.
    """
    winners = [best for best in (_best(view, length) for length in lengths_of(view)) if best]
    if not winners or "" not in methods_of(view):
        return Advice(
            ("No method can be recommended: the unmodified model was not evaluated.",), None
        )
    last, trained = winners[-1], format_length(train_length(view))
    cost = cost_at_train_length(view, {"method": last.method})
    sentences = [_headline(view, winners, cost), *map(_sentence, reversed(winners))]
    if last.loss.units < LEAST_UNITS:
        window_count = _windows(last.loss.units)
        sentences.append(f"With {window_count}, no result is reliable: take more.")
    if last.better and cost is not None and cost.above_zero:
        sentences.append(f"Up to {trained} tokens the loss is lower without the method.")
    return Advice(tuple(sentences), last.method if last.better else None)


def _best(view: View, length: int) -> _Best | None:
    last = LOSS.at(protocol=LAST, length=length)
    losses = {method: view.estimate(last.at(method=method)) for method in methods_of(view)}
    known = {method: estimate for method, estimate in losses.items() if estimate is not None}
    if not known:
        return None
    best = min(known, key=lambda method: known[method].value)
    gain = view.estimate(last.at(method=best) - last.at(method=""))
    return _Best(length, best, known[best], gain)


def _headline(view: View, winners: Sequence[_Best], cost: Estimate | None) -> str:
    """The recommended method, the lengths where it is best, and its cost on short text."""
    last, trained = winners[-1], train_length(view)
    if not last.better:
        length = format_length(last.length)
        return f"No method is clearly better than the unmodified model at {length} tokens."
    name, with_parameters = name_of(last.method), resolved(view, {"method": last.method})
    name += f" ({with_parameters})" if with_parameters != name else ""
    others = [b.length for b in winners if b.method != last.method or not b.better]
    since = min(b.length for b in winners if b.length > max(others, default=0))
    # "up to" refers to lengths beyond the training length, as shorter text needs no method.
    span = "at" if since == last.length else f"from {format_length(since)} to"
    span = "up to" if max(others, default=0) <= trained else span
    costs = "its cost on short text was not measured"
    if cost is not None:
        costs = f"loss at {format_length(trained)} {format_estimate(cost, signed=True)} %"
    return f"{name}: best {span} {format_length(last.length)} tokens; {costs}."


def _sentence(best: _Best) -> str:
    """The lowest loss at a length, and whether it is clearly below the unmodified model's."""
    lowest = f"{name_of(best.method)}, {format_estimate(best.loss, digits=3)} nats"
    if best.gain is not None:
        lowest += f", {format_estimate(best.gain, signed=True, digits=3)} to the unmodified model"
    if best.loss.units < LEAST_UNITS:
        lowest += f"; {_windows(best.loss.units)}, so no interval"
    elif best.gain is not None and not best.better:
        lowest += ", too small or uncertain a gain"
    return f"Lowest loss at {format_length(best.length)} tokens: {lowest}."


def _windows(count: int) -> str:
    return "one window" if count == 1 else f"{count} windows"


# Methods and lengths


def methods_of(view: View) -> list[str]:
    """The evaluated methods, the unmodified model first."""
    return ranked(view.values("method"), ("",))


def lengths_of(view: View) -> list[int]:
    """The evaluated lengths, ascending."""
    return sorted(view.values("length", {"protocol": LAST}))


def train_length(view: View) -> int:
    """The model's training length."""
    return int(view.frame["train_length"][0])


def home_length(view: View) -> int:
    """The longest evaluated length up to the training length, or else the shortest."""
    lengths, trained = lengths_of(view), train_length(view)
    return max((length for length in lengths if length <= trained), default=min(lengths))


def name_of(method: str) -> str:
    """The method as it was typed."""
    return method or UNMODIFIED


def resolved(view: View, where: Where) -> str:
    """The method of the rows `where`, written with all its parameters."""
    return str(view.only_value("score", where) or where["method"])


def format_length(length: int) -> str:
    """8192 as `8k`, 12000 as `12,000`."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def cost_at_train_length(view: View, where: Where) -> Estimate | None:
    """The increase in loss at the training length, in percent, by the method of the rows `where`.

    Paired over windows; the interval does not include the uncertainty of the unmodified model's
    loss. None where either loss was not measured.
    """
    at_l = LOSS.at(protocol=TRAIN)
    base = view.estimate(at_l.at(method=""), where)
    change = view.estimate(at_l - at_l.at(method=""), where)
    if base is None or change is None:
        return None
    scale = 100 / base.value
    low, high = (None if end is None else end * scale for end in (change.low, change.high))
    per_seed = tuple(value * scale for value in change.per_seed)
    return replace(change, value=change.value * scale, low=low, high=high, per_seed=per_seed)

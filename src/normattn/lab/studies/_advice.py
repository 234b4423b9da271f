"""What to take for longer texts, in plain words, with the numbers that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from normattn.lab.report.table import shown
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate
from normattn.lab.stats.metrics import loss
from normattn.lab.studies.base import ranked

LEAST_GAIN = 0.01
"""Nats per token, 1 % of perplexity: a smaller gain is no reason to change a model."""
LAST, TRAIN = "last_segment", "train_length"
LOSS = loss()


@dataclass(frozen=True)
class Advice:
    """`sentences` to be read in turn; `method` as it was asked for, None for the model as it is."""

    sentences: tuple[str, ...]
    method: str | None


@dataclass(frozen=True)
class _Best:
    """The lowest loss at a length, and whether it is better than the model's as it is."""

    length: int
    method: str
    loss: Estimate
    gain: Estimate | None
    rivals: tuple[str, ...]

    @property
    def better(self) -> bool:
        """Surely lower, and by enough to matter."""
        return self.sure and self.gain is not None and self.gain.value <= -LEAST_GAIN

    @property
    def sure(self) -> bool:
        """Surely lower, by however little."""
        return self.gain is not None and self.gain.below_zero


def advise(view: View) -> Advice:
    """The method with the lowest loss on the last segment, for the longest length that was read and
    then length by length.

    It is better than the model as it is where the interval of their paired difference lies below 0
    and the difference is at least `LEAST_GAIN`.
    """
    winners = [best for best in (_best(view, length) for length in lengths_of(view)) if best]
    if not winners or "" not in methods_of(view):
        return Advice(("No length was read by the model as it is: nothing can be advised.",), None)
    last = winners[-1]
    sentences = [_headline(view, winners), *(_sentence(view, best) for best in winners)]
    if last.loss.units == 1:
        sentences.append(
            "One window has no interval: this is one reading, not a finding; take more --windows."
        )
    if last.better:
        sentences += _cost(view, last.method)
    return Advice(tuple(sentences), last.method if last.better else None)


def methods_of(view: View) -> list[str]:
    """The methods that were read, the model as it is first."""
    return ranked(view.values("method"), ("",))


def lengths_of(view: View) -> list[int]:
    """The lengths that were read, ascending."""
    return sorted(view.values("length", {"protocol": LAST}))


def home(view: View) -> int:
    """The training length, or what was read that comes nearest from below, or above."""
    trained, lengths = int(view.frame["train_length"][0]), lengths_of(view)
    return max((length for length in lengths if length <= trained), default=min(lengths))


def name_of(method: str) -> str:
    """The method as it was typed."""
    return method or "as is"


def resolved(view: View, method: str) -> str:
    """The method with all its parameters, which can be typed as well."""
    return str(view.one("score", {"method": method}) or method)


def spoken(length: int) -> str:
    """8192 as `8k`, 12000 as `12,000`."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def cost_at_train_length(view: View, method: str) -> Estimate | None:
    """By how many percent a method raises the loss at the training length, paired over windows.

    The loss of the model as it is is taken as known. None where one of the two was not read.
    """
    at = {"protocol": TRAIN}
    base = view.estimate(LOSS, {**at, "method": ""})
    change = view.estimate(LOSS.at(at, method=method) - LOSS.at(at, method=""))
    if base is None or change is None:
        return None
    scale = 100 / base.value
    low, high = (None if end is None else end * scale for end in (change.low, change.high))
    per_seed = tuple(value * scale for value in change.per_seed)
    return replace(change, value=change.value * scale, low=low, high=high, per_seed=per_seed)


def _loss(view: View, method: str, length: int) -> Estimate | None:
    return view.estimate(LOSS, {"protocol": LAST, "length": length, "method": method})


def _against(view: View, one: str, other: str, length: int) -> Estimate | None:
    """The loss of `one` minus that of `other`, paired over windows."""
    last = LOSS.at(protocol=LAST, length=length)
    return view.estimate(last.at(method=one) - last.at(method=other))


def _best(view: View, length: int) -> _Best | None:
    losses = {method: _loss(view, method, length) for method in methods_of(view)}
    known = {method: estimate for method, estimate in losses.items() if estimate is not None}
    if not known:
        return None
    best = min(known, key=lambda method: known[method].value)
    rivals = []
    for other in known:
        apart = None if other == best else _against(view, other, best, length)
        if apart is not None and not apart.above_zero:
            rivals.append(other)
    gain = _against(view, best, "", length) if best else None
    return _Best(length, best, known[best], gain, tuple(rivals))


def _headline(view: View, winners: Sequence[_Best]) -> str:
    last = winners[-1]
    if not last.better:
        return (
            f"No method is clearly better than the model as it is at {spoken(last.length)} tokens."
        )
    span = _span(winners, _train_length(view))
    name, whole = name_of(last.method), resolved(view, last.method)
    name += f", that is {whole}" if whole != name else ""
    return f"{name}: {span} tokens; {_spoken_cost(view, last.method)}."


def _span(winners: Sequence[_Best], train_length: int) -> str:
    """At which lengths the method that is best at the last of `winners` is so without a gap."""
    last = winners[-1]
    others = [best.length for best in winners if best.method != last.method or not best.better]
    since = [best.length for best in winners if best.length > max(others, default=0)]
    # Within the training length nobody needs a method: "up to" is said of what lies beyond it.
    if max(others, default=0) <= train_length:
        return f"best up to {spoken(last.length)}"
    if len(since) == 1:
        return f"best at {spoken(last.length)}"
    return f"best from {spoken(since[0])} to {spoken(last.length)}"


def _train_length(view: View) -> int:
    return int(view.frame.select(pl.col("train_length").first()).item())


def _spoken_cost(view: View, method: str) -> str:
    cost, at = cost_at_train_length(view, method), spoken(_train_length(view))
    if cost is None:
        return f"what it costs at {at} was not read"
    if cost.above_zero:
        return f"costs {cost.value:.1f} % of loss at {at}"
    if cost.below_zero:
        return f"costs nothing at {at}, where the loss falls by {-cost.value:.1f} %"
    if cost.low is None:
        return f"the loss at {at} changes by {cost.value:+z.1f} %, without an interval"
    return f"no significant cost at {at} (loss {shown(cost, signed=True)} %)"


def _sentence(view: View, best: _Best) -> str:
    start = f"At {spoken(best.length)} tokens "
    own = _loss(view, "", best.length)
    if own is None:
        return (
            f"{start}the model as it is was not read; lowest: {name_of(best.method)}, "
            f"{shown(best.loss, digits=3)} nats."
        )
    if best.gain is None:
        return f"{start}no method is better than the model as it is, {shown(own, digits=3)} nats."
    numbers = (
        f"{shown(best.loss, digits=3)} nats against {shown(own, digits=3)} as it is, "
        f"difference {shown(best.gain, signed=True, digits=3)}"
    )
    name = name_of(best.method)
    if not best.better:
        why = f"by less than {LEAST_GAIN:g} nats" if best.sure else "but not surely lower"
        return f"{start}the lowest loss is {name}'s, {why}: {numbers}."
    others = [name_of(method) for method in best.rivals if method]
    tied = f" Not told apart from it: {', '.join(others)}." if others else ""
    return f"{start}{name} is best: {numbers}.{tied}"


def _cost(view: View, method: str) -> list[str]:
    cost = cost_at_train_length(view, method)
    if cost is None or not cost.above_zero:
        return []
    at = spoken(_train_length(view))
    return [
        f"Texts of up to {at} tokens are read better by the model as it is: switch it off there."
    ]

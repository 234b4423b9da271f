"""Metrics: functions of numerators and denominators that are summed over units first.

So scores are corpus-level (ratios, BLEU, chrF, F1, quantiles). Seeds are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from normattn.lab.stats.arrays import Array, Sums, Where
from normattn.lab.stats.measurements import FACTOR, SCHEMA

ORDERS = 4
CHARACTERS = 6
_BETA = 2.0


def bleu(sums: Array) -> Array:
    """BLEU (Papineni et al. 2002) as sacrebleu computes it, with exponential smoothing.

    `sums`: length of the translations, of the references, matching n-grams and n-grams of the
    translations for n = 1 … 4. BLEU = 100·min(1, exp(1 − r/c))·(Π_n p_n)^¼; the k-th p_n without a
    match is 1/(2^k·n-grams). BLEU is 0 where nothing matches.
    """
    length, reference = sums[..., 0], sums[..., 1]
    matches, grams = sums[..., 2 : 2 + ORDERS], sums[..., 2 + ORDERS :]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        smoothing = 2.0 ** np.cumsum(matches == 0, axis=-1)
        precision = np.where(matches > 0, matches / grams, 1 / (smoothing * grams))
        # Without n-grams of an order, BLEU is 0.
        precision = np.where(grams > 0, precision, 0.0)
        penalty = np.minimum(1.0, np.exp(1 - reference / length))
        score = 100 * penalty * np.exp(np.log(precision).mean(-1))
    return np.where((matches.sum(-1) > 0) & (length > 0), score, 0.0)


def chrf(sums: Array) -> Array:
    """chrF2 (Popović 2015) as sacrebleu computes it.

    `sums`: for n = 1 … 6 the character n-grams of the translations, of the references, and in both.
    Precision and recall are averaged over the orders that both have; F with β = 2.
    """
    counts = sums.reshape(*sums.shape[:-1], CHARACTERS, 3)
    translation, reference, both = counts[..., 0], counts[..., 1], counts[..., 2]
    used = (translation > 0) & (reference > 0)
    orders = np.maximum(1, used.sum(-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.where(used, both / translation, 0.0).sum(-1) / orders
        recall = np.where(used, both / reference, 0.0).sum(-1) / orders
        factor = _BETA**2
        score = 100 * (1 + factor) * precision * recall / (factor * precision + recall)
    return np.where(precision + recall > 0, score, 0.0)


def macro_f1(
    numerator: Array, denominator: Array, whole_numerator: Array, whole_denominator: Array
) -> Array:
    """The mean F1, in %, of the classes that are true or predicted anywhere.

    A bin is a class, `numerator` is 2 · correctly predicted and `denominator` predicted + true. The
    `whole` sums cover all units. They decide which classes count, and a class without a resampled
    unit keeps its F1 of all units. Without that, resamples would lack rare classes, whose F1 is
    low, and be biased upwards.
    """
    counted = whole_denominator > 0
    known = _divided(whole_numerator, whole_denominator)
    drawn = np.where(denominator > 0, _divided(numerator, denominator), known)
    return np.asarray(100 * np.where(counted, drawn, 0.0).sum(-1) / np.maximum(1, counted.sum(-1)))


Value = Callable[[Array, Array, Array, Array], Array]
"""(sum, of, whole sum, whole of), each (…, bins) → (…): `whole` are the sums of all units."""
Bins = slice | tuple[float, float] | Callable[[Sums], Sums]
"""A selection of bins: by index, by start and end, or by a function."""


@dataclass(frozen=True)
class Length:
    """A length that depends on the measurements; see `Metric.at`."""

    name: str
    multiple: float = 0.0


SHORTEST, LONGEST = Length("shortest"), Length("longest")
"""The shortest and the longest evaluated length."""


@dataclass(frozen=True)
class Term:
    """A term of a metric: factor · value(rows `where`, `bins` of them)."""

    factor: float
    name: str
    value: Value
    where: Where
    bins: Bins | None = None

    @property
    def place(self) -> tuple[Any, ...]:
        """Identifies the sums that the term uses."""
        # A function is its own key, as a later one may have the same `repr`.
        bins = self.bins if callable(self.bins) else repr(self.bins)
        return (self.name, bins, *sorted(self.where.items()))


@dataclass(frozen=True)
class Metric:
    """A number from the measurements table; metrics can be selected, added and subtracted.

        acc = Metric("accuracy")
        gain = acc.at(8, variant="KNA") - acc.at(8, variant="Baseline")

    `name` is the statistic, `unit` follows the number ("%", "nats"), `digits` is the number of
    decimals. Without a `value`, the name decides it and what is left out; see `KNOWN`.
    """

    name: str
    title: str = None  # type: ignore[assignment]
    value: Value = None  # type: ignore[assignment]
    unit: str = None  # type: ignore[assignment]
    digits: int = None  # type: ignore[assignment]
    parts: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        plain = (self.name, ratio(), "", 2)
        known = KNOWN.get(self.name, plain) if self.value is None else ("", *plain[1:])
        for field, default in zip(("title", "value", "unit", "digits"), known, strict=True):
            if getattr(self, field) is None:
                object.__setattr__(self, field, default)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms that the metric sums."""
        return self.parts or (Term(1.0, self.name, self.value, {}),)

    @property
    def is_difference(self) -> bool:
        """Whether a term is subtracted, so that the value is shown with a sign."""
        return any(term.factor < 0 for term in self.terms)

    def at(self, place: int | float | Length | Where | None = None, /, **columns: Any) -> Metric:
        """The metric at a length, for a variant, a method, a protocol, or any other column.

        A number is a multiple of the training length, on held-out text unless `protocol` says
        otherwise. A mapping has columns by their full names. `variant` is the trained row. Other
        names are factors of the study: `at(step=0)`.
        """
        where = {}
        for name, value in columns.items():
            known = name in SCHEMA or name.startswith(FACTOR)
            where["row" if name == "variant" else name if known else FACTOR + name] = value
        if isinstance(place, Mapping):
            where = {**place, **where}
        elif isinstance(place, Length):
            where["length"] = place
        elif place is not None:
            protocol = "train_length" if place == 1 else "non_repeated"
            where = {"protocol": protocol, "length": Length("multiple", float(place)), **where}
        return self._with(lambda term: replace(term, where={**term.where, **where}))

    def between(self, bins: Bins) -> Metric:
        """The metric over some bins of its axis, such as positions or layers."""
        return self._with(lambda term: replace(term, bins=bins))

    def __add__(self, other: Metric) -> Metric:
        return replace(self, parts=(*self.terms, *other.terms))

    def __sub__(self, other: Metric) -> Metric:
        unit = "points" if self.unit == "%" else self.unit
        return replace(self + -other, unit=unit)

    def __neg__(self) -> Metric:
        return -1.0 * self

    def __rmul__(self, factor: float) -> Metric:
        return self._with(lambda term: replace(term, factor=factor * term.factor))

    def _with(self, change: Callable[[Term], Term]) -> Metric:
        return replace(self, parts=tuple(map(change, self.terms)))


def ratio(scale: float = 1.0) -> Value:
    """scale · Σ sum / Σ of over all bins; NaN where nothing was counted."""

    def value(numerator: Array, denominator: Array, *whole: Array) -> Array:
        return _divided(scale * numerator.sum(-1), denominator.sum(-1))

    return value


def mean_of_bins(numerator: Array, denominator: Array, *whole: Array) -> Array:
    """The mean over bins (layers, heads) of sum/of."""
    return np.asarray(_divided(numerator, denominator).mean(-1))


def crossing(counts: Array, share: float, edges: tuple[float, float]) -> Array:
    """The value at which the cumulative counts (…, bins) reach `share`, linear within a bin."""
    bins = counts.shape[-1]
    shares = _divided(counts.cumsum(-1), counts.sum(-1, keepdims=True))
    index = np.minimum((shares < share).sum(-1), bins - 1)
    upper = np.take_along_axis(shares, index[..., None], -1)[..., 0]
    before = np.take_along_axis(shares, np.maximum(index - 1, 0)[..., None], -1)[..., 0]
    lower = np.where(index > 0, before, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = np.where(upper > lower, (share - lower) / (upper - lower), 0.5)
    low, high = edges
    return np.asarray(low + (high - low) * (index + np.clip(inside, 0, 1)) / bins)


def median(scale: float = 1.0) -> Value:
    """scale · the median of sum/of over bins, each weighted by how often it was drawn.

    For `Sums.by_unit`, whose bins are units, as a median is not a function of sums.
    """

    def value(
        numerator: Array, denominator: Array, whole_numerator: Array, whole_denominator: Array
    ) -> Array:
        ratios = np.broadcast_to(scale * whole_numerator / whole_denominator, denominator.shape)
        order = np.argsort(ratios, -1, kind="stable")
        ordered, drawn = (np.take_along_axis(part, order, -1) for part in (ratios, denominator))
        reached, count = drawn.cumsum(-1), drawn.sum(-1, keepdims=True)
        middle = [
            np.take_along_axis(ordered, (reached < rank).sum(-1, keepdims=True), -1)[..., 0]
            for rank in (np.floor((count + 1) / 2), np.floor(count / 2) + 1)
        ]
        return np.asarray((middle[0] + middle[1]) / 2)

    return value


def _divided(numerator: Array, denominator: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


KNOWN: dict[str, tuple[str, Value, str, int]] = {
    "accuracy": ("accuracy", ratio(100.0), "%", 1),
    "accuracy_seen": ("seen", ratio(100.0), "%", 1),
    "accuracy_by_distance": ("copied", ratio(100.0), "%", 1),
    "loss": ("loss", ratio(), "nats", 3),
}
"""Title, value function, unit and digits of common metrics; any other is a mean, two digits."""


def mean(name: str, title: str, digits: int = 2, scale: float = 1.0) -> Metric:
    """The metric scale · Σ sum / Σ of."""
    return Metric(name, title, ratio(scale), "", digits)


BLEU = Metric("bleu", "BLEU", lambda numerator, denominator, *whole: bleu(numerator), "", 1)
CHRF = Metric("chrf", "chrF", lambda numerator, denominator, *whole: chrf(numerator), "", 1)
MICRO_F1 = Metric("f1", "micro F1", ratio(100.0), "%", 2)
"""Bins are classes, with sum = 2 · correctly predicted and of = predicted + true."""
MACRO_F1 = Metric("f1", "macro F1", macro_f1, "%", 2)

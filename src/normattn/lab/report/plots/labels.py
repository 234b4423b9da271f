"""Where labels stand so that none covers another."""

from __future__ import annotations

from collections.abc import Sequence

Crowd = tuple[float, int]  # the mean of the wanted heights, the number of labels


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights for labels that want to stand at `wanted`, at least `gap` apart, in low … high.

    Labels keep the order of their values; a crowd of labels is centred on the crowd's mean. The gap
    shrinks where there is no room for it.
    """
    if len(wanted) > 1:
        gap = min(gap, (high - low) / (len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    crowds: list[Crowd] = []
    for i in order:
        crowds.append((min(max(wanted[i], low), high), 1))
        while len(crowds) > 1 and _overlap(crowds[-2], crowds[-1], gap, low, high):
            (a, m), (b, n) = crowds.pop(-2), crowds.pop()
            crowds.append(((a * m + b * n) / (m + n), m + n))
    heights = [
        _bottom(crowd, gap, low, high) + gap * rank for crowd in crowds for rank in range(crowd[1])
    ]
    result = [0.0] * len(wanted)
    for height, i in zip(heights, order, strict=True):
        result[i] = height
    return result


def _bottom(crowd: Crowd, gap: float, low: float, high: float) -> float:
    """Where the lowest label of a crowd stands."""
    extent = gap * (crowd[1] - 1)
    return min(max(crowd[0] - extent / 2, low), high - extent)


def _overlap(below: Crowd, above: Crowd, gap: float, low: float, high: float) -> bool:
    top = _bottom(below, gap, low, high) + gap * (below[1] - 1)
    return _bottom(above, gap, low, high) - top < gap * (1 - 1e-9)

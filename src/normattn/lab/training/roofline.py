"""A step's time from what it does and what a device can do: a roofline of every operation.

    seconds = Σ over operations of
        overhead + max(flops / products(side), Σ bytes / memory(since)) + exponentials / rate

Operations run one behind the other. `products` is a rate by the side of a product, (m·n·k)^(1/3), a
curve for each form and type; `memory` one by how many bytes were touched since these were (those of
just now lie in a cache), a curve for each layout and type. Of a GPU all are data-sheet figures, the
same for every size, exponentials and overhead take nothing: a bound from below. Of this machine's
processor all are measured (`measured_rates`), on numbers of no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from normattn.lab.training.counting import Counted
from normattn.lab.training.curve import Curve
from normattn.lab.training.work import Form, Layout, Work

Kind = Form | Layout | Literal["exponentials"]
FORMS: tuple[Form, ...] = get_args(Form)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
EXPONENTIALS: Literal["exponentials"] = "exponentials"


def rate_of(kind: Kind, half: bool) -> str:
    """The name of a curve."""
    return f"{kind}, {'bf16' if half else 'fp32'}"


_FREE = 1e300


@dataclass(frozen=True)
class Rates:
    """`curves`: FLOP/s, bytes/s and exponentials/s, by `rate_of`; `overhead`: s of an operation."""

    curves: Mapping[str, Curve]
    overhead: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0

    @classmethod
    def published(cls, fp32: float, bf16: float, bandwidth: float) -> Rates:
        """A data sheet's: the same whatever the form, layout and size; exponentials are free."""
        curves: dict[str, Curve] = {}
        for half in (False, True):
            curves |= {rate_of(form, half): Curve.level(bf16 if half else fp32) for form in FORMS}
            curves |= {rate_of(layout, half): Curve.level(bandwidth) for layout in LAYOUTS}
            curves[rate_of(EXPONENTIALS, half)] = Curve.level(_FREE)
        return cls(curves)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of what no cache holds."""
        return self.curves[rate_of("whole", False)](math.inf)

    def seconds(self, counted: Counted) -> float:
        """A step's time."""
        return sum((times * self.of(work) for work, times in counted.work.items()), 0.0)

    def of(self, work: Work) -> float:
        """The time of one operation."""
        products = self._rate(work.form, work)(work.side)
        memory = self._rate(work.layout, work)
        moving = sum(touch.size / memory(touch.since) for touch in work.touched)
        exponentials = work.exponentials / self._rate(EXPONENTIALS, work)(work.exponentials)
        return self.overhead + max(work.flops / products, moving) + exponentials

    def _rate(self, kind: Kind, work: Work) -> Curve:
        return self.curves[rate_of(kind, work.half)]

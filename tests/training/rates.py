"""Rates of a processor that is none, and the file that they are read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normattn.atomic import write_json
from normattn.lab.runs.timing import threads
from normattn.lab.training.curve import Curve
from normattn.lab.training.measured_rates import of_machine, path_for
from normattn.lab.training.roofline import EXPONENTIALS, FORMS, LAYOUTS, Rates, rate_of

PRODUCTS = {
    False: Curve(((10.0, 1e3), (1000.0, 1e5))),
    True: Curve.level(5e5),
}
MEMORY = {
    "whole": Curve(((1.0, 1000.0), (100.0, 100.0))),
    "scattered": Curve.level(50.0),
    "mixed": Curve.level(25.0),
}
RATES = Rates(
    {
        **{rate_of(form, half): PRODUCTS[half] for form in FORMS for half in (False, True)},
        **{rate_of(layout, half): MEMORY[layout] for layout in LAYOUTS for half in (False, True)},
        **{rate_of(EXPONENTIALS, half): Curve.level(10.0) for half in (False, True)},
    },
    overhead=0.5,
)


def rates_file() -> Path:
    """Where this machine's rates on one thread are kept."""
    with threads(1):
        return path_for(of_machine())


def keep(path: Path, rates: Rates | dict[str, Any]) -> None:
    """Write rates as those of this machine on one thread."""
    shown = rates
    if isinstance(rates, Rates):
        curves = {name: curve.points for name, curve in rates.curves.items()}
        shown = {"curves": {name: {"points": points} for name, points in curves.items()}}
        shown["overhead"] = rates.overhead
    with threads(1):
        write_json(path, {"machine": of_machine(), "rates": shown})

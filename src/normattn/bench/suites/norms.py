"""LayerNorm and RMSNorm against torch's own modules, forward and backward."""

from __future__ import annotations

import torch

from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.norming import KINDS, Norming
from normattn.bench.settings import Settings

WIDTHS = (256, 512, 1024, 2048, 4096)
_ROWS, _AT_MOST, _HALF = 2048, 1.05, 1.0


def cases(settings: Settings) -> list[Case]:
    """Every width in every precision, the four norms in one run."""
    widths = (32,) if settings.quick else WIDTHS
    return [
        _case(precision, dtype, width, settings)
        for precision, dtype in settings.dtypes.items()
        for width in widths
    ]


def _case(precision: str, dtype: torch.dtype, width: int, settings: Settings) -> Case:
    rows = 64 if settings.quick else _ROWS
    entries: dict[str, Entry] = {
        kind: Norming(kind, width, rows, dtype, settings.device) for kind in KINDS
    }
    # In half precision ours adds up the parameters' gradients in float32, which torch's LayerNorm
    # for CPUs does not, and shall take no longer.
    layer = _AT_MOST if dtype == torch.float32 else _HALF
    goals = (
        Goal("LayerNorm", "nn.LayerNorm", at_most=layer),
        Goal("RMSNorm", "nn.RMSNorm", at_most=_AT_MOST),
        Goal("RMSNorm", "LayerNorm"),
        Goal("nn.RMSNorm", "nn.LayerNorm"),
    )
    return Case(f"norms {precision} f+b, H {width}", entries, goals, dtype)


SUITE = Suite("norms", "LayerNorm and RMSNorm against torch's modules, f+b", cases)

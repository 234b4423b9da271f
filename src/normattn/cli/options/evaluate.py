"""`normattn evaluate`: a trained run, under any stretching method and protocol."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from normattn.cli.asking import argument, option
from normattn.cli.values import integers, names

EPILOG = """
**Examples**

`normattn evaluate runs/kna` – as trained, by the usual protocols, at 1, 2, 4 and 8 times its length

`normattn evaluate runs/kna --methods YaRN,ReRoPE --multiples 1,8`

`normattn evaluate runs/kna --protocols last-segment --lengths 512,1024`

`normattn evaluate runs/kna --protocols by-position,retrieval --methods all --multiples 1,4,16,64`

What was measured before is not measured again. `as is` among the methods is the model unchanged,
`all` that and every post-hoc method that the run's score can take.
"""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Measure a trained run past its training length, with and without stretching methods.

    The last segment is read after every tested length, retrieval is asked
    at each; repeated, non-repeated and by-position text is read at the longest, which over L is
    also the factor that NTK, YaRN and PI stretch by. Records go to RUN/evaluations, those of a
    study's run to RUN/evaluations/beside, which the study's page leaves out. RUN/report gets the
    page.
    """

    run: Path = argument(help="The directory of a finished run.")
    methods: tuple[str, ...] = option(
        "as is",
        read=names,
        help="Post-hoc methods, by commas: NTK, YaRN, ReRoPE, logn+, PI …; or all.",
    )
    protocols: tuple[str, ...] | None = option(
        None,
        read=names,
        help="train-length, non-repeated, repeated, last-segment (the default), by-position, "
        "retrieval.",
    )
    multiples: tuple[int, ...] | None = option(
        None, read=integers, help="Tested lengths in units of L. [default: 1,2,4,8]"
    )
    lengths: tuple[int, ...] | None = option(
        None, read=integers, help="Tested lengths in tokens, each a multiple of L."
    )
    max_windows: int = option(
        128, min=1, help="Windows in a set, at most; more means narrower intervals."
    )
    max_tokens: int = option(16384, min=1, help="Tokens in a batch, at most; bounds the memory.")
    seed: int = option(0, min=0, help="Chooses windows and repeated segments.")
    threads: int = option(1, min=1, help="CPU threads of this process.")

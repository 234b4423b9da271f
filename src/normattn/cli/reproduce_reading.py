"""`normattn reproduce` for what is read past the training length: KeyNorm and its claims."""

from __future__ import annotations

from typing import Annotated

import typer

from normattn.cli import values
from normattn.cli.study_options import (
    GOES_ON,
    Changes,
    Corpus,
    Jobs,
    Out,
    Plan,
    Preset,
    Seeds,
    changes_of,
    run_study,
)

KEYNORM = f"""
**Examples**

`normattn reproduce keynorm --preset smoke` – the whole path in about a minute

`normattn reproduce keynorm` – the table itself, on two cores in about 20 minutes

`normattn reproduce keynorm --variants Baseline,QNA,KNA --seeds 3` – more seeds

`normattn reproduce keynorm --methods all` – every method, a row for every trained-in part

`normattn reproduce keynorm --preset gpu-100m --corpus hf:NAME --plan` – its cost

{GOES_ON}
"""

WINDOW = f"""
**Examples**

`normattn reproduce window --preset smoke` – the whole path, small

`normattn reproduce window` – the study itself, on two cores in about 6 minutes

`normattn reproduce window --seeds 3` – with intervals over three trained models

`normattn reproduce window --set "window.shares=[0.25,0.5,1,2]"` – other windows

{GOES_ON}
"""

CONTINUE = f"""
**Examples**

`normattn reproduce continue --preset smoke` – the whole path, small

`normattn reproduce continue` – the study itself; `--plan` says how long it takes here

`normattn reproduce continue --seeds 3` – with intervals over three trained models of each kind

`normattn reproduce continue --set continued.multiple=8 --plan` – at 8 training lengths: its cost

{GOES_ON}
"""

MECHANISM = f"""
**Examples**

`normattn reproduce mechanism --preset smoke` – the whole path, small

`normattn reproduce mechanism` – the study itself; `--plan` says how long it takes here

`normattn reproduce mechanism --variants Baseline,KNA --seeds 3` – two scores, three models each

`normattn reproduce mechanism --set mechanism.multiple=16 --plan` – read to 16 L: its cost

{GOES_ON}
"""


def keynorm(
    preset: Preset = "laptop",
    variants: Annotated[
        str | None,
        typer.Option(
            help="Trained scores, by commas; any that `normattn list` can name; or `all`. "
            "[default: Baseline, QNA, KNA, CosA, each with and without -logn]"
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Ways of reading on, or `all`: every one that a score can take, and a row for "
            "every part that can be trained in. [default: as is,NTK,YaRN,ReRoPE]"
        ),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Train each score, read to 8 times the training length each way, tabulate and plot.

    The plan comes first: runs, tokens, FLOPs, time by a short measurement on this machine, disk.
    Rows are added by running it again with other --variants, --methods or --seeds on the same OUT;
    any other setting that differs is refused.
    """
    run_study(
        "keynorm",
        plan,
        preset=preset,
        variants=values.names(variants, "--variants"),
        methods=values.names(methods, "--methods"),
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=changes_of(corpus, changes),
    )


def window(
    preset: Preset = "laptop",
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Read with ReRoPE at windows of ⅛ to 1 training lengths, without log-n, with it and log-n†.

    Trains Baseline and Baseline-logn, reads to 8 times the training length, and writes one table
    and one figure: accuracy against the window, a line for each form of log-n.
    """
    run_study(
        "window",
        plan,
        preset=preset,
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=changes_of(corpus, changes),
    )


def continue_(
    preset: Preset = "laptop",
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Train at L, go on at 4 L: KeyNorm as it is, Baseline as it is, with PI and with ABF.

    Each model is read at L (what is forgotten), 4 L and 16 L before and along the continued
    training; tables and a figure of loss and accuracy by continued steps. The settings of the
    continued training are said once, in the preset, for all scores.
    """
    run_study(
        "continue",
        plan,
        preset=preset,
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=changes_of(corpus, changes),
    )


def mechanism(
    preset: Preset = "laptop",
    variants: Annotated[
        str | None,
        typer.Option(
            help="Trained scores, by commas. [default: Baseline, KNA, KNA-NoPE, and QKLayerNorm "
            "and QKRMSNorm with and without gain]"
        ),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Test the source's explanation: key norms against attention, and cosines at L and 8 L.

    Trains each score and counts, by hooks on the trained model: the rank correlation of ‖k_j‖ with
    the attention that key j receives, and the range of cos(q, k) at L and at 8 L. A table and two
    figures, with intervals over documents (and seeds).
    """
    run_study(
        "mechanism",
        plan,
        preset=preset,
        variants=values.names(variants, "--variants"),
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=changes_of(corpus, changes),
    )

"""`normattn reproduce` for what is trained: residual scores, norms, normalised queries and keys."""

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

REALFORMER = f"""
**Examples**

`normattn reproduce realformer --preset smoke` – the whole path, small

`normattn reproduce realformer` – the study itself; `--plan` says how long it takes here

`normattn reproduce realformer --variants PostLN,RealFormer --seeds 5` – two rows, five models each

`normattn reproduce realformer --preset gpu-base --corpus my-text/ --plan` – BERT-Base: its cost

{GOES_ON}
"""

RMSNORM = f"""
**Examples**

`normattn reproduce rmsnorm --preset smoke` – the whole path, small

`normattn reproduce rmsnorm` – on source files and the modules that they import

`normattn reproduce rmsnorm --corpus NYT24/` – on your folder in the NYT24 form

{GOES_ON}
"""

QKNORM = f"""
**Examples**

`normattn reproduce qknorm --preset smoke` – the whole path, small

`normattn reproduce qknorm` – translation, the ladder of learning rates, and images

`normattn reproduce qknorm --corpus multi30k/` – on your aligned files

{GOES_ON}
"""


def realformer(
    preset: Preset = "laptop",
    variants: Annotated[
        str | None,
        typer.Option(help="Rows, by commas. [default: all of the study's]"),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Residual scores beside the placements of the norm, in masked language models.

    Trains an encoder in each placement, at equal and at half the steps, over learning rates and
    dropouts, with and without warm-up; a table, and figures by layer.
    """
    run_study(
        "realformer",
        plan,
        preset=preset,
        variants=values.names(variants, "--variants"),
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=changes_of(corpus, changes),
    )


def rmsnorm(
    preset: Preset = "laptop",
    variants: Annotated[
        str | None,
        typer.Option(help="Rows, by commas. [default: LayerNorm,RMSNorm]"),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """LayerNorm against RMSNorm in a multi-label relation classifier: F1 and training time.

    Both are trained in the same run, several seeds, interleaved; a table with intervals, and curves
    of F1 and loss by step.
    """
    run_study(
        "rmsnorm",
        plan,
        preset=preset,
        variants=values.names(variants, "--variants"),
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=changes_of(corpus, changes),
    )


def qknorm(
    preset: Preset = "laptop",
    variants: Annotated[
        str | None,
        typer.Option(help="Scores, by commas. [default: all of the study's]"),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Normalised queries and keys in translation and in images: quality and stability.

    Trains an encoder-decoder with each score, a ladder of learning rates with and without, and a
    small vision transformer; BLEU and chrF with intervals, and figures of who diverges where.
    """
    run_study(
        "qknorm",
        plan,
        preset=preset,
        variants=values.names(variants, "--variants"),
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=changes_of(corpus, changes),
    )

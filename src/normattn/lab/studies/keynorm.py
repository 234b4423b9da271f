"""Does normalising the keys let a model trained on short text read long text? (kexue 9859)

Eight scores are trained (Baseline, QNA, KNA and CosA, each with and without log-n scaling), and
each reads past its training length in four ways: as it is, and with NTK, YaRN or ReRoPE. "all"
asks for the extended table: a row for every trained-in part, and every post-hoc method on
Baseline, KNA and CosA.
"""

from __future__ import annotations

from collections.abc import Sequence

from normattn.errors import InputError
from normattn.lab.report.figure import Figure
from normattn.lab.report.page import Page
from normattn.lab.report.table import Cell, Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.studies._premise import premise
from normattn.lab.studies._published import SETTING, TABLE
from normattn.lab.studies._reading import (
    LEGEND,
    MAIN_COLUMNS,
    history_figure,
    in_short,
    length_figure,
    position_figures,
    reading_columns,
    reading_rows,
    table_figure,
)
from normattn.lab.studies._sentences import sentences
from normattn.lab.studies._variants import BASES, READ_WITH, trained_in_variants
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.language import (
    ReadCell,
    TextConfig,
    canonical,
    checked_methods,
    opened,
    read_sweep,
    usable,
)
from normattn.lab.sweep.methods import ALL, Omission, candidates
from normattn.lab.sweep.reading import AS_IS
from normattn.lab.sweep.settings import Preset
from normattn.lab.sweep.study import Request, Study, Sweep

KIND = "keynorm"
VARIANTS = tuple(
    f"{base}{logn}" for base in ("Baseline", "QNA", "KNA", "CosA") for logn in ("", "-logn")
)
METHODS = (AS_IS, "NTK", "YaRN", "ReRoPE")


def resolve(request: Request) -> Sweep:
    """Every choice made and checked, before anything is written or trained.

    Raises `InputError` for an unknown preset, score, method or setting, and for values out of
    range. A method that makes no sense for one of several scores leaves out that row, and says so;
    so does a part that a row of the extended table cannot have.
    """
    preset = opened(request, KIND, Preset)
    config = TextConfig.of_text(preset)
    variants, untrained = _variants(request, config)
    asked = None if request.methods == (ALL,) else _methods(request, config)
    methods, unread = usable(
        {variant: asked or _every_method(variant) for variant in variants}, config
    )
    return read_sweep(request, KIND, preset, config, methods, [*untrained, *unread])


def _variants(request: Request, config: TextConfig) -> tuple[tuple[str, ...], list[Omission]]:
    """The scores to train, and why each of the others cannot be trained here."""
    every = (ALL,) in (request.variants, request.methods) and request.variants in (None, (ALL,))
    if not every:
        return canonical(_listed(request.variants, "--variants") or VARIANTS, config), []
    trained: list[str] = []
    omissions: list[Omission] = []
    for variant in trained_in_variants(int(config.training["model"]["layers"])):
        try:
            trained += canonical([variant], config)
        except InputError as error:
            omissions.append(Omission(variant, "", str(error)))
    return tuple(dict.fromkeys(trained)), omissions


def _methods(request: Request, config: TextConfig) -> tuple[str, ...]:
    return checked_methods(_listed(request.methods, "--methods") or METHODS, config)


def _listed(names: tuple[str, ...] | None, option: str) -> tuple[str, ...] | None:
    if names is not None and ALL in names:
        raise InputError(f"{option} {ALL} is said alone, without other names: {', '.join(names)}")
    return names


def _every_method(variant: str) -> tuple[str, ...]:
    """What `all` stands for: every method on the scores of the table; a row that shows another part
    is read as it is and with two methods.
    """
    return (AS_IS, *(candidates() if variant in (*BASES, *VARIANTS) else READ_WITH))


def figures(view: View) -> list[Figure]:
    """Accuracy by position and by length, the table in colours, the trainings."""
    return [*position_figures(view), length_figure(view), table_figure(view), history_figure(view)]


def _source_rows(view: View) -> list[Row]:
    return [row for row in reading_rows(view) if (row.where["row"], row.where["method"]) in TABLE]


def _source_columns(view: View) -> Sequence[Column]:
    """Ours and theirs, side by side."""
    ours = {column.key: column for column in reading_columns(view)}
    paired = []
    for key in ("train", "repeated", "non_repeated"):
        if key not in ours:
            continue

        def theirs(view: View, row: Row, key: str = key) -> Cell:
            published = TABLE[row.where["row"], row.where["method"]]
            return Cell(f"{getattr(published, key):.2f}")

        paired.append(
            Column(key, ours[key].title, ours[key].statistic, ours[key].terms, interval=False)
        )
        paired.append(Column(f"{key}_source", "source", plain=theirs))
    return paired


PAGE = Page(
    title="Accuracy past the training length",
    question="Does normalising keys (KNA), queries (QNA) or both (CosA) let a model trained on "
    "short text read long text, as it is or with NTK, YaRN and ReRoPE?",
    sources=("kexue.fm/archives/9859",),
    tables=(
        Table(
            "table",
            "",
            reading_rows,
            reading_columns,
            intro="Token accuracy in % (losses in nats), with 95 % intervals over documents and "
            "seeds.",
            notes=lambda view: (*premise(view), *LEGEND),
            main=MAIN_COLUMNS,
        ),
        Table(
            "source",
            "Beside the source's table: another setting, not a target",
            _source_rows,
            _source_columns,
            intro=f"The source: {SETTING}. Accuracy in %. For CosA-logn as it is the source prints "
            "48.39 in its large table and 48.95 in its first.",
        ),
    ),
    claims=sentences,
    figures=figures,
    summary=in_short,
)

STUDY = Study(
    name=KIND,
    help="Train each score, read to 8 times the training length each way, tabulate and plot.\n\n"
    "The plan comes first: runs, tokens, FLOPs, time by a short measurement on this machine, disk. "
    "Rows are added by running it again with other --variants, --methods or --seeds on the same "
    "OUT; another setting that a result depends on is refused.",
    resolve=resolve,
    cells=(ReadCell,),
    page=PAGE,
    variants="Trained scores, by commas; any that `normattn list` can name; or `all`. [default: "
    "Baseline, QNA, KNA, CosA, each with and without -logn]",
    methods="Ways of reading past L, or `all`: every one that a score can take, and a row for "
    "every part that can be trained in. [default: as is,NTK,YaRN,ReRoPE]",
    headline=("train", "repeated_seen", "non_repeated", "change"),
    examples=(
        ("--preset smoke", "the whole path in about a minute"),
        ("--preset quick", "the source's architecture in the few minutes it takes"),
        ("", "the table itself"),
        ("--variants Baseline,QNA,KNA --seeds 3", "more seeds"),
        ("--methods all", "every method, a row for every trained-in part"),
        ("--preset gpu-100m --corpus hf:NAME --plan", "its cost"),
    ),
    collect=measured_below,
)

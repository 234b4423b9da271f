"""What a study is made of.

A study is a question, variants to train, evaluations, metrics as columns, claims and figures:

    acc = Metric("accuracy")
    STUDY = Study(
        "my-study",
        question="Do normalised keys let a model handle twice its training length?",
        variants=["Baseline", "KNA"],
        evals=[Eval(lengths=(1, 2))],
        columns={"L": acc.at(1), "2 L": acc.at(2)},
        claims=[Claim("KNA is better", acc.at(2, variant="KNA") - acc.at(2, variant="Baseline"))],
    )
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError, unknown_name
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Figure
from normattn.lab.report.output import Written, write_page
from normattn.lab.report.page import Page, context, nothing
from normattn.lab.report.tables import Column, Table
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.metrics import KNOWN, Length
from normattn.lab.studies.language import TextRun, TextSetting
from normattn.lab.studies.lm_report import intervals, rows_of
from normattn.lab.studies.methods import canonical, checked_methods, usable
from normattn.lab.studies.preset import PROTOCOLS, Preset, Protocol, opened
from normattn.lab.studies.preset import typed as preset_typed
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.config import flat
from normattn.lab.sweep.run import CORPUS, Request, Sweep
from normattn.lab.sweep.run import Run as AnyRun
from normattn.score.spec import UNMODIFIED
from normattn.settings import typed

__all__ = ["Claim", "Eval", "Method", "Metric", "Preset", "Run", "Study", "Variant"]

EXAMPLES = (
    ("--preset smoke", "a quick test of the whole study"),
    ("", "the full study"),
    ("--seeds 3", "three models of each kind, for verdicts"),
    ("--plan", "its cost on this machine"),
)
"""Command lines of every study that trains, after `normattn reproduce NAME`."""
Method = str
"""An inference-time method by name, as "ReRoPE(window=64)"; "unmodified" is the trained model."""
Run = TextRun
"""One training of a variant with one seed, and what is measured of it."""


@dataclass(frozen=True)
class Variant:
    """What is trained: a score, under a name of its own where further settings differ.

    `settings` are laid over the preset's training settings, by dotted name.
    """

    name: str
    score: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Eval:
    """How trained models are read: the protocols, and the lengths in units of L."""

    lengths: tuple[int, ...] = (1, 2, 4, 8)
    protocols: tuple[Protocol, ...] = PROTOCOLS


class Study:
    """One experiment: what it asks, trains and measures, and the report that it becomes.

    `variants`, `methods` and `evals` (one, or none for the preset's) say what is trained and how it
    is read; `--variants` and `--methods` choose others. A study that needs more gives `resolve`,
    which makes the sweep of a request, and `runs`, the kinds of its runs. `columns` are metrics by
    their titles; a study with several tables gives `tables`. `claims` and `figures` are lists, or
    functions of what was measured; without figures the columns are drawn with their intervals.

    `help` is what `reproduce NAME --help` says; `variants_help` and `methods_help` explain these
    options, "" where the study has no such choice. `headline` are the columns of the first table
    that `reproduce` prints of each run when it ends. `examples` are command lines after `EXAMPLES`,
    and what they do. `collect` gathers what was measured. `made_by` is the command line that
    measures where `reproduce` does not. `source` is the file of a user's own study.
    """

    source: Path | None = None

    def __init__(
        self,
        name: str,
        question: str,
        *,
        title: str = "",
        help: str = "",
        sources: Sequence[str] = (),
        variants: Sequence[str | Variant] = (),
        methods: Sequence[Method] = (UNMODIFIED,),
        evals: Sequence[Eval] = (),
        columns: Mapping[str, Metric] | None = None,
        tables: Sequence[Table] = (),
        claims: Sequence[Claim] | Callable[[View], Iterable[Claim]] = (),
        figures: Sequence[Figure] | Callable[[View], Iterable[Figure]] | None = None,
        summary: Callable[[View], Sequence[str]] = nothing,
        notes: Callable[[View], Sequence[str]] = nothing,
        resolve: Callable[[Request], Sweep] | None = None,
        runs: Sequence[type[AnyRun]] = (TextRun,),
        collect: Callable[[Path], pl.DataFrame] = measured_below,
        variants_help: str = "",
        methods_help: str = "",
        headline: Sequence[str] = (),
        examples: Sequence[tuple[str, str]] = (),
        made_by: str = "",
    ) -> None:
        if len(evals) > 1:
            raise InputError(f"the study {name} has {len(evals)} evals; give one with all lengths")
        self.name, self.help, self.made_by = name, help or question, made_by
        self.collect, self.runs = collect, tuple(runs)
        self.headline = tuple(headline)
        self.examples = () if made_by else (*EXAMPLES, *examples)
        self.variants = variants_help or ("Scores, by commas." if variants else "")
        self.methods = methods_help or ("Ways of reading, by commas." if variants else "")
        named = [v if isinstance(v, Variant) else Variant(v) for v in variants]
        self._resolve = resolve or (
            lambda request: _sweep(request, name, named, methods, evals[0] if evals else None)
        )
        if named and resolve is None and not callable(claims):
            tested = {claim.sentence: claim.metric for claim in claims if claim.metric is not None}
            shown = {**(columns or {}), **tested}
            lengths = evals[0].lengths if evals else ()
            for label, metric in shown.items():
                _check_metric(f"{name}: {label!r}", metric, [v.name for v in named], lengths)
        order = [variant.name for variant in named]
        drawn_columns = tuple(
            Column(_key(title), title, metric) for title, metric in (columns or {}).items()
        )
        main = Table("table", "", lambda view: rows_of(view.read, order), drawn_columns)

        def drawn(view: View) -> list[Figure]:
            return [intervals(view, "columns", title or name, main.rows(view), drawn_columns)]

        self.page = Page(
            title=title or name,
            question=question,
            sources=tuple(sources),
            tables=tuple(tables) or (main,),
            claims=_listed(claims),
            figures=_listed(drawn if figures is None else figures),
            notes=notes,
            summary=summary,
        )

    def resolve(self, request: Request) -> Sweep:
        """The sweep of a request; `InputError` for one that cannot be, before anything runs."""
        if self.made_by:
            raise InputError(
                f"{self.made_by} measures this; reproduce is only for studies that train"
            )
        for option in ("variants", "methods"):
            if getattr(request, option) is not None and not getattr(self, option):
                raise InputError(
                    f"reproduce {self.name} chooses its own {option}; leave --{option} out"
                )
        return self._resolve(request)

    def run(self, fields: Mapping[str, Any], where: str) -> AnyRun:
        """The run that these fields describe; `InputError` for one of another study."""
        for kind in self.runs:
            if fields.get("kind") == kind.model_fields["kind"].default:
                return kind.parse(fields, where)
        raise InputError(f"{where} is not a run of the study {self.name}")

    def measurements(self, out: Path) -> pl.DataFrame:
        """Everything that was measured below `out`, under this study's name."""
        return self.collect(out).with_columns(pl.lit(self.name).alias("study"))

    def command(self, config: Mapping[str, Any]) -> str:
        """The command line that makes the study of these settings from nothing.

        Several where runs were added by further ones; "" where no settings are known, as of runs
        that were gathered.
        """
        if self.made_by or not config:
            return _typed_command(self.made_by, config)
        # Of one's own, without its folder: a page is the same wherever it is made.
        name = f"./{self.source.name}" if self.source else self.name
        preset = preset_typed(str(config.get("preset", "laptop")), self.name)
        words = ["normattn", "reproduce", name, "--preset", preset]
        # A group and one of its members may both have been given: the later one counts.
        last: dict[str, tuple[str, str]] = {}
        for setting, value in config.get("changed", {}).items():
            if setting == CORPUS:
                last[CORPUS] = ("--corpus", str(value))
            else:
                last |= {line.partition("=")[0]: ("--set", line) for line in typed(setting, value)}
        words += [word for pair in last.values() for word in pair]
        asked: Sequence[Mapping[str, str]] = config.get("asked") or [{}]
        return " && ".join(
            shlex.join([*words, *(word for name in given for word in (f"--{name}", given[name]))])
            for given in asked
        )

    def report(self, measured: pl.DataFrame, out: Path, config: Mapping[str, Any]) -> Written:
        """Write the report of these measurements into `out`.

        `config` are the sweep's settings, as config.json holds them.
        """
        settings = flat({k: v for k, v in config.items() if k not in ("changed", "asked")})
        made = context(self.page, measured, settings=settings, command=self.command(config))
        return write_page(made, out, measured)


def _typed_command(made_by: str, config: Mapping[str, Any]) -> str:
    """The command `made_by` with the model or run that its settings name, and what was read."""
    if not {"model", "run"} & {*config}:
        return made_by
    named = (config.get(word.lower(), word) if word.isupper() else word for word in made_by.split())
    words = [*map(str, named)]
    for option in ("text", "lengths", "windows"):
        given = config.get(option)
        if option == "lengths" and given:
            given = ",".join(map(str, given))
        for value in given if isinstance(given, list | tuple) else [given]:
            words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join(words)


def _check_metric(
    where: str, metric: Metric, variants: Sequence[str], lengths: Sequence[int]
) -> None:
    """Raise `InputError` for a metric, a variant or a length that the study never measures."""
    for term in metric.terms:
        row, length = term.where.get("row"), term.where.get("length")
        multiple = length.multiple if isinstance(length, Length) else 0
        wrong = None
        if term.name not in KNOWN:
            wrong = unknown_name("metric", term.name, KNOWN)
        elif row is not None and row not in variants:
            wrong = unknown_name("variant", str(row), variants)
        elif multiple and lengths and multiple not in lengths:
            wrong = InputError(
                f"{multiple:g} is no length of its Eval, which has {', '.join(map(str, lengths))}"
            )
        if wrong is not None:
            raise InputError(f"{where}: {wrong}")


def _listed(given: Any) -> Callable[[View], list[Any]]:
    return lambda view: [*(given(view) if callable(given) else given)]


def _key(title: str) -> str:
    return re.sub(r"\W+", "_", title).strip("_").lower() or "column"


def _sweep(
    request: Request,
    name: str,
    variants: list[Variant],
    methods: Sequence[Method],
    read: Eval | None,
) -> Sweep:
    """A run of each variant and seed, read with each method that its score can take."""
    preset = opened(request, name, Preset)
    own = {"multiples": read.lengths, "protocols": read.protocols} if read else None
    setting = TextSetting.of(preset, own)
    named = [Variant(v) for v in request.variants] if request.variants else variants
    scores = {v.name: canonical((v.score or v.name,), setting)[0] for v in named}
    ways = checked_methods(request.methods or methods, setting)
    applicable, skipped = usable(dict.fromkeys(scores.values(), ways), setting)
    runs = [
        setting.run(
            scores[variant.name],
            applicable[scores[variant.name]],
            variant=variant.name if variant.score else scores[variant.name],
            row=variant.name if variant.score else "",
            score=scores[variant.name],
            training=setting.trains(scores[variant.name], variant.settings),
        )
        for variant in named
    ]
    return setting.sweep(request, name, runs, skipped)

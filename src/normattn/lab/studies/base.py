"""Define a study: a question, variants, evaluations, metrics as columns, claims and figures.

For example:

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

import copy
import importlib.util
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError, NormattnError, unknown_name
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Figure
from normattn.lab.report.output import Written, write_page
from normattn.lab.report.page import Page, context, no_lines
from normattn.lab.report.tables import Column, Table
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.metrics import KNOWN, Length
from normattn.lab.studies.language import TextRun, TextSetting
from normattn.lab.studies.lm_report import interval_figure, rows_of
from normattn.lab.studies.preset import PROTOCOLS, Preset, Protocol, load_preset, preset_argument
from normattn.lab.sweep.collect import collect_measurements
from normattn.lab.sweep.config import flatten
from normattn.lab.sweep.run import Request, Sweep
from normattn.lab.sweep.run import Run as AnyRun
from normattn.score.spec import UNMODIFIED
from normattn.settings import format_setting

__all__ = ["Claim", "Eval", "Method", "Metric", "Preset", "Run", "Study", "Variant"]

EXAMPLES = (
    ("--preset smoke", "a quick test of the whole study"),
    ("", "the full study"),
    ("--seeds 3", "three models of each kind, for verdicts"),
    ("--plan", "its cost on this machine"),
)
"""Example options in the help of every study that trains, and what they do."""
Method = str
"""An inference-time method by name, as "ReRoPE(window=64)"; "unmodified" is the trained model."""
Run = TextRun
"""One training of a variant with one seed, and its measurements."""


@dataclass(frozen=True)
class Variant:
    """A model to train: its name, its score (default: the name), and its settings.

    `settings` override the preset's training settings, by dotted name.
    """

    name: str
    score: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Eval:
    """How trained models are evaluated: protocols, and lengths in units of the training length."""

    lengths: tuple[int, ...] = (1, 2, 4, 8)
    protocols: tuple[Protocol, ...] = PROTOCOLS


class Study:
    """One experiment: its question, what it trains and measures, and its report.

    What is trained and evaluated:

    - `variants`, `methods`, `evals` (one at most; none: the preset's). The options `--variants` and
      `--methods` choose among them, and others by name.
    - `resolve` and `runs`, for a study that needs more: the function from a request to its sweep,
      and the classes of its runs.
    - `collect`: reads the measurements from the study's directory.
    - `made_by`: the command that measures, where `reproduce` does not.

    What the report shows:

    - `columns`: metrics by title, or `tables` for a study with several tables.
    - `claims` and `figures`: lists, or functions of the measurements. Without figures, the columns
      are drawn with their intervals.

    What the command line shows:

    - `help`: the text of `reproduce NAME --help`.
    - `variants_help`, `methods_help`: the texts of these options; "" where the study has none.
    - `examples`: command lines after `EXAMPLES`, and what they do.

    `source` is the file of a user's study.
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
        summary: Callable[[View], Sequence[str]] = no_lines,
        notes: Callable[[View], Sequence[str]] = no_lines,
        resolve: Callable[[Request], Sweep] | None = None,
        runs: Sequence[type[AnyRun]] = (TextRun,),
        collect: Callable[[Path], pl.DataFrame] = collect_measurements,
        variants_help: str = "",
        methods_help: str = "",
        examples: Sequence[tuple[str, str]] = (),
        made_by: str = "",
    ) -> None:
        if len(evals) > 1:
            raise InputError(f"the study {name} has {len(evals)} evals; give one with all lengths")
        self.name, self.help, self.made_by = name, help or question, made_by
        self.collect, self.runs = collect, tuple(runs)
        self.examples = () if made_by else (*EXAMPLES, *examples)
        listed = "{}, separated by commas." if variants else ""
        self.variants = variants_help or listed.format("Scores")
        self.methods = methods_help or listed.format("Inference-time methods")
        trained = [v if isinstance(v, Variant) else Variant(v) for v in variants]
        names = [variant.name for variant in trained]
        evaluation = evals[0] if evals else None
        self._resolve = resolve or partial(_make_sweep, name, trained, methods, evaluation)
        metrics = dict(columns or {})
        if names and resolve is None and not callable(claims):
            tested = {claim.sentence: claim.metric for claim in claims if claim.metric is not None}
            for label, metric in {**metrics, **tested}.items():
                lengths = evaluation.lengths if evaluation else ()
                _check_metric(f"{name}: {label!r}", metric, names, lengths)
        keys = {label: re.sub(r"\W+", "_", label).strip("_").lower() for label in metrics}
        made = tuple(Column(keys[label] or "column", label, m) for label, m in metrics.items())
        main = Table("table", "", lambda view: rows_of(view.evaluated, names), made)

        def column_figure(view: View) -> list[Figure]:
            return [interval_figure(view, "columns", title or name, main.rows(view), made)]

        self.page = Page(
            title=title or name,
            question=question,
            sources=tuple(sources),
            tables=tuple(tables) or (main,),
            claims=_as_function(claims),
            figures=_as_function(column_figure if figures is None else figures),
            notes=notes,
            summary=summary,
        )

    def resolve(self, request: Request) -> Sweep:
        """The sweep of a request; raises `InputError` before anything runs."""
        if self.made_by:
            raise InputError(
                f"{self.made_by} measures this; reproduce is only for studies that train"
            )
        for option in ("variants", "methods"):
            if getattr(request, option) is not None and not getattr(self, option):
                own = f"reproduce {self.name} chooses its own {option}"
                raise InputError(f"{own}; leave --{option} out")
        return self._resolve(request)

    def run(self, fields: Mapping[str, Any], where: str) -> AnyRun:
        """The run with these fields; raises `InputError` for a run of another study."""
        for kind in self.runs:
            if fields.get("kind") == kind.model_fields["kind"].default:
                return kind.parse(fields, where)
        raise InputError(f"{where} is not a run of the study {self.name}")

    def measurements(self, out: Path) -> pl.DataFrame:
        """All measurements below `out`, under this study's name."""
        return self.collect(out).with_columns(pl.lit(self.name).alias("study"))

    def command(self, config: Mapping[str, Any]) -> str:
        """The command line that repeats the study with these settings.

        Several commands, joined by &&, where runs were added later. "" where no settings are known,
        as for a report on several folders.
        """
        if self.made_by or not config:
            return _fill_in_command(self.made_by, config)
        # A user's file is named without its folder, so that reports do not depend on the folder.
        name = f"./{self.source.name}" if self.source else self.name
        preset = preset_argument(str(config.get("preset", "laptop")), self.name)
        words = ["normattn", "reproduce", name, "--preset", preset]
        # A group and one of its members may both be set: the later one wins.
        assigned: dict[str, str] = {}
        for setting, value in config.get("changed", {}).items():
            lines = format_setting(setting, value)
            assigned |= {line.partition("=")[0]: line for line in lines}
        words += [word for line in assigned.values() for word in ("--set", line)]
        commands = []
        for chosen in config.get("asked") or [{}]:
            options = [word for name in chosen for word in (f"--{name}", chosen[name])]
            commands.append(shlex.join([*words, *options]))
        return " && ".join(commands)

    def report(self, measured: pl.DataFrame, out: Path, config: Mapping[str, Any]) -> Written:
        """Write the report of these measurements into `out`.

        `config` holds the sweep's settings, as in config.json.
        """
        settings = flatten({k: v for k, v in config.items() if k not in ("changed", "asked")})
        page = context(self.page, measured, settings=settings, command=self.command(config))
        return write_page(page, out, measured)


def load(path: Path) -> Study:
    """Import the file at `path` and return its `STUDY`, with the file as its source.

    The file can import modules from its folder, as a script can; installed modules come first.
    Raises `InputError` for a file that is missing, fails or defines no study.
    """
    if not path.is_file():
        raise InputError(f"the study {path} does not exist")
    spec: Any = importlib.util.spec_from_file_location(f"normattn_study_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except NormattnError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [x.lineno for x in frames if Path(x.filename).resolve() == path.resolve()]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        raise InputError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    study = getattr(module, "STUDY", None)
    if not isinstance(study, Study):
        raise InputError(f"{path} defines no STUDY = Study(…)")
    loaded = copy.copy(study)
    loaded.source = path
    return loaded


def _fill_in_command(made_by: str, config: Mapping[str, Any]) -> str:
    """The command `made_by` with its MODEL or RUN and its options taken from the settings."""
    if not {"model", "run"} & {*config}:
        return made_by
    words = [str(config.get(w.lower(), w)) if w.isupper() else w for w in made_by.split()]
    for option in ("text", "lengths", "windows"):
        setting = config.get(option)
        if option == "lengths" and setting:
            setting = ",".join(map(str, setting))
        for value in setting if isinstance(setting, list | tuple) else [setting]:
            words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join(words)


def _check_metric(
    where: str, metric: Metric, variants: Sequence[str], lengths: Sequence[int]
) -> None:
    """Raise `InputError` for a metric, variant or length that the study does not measure."""
    for term in metric.terms:
        row, length = term.where.get("row"), term.where.get("length")
        multiple = length.multiple if isinstance(length, Length) else 0
        for kind, name, known in (("metric", term.name, KNOWN), ("variant", row, variants)):
            if name is not None and name not in known:
                raise InputError(f"{where}: {unknown_name(kind, str(name), known)}")
        if multiple and lengths and multiple not in lengths:
            listed = ", ".join(map(str, lengths))
            raise InputError(f"{where}: {multiple:g} is no length of its Eval, which has {listed}")


def _as_function(items: Any) -> Callable[[View], list[Any]]:
    """Wrap a list, or a function of the measurements, as a function that returns a list."""
    return lambda view: [*(items(view) if callable(items) else items)]


def _make_sweep(
    study: str,
    variants: list[Variant],
    methods: Sequence[Method],
    evaluation: Eval | None,
    request: Request,
) -> Sweep:
    """A run for each variant and seed, evaluated with each method that its score supports."""
    overrides = None
    if evaluation is not None:
        overrides = {"multiples": evaluation.lengths, "protocols": evaluation.protocols}
    unused = [f"evaluation.{name}" for name in overrides or ()]
    setting = TextSetting.of(load_preset(request, study, Preset, unused), overrides)
    if request.variants:
        known = {variant.name: variant for variant in variants}
        variants = [known.get(name, Variant(name)) for name in request.variants]
    methods = setting.canonical_methods(request.methods or methods)
    scores = [setting.canonical_scores((v.score or v.name,))[0] for v in variants]
    applicable, skipped = setting.applicable_methods(dict.fromkeys(scores, methods))
    runs = []
    for variant, score in zip(variants, scores, strict=True):
        row = variant.name if variant.score else ""
        training = setting.training_of(score, variant.settings)
        fields = {"variant": row or score, "row": row, "score": score, "training": training}
        runs.append(setting.run(score, applicable[score], **fields))
    return setting.sweep(request, study, runs, skipped)

"""The source's window study: how wide ReRoPE's window should be, and what log-n adds to it.

A Baseline and a Baseline-logn model are trained, and read on with ReRoPE at several windows; the
first one with log-n† (switched on after training) too (kexue.fm/archives/9708).
"""

from __future__ import annotations

from pathlib import Path

from normattn.errors import InputError
from normattn.reports.records import Record
from normattn.reports.window import Reading, window_report
from normattn.score import ScoreSpec
from normattn.studies._tabulate import collected, measured_runs, say_where
from normattn.sweep.language import (
    ReadCell,
    TextConfig,
    canonical,
    checked_methods,
    described,
    opened,
    shared_training,
)
from normattn.sweep.measuring import evaluation_sets
from normattn.sweep.reading import AS_IS
from normattn.sweep.settings import WindowSettings
from normattn.sweep.study import (
    Request,
    Sweep,
    place_of,
    refuse_choices,
    seeds_of,
)

KIND = "window"
VARIANTS = ("Baseline", "Baseline-logn")
PLAIN, POST_HOC, TRAINED = "no log-n", "log-n†", "log-n trained"


class WindowConfig(TextConfig):
    """What the study's cells share: also the windows."""

    window: WindowSettings


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does.

    Only the longest of the tested lengths is read.
    """
    preset = opened(request, KIND, group=KIND)
    refuse_choices(request, KIND, variants=False)
    longest = preset.evaluation.model_copy(update={"multiples": preset.evaluation.multiples[-1:]})
    config = WindowConfig(
        preset=preset.name,
        training=shared_training(preset),
        evaluation=longest,
        window=preset.window,
    )
    cells = tuple(
        ReadCell(
            variant=variant,
            seed=seed,
            methods=_methods(variant, config),
            training=config.training,
            evaluation=config.evaluation,
        )
        for seed in seeds_of(request, preset)
        for variant in canonical(VARIANTS, config)
    )
    return Sweep(
        study=KIND,
        config=config,
        cells=cells,
        skipped=(),
        out=place_of(request, KIND, preset),
        report=report,
        describe=described(
            lambda data: evaluation_sets(data, config.train_length, config.evaluation)
        ),
        facts=config.facts,
    )


def _methods(variant: str, config: WindowConfig) -> tuple[str, ...]:
    """As is, then every window; for the model without log-n also with log-n†."""
    sizes = [max(1, round(share * config.train_length)) for share in config.window.shares]
    if len(set(sizes)) < len(sizes):
        raise InputError(
            f"window.shares give the same window twice at a training length of "
            f"{config.train_length}: {sizes}"
        )
    methods = [AS_IS, *(f"ReRoPE(window={size})" for size in sizes)]
    if ScoreSpec.parse(variant).logn is None:
        methods += ["logn+", *(f"logn+-ReRoPE(window={size})" for size in sizes)]
    return checked_methods(methods, config)


def report(out: Path) -> None:
    """Write the table and the figure of what was measured in `out`."""
    found, diverged = collected(measured_runs([out]))
    records = [record for record in found if isinstance(record, Record)]
    figures = window_report(records, diverged, _readings(records), out)
    say_where(out, len(figures))


def _readings(records: list[Record]) -> dict[str, Reading]:
    return {record.spec: _reading(ScoreSpec.parse(record.spec)) for record in records}


def _reading(spec: ScoreSpec) -> Reading:
    window = None if spec.regime is None else spec.regime.window
    if spec.logn is None:
        return Reading(PLAIN, window)
    return Reading(TRAINED if spec.logn.when == "trained-in" else POST_HOC, window)

"""`normattn extend`: evaluate a pretrained model past its training length, with every method."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import TimeRemainingColumn

from normattn.cli import model_options
from normattn.cli.engines import emit_method
from normattn.cli.extend_reading import DEFAULT_TEXT, Cell, Evaluator, Texts, prepare_texts
from normattn.cli.extend_settings import (
    ExtensionSettings,
    choose_values,
    expand_methods,
    open_parameters,
    refuse_unused,
)
from normattn.cli.failures import memory_error_in
from normattn.errors import InputError, NormattnError
from normattn.hf import extend, load, token_scorer
from normattn.io import write_directory
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.report.terminal import ProgressBar, print_report
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory
from normattn.lab.stats import Identity, MeasurementStore
from normattn.lab.studies.extend import KIND, MEASUREMENTS, STUDY, advise
from normattn.lab.sweep.planner import duration
from normattn.lab.training.distributed import choose_device
from normattn.score.spec import UNMODIFIED
from normattn.terminal import Console, show

LINES_SECONDS = 10.0
"""Seconds between two lines of progress where stderr is not a terminal."""
_QUADRATIC_FROM = 16_384
"""The tokens at which attention takes about half of the time, in small models."""
_MAX_SLOWDOWN = 4
"""The slowdown of the slowest methods, roughly."""


def extend_model(args: model_options.Extend) -> None:
    """Evaluate what `args.out` does not hold yet, write the report, and save the model on request.

    Raises `NormattnError` at the end if a method failed; other measurements are kept.
    """
    if args.emit is not None:
        emit_method(args, args.emit.lower())
        return
    methods = expand_methods(args.methods)
    refuse_unused(methods, args)
    if args.save is not None and args.save.exists():
        raise InputError(f"--save {args.save} exists already: choose a new folder")
    with Console(stderr=True).status(f"loading {args.model}"):
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
        model, tokeniser = load(args.model, args.gguf, dtype)
    model = model.to(choose_device(args.device))
    settings, texts, notes = _resolve(args, model, tokeniser)
    methods, skipped = _supported(model, methods, settings, model_options.ALL in args.methods)
    evaluator = Evaluator(model, tokeniser, token_scorer(model), texts, settings)
    if args.passkey:
        evaluator.passkey_window(settings.passes[0], 0)  # raises an error for too short a length
    plan = [
        Cell(kind, method, length, window)
        for kind in (("text", "key") if args.passkey else ("text",))  # keys take as long again
        for method in methods
        for length in settings.passes
        for window in range(settings.windows)
    ]
    out = args.out or Path("runs") / f"extend-{settings.name}"
    run = RunDirectory.open(out, settings, KIND)
    with run.lock():
        failed = _evaluate_all(run, evaluator, plan, (*notes, *skipped))
        recommended, measured = None, STUDY.measurements(out)
        if measured.height:
            print_report(out, STUDY.report(measured, out, settings.model_dump()))
            recommended = advise(View(measured)).method
        else:
            show("No length was evaluated in all its windows: nothing can be recommended.")
        if args.save is not None:
            only = methods[1] if len(methods) == 2 else None
            _save(args.save, only or recommended, model, tokeniser, settings)
    if failed:
        raise NormattnError("; ".join(failed))


def _resolve(
    args: model_options.Extend, model: Any, tokeniser: Any
) -> tuple[ExtensionSettings, Texts, tuple[str, ...]]:
    """The settings with every value, the windows, and notes on what the text is too short for."""
    train_length, lengths, _, _ = choose_values(args, model)
    text = tuple(args.text or DEFAULT_TEXT)
    passes = sorted({*lengths, train_length})
    texts, fitting, notes = prepare_texts(tokeniser, text, passes, args.windows, args.seed)
    for length in {train_length, lengths[0]}.difference(fitting):
        raise InputError(
            f"the text ({', '.join(text)}) has no room for {length:,} tokens: give more with --text"
        )
    lengths = tuple(length for length in lengths if length in fitting)
    _, _, factor, window = choose_values(args, model, lengths)
    settings = ExtensionSettings(
        model=args.model,
        gguf=args.gguf,
        text=text,
        tokens=texts.digest,
        lengths=lengths,
        windows=len(texts.ids),
        segment=max(1, min(lengths[0], train_length) // 8),
        train_length=train_length,
        factor=factor,
        window=window,
        dtype=args.dtype,
        seed=args.seed,
        weights=weights_digest(model),
    )
    return settings, texts, notes


def _extended(model: Any, method: str, settings: ExtensionSettings) -> AbstractContextManager[Any]:
    if method == UNMODIFIED:
        return nullcontext()
    parameters = {name: getattr(settings, name) for name in sorted(open_parameters(method))}
    return extend(model, method, train_length=settings.train_length, **parameters)


def _supported(
    model: Any, methods: Sequence[str], settings: ExtensionSettings, skip: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The supported methods, and a note on each other one, which raises an error unless `skip`."""
    supported, notes = [], []
    for method in methods:
        try:
            with _extended(model, method, settings):
                supported.append(method)
        except InputError as error:
            if not skip:
                raise
            notes.append(f"{method} is left out: {error}")
    if len(supported) < 2 and notes:
        raise InputError(notes[0])
    return tuple(supported), tuple(notes)


def _evaluate_all(
    run: RunDirectory, evaluator: Evaluator, plan: Sequence[Cell], notes: Sequence[str]
) -> list[str]:
    """Evaluate every cell that is not stored yet; return a sentence for each failed method."""
    store = MeasurementStore(run.path / MEASUREMENTS)
    failed: dict[str, str] = {}

    def status(state: Literal["running", "interrupted", "finished"]) -> None:
        done = sum(store.path(cell.key).exists() for cell in plan)
        run.set_status(state, done, len(plan), "; ".join(failed.values()))

    status("running")
    finished = False
    try:
        with EvaluationProgress(_cost(plan)) as progress:
            for sentence in notes:
                progress.print_line(sentence)
            for (_, method), group in groupby(plan, lambda cell: cell[:2]):
                cells = list(group)
                # A damaged record counts as missing.
                missing = [cell for cell in cells if store.get(cell.key) is None]
                progress.skip(_cost(cells) - _cost(missing))
                if missing and method not in failed:
                    failure = _evaluate_method(evaluator, store, missing, progress)
                    failed |= {method: failure} if failure else {}
        finished = not failed
    finally:
        status("finished" if finished else "interrupted")
    return list(failed.values())


def _evaluate_method(
    evaluator: Evaluator,
    store: MeasurementStore,
    missing: Sequence[Cell],
    progress: EvaluationProgress,
) -> str | None:
    """Evaluate cells of one method; return a sentence if one failed, which skips the others."""
    settings, method = evaluator.settings, missing[0].method
    with _extended(evaluator.model, method, settings) as extension:
        identity = Identity(
            study="",
            row=settings.name,
            score=UNMODIFIED if extension is None else extension.resolved.method,
            seed=settings.seed,
            method="" if extension is None else method,
            weights=settings.weights,
            settings=settings.dtype,
            split="given",
        )
        for number, cell in enumerate(missing):
            kind = "pass key" if cell.kind == "key" else "window"
            number_of = f"{kind} {cell.window + 1} of {settings.windows}"
            description = f"{method}, {cell.length:,} tokens, {number_of}"
            progress.begin(description)
            try:
                store.put(cell.key, evaluator.evaluate(cell, identity))
            except InputError:
                raise
            except (NormattnError, MemoryError, RuntimeError) as error:
                sentence = str(error)
                if not isinstance(error, NormattnError):
                    if memory_error_in(error) is None:
                        raise
                    sentence = (
                        f"out of memory with {method} at {cell.length:,} tokens: take shorter "
                        "--lengths or --dtype bf16; what was measured is kept"
                    )
                progress.skip(_cost(missing[number:]))
                progress.print_line(sentence)
                return sentence
            progress.done(_cost([cell]), description)
    return None


def _save(
    path: Path, method: str | None, model: Any, tokeniser: Any, settings: ExtensionSettings
) -> None:
    if method is None:
        raise InputError(
            f"nothing is saved to {path}: no method was better than the unmodified model; to "
            "save one anyway, name it alone, as in --methods YaRN"
        )

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokeniser.save_pretrained(folder)

    with _extended(model, method, settings):
        write_directory(path, fill)
    show(f'{path}: {method}, to be loaded by normattn.from_pretrained("{path}")')


def _cost(cells: Sequence[Cell]) -> float:
    return math.fsum(cell.length * (1 + cell.length / _QUADRATIC_FROM) for cell in cells)


class EvaluationProgress(ProgressBar):
    """A bar with the time left; a line every few seconds where stderr is not a terminal."""

    def __init__(self, total: float) -> None:
        super().__init__(TimeRemainingColumn())
        self._task = self.progress.add_task("evaluating", total=total)
        self._total, self._done = total, 0.0
        self._started = self._due = time.monotonic()

    def begin(self, description: str) -> None:
        """Show the current cell."""
        self.progress.update(self._task, description=description)

    def skip(self, amount: float) -> None:
        """Subtract work that is not done in this run."""
        self._total -= amount
        self.progress.update(self._task, total=self._total)

    def done(self, amount: float, description: str) -> None:
        """Add finished work; the first gives an estimate of the rest."""
        first, self._done = not self._done, self._done + amount
        self.progress.update(self._task, completed=self._done)
        now = time.monotonic()
        left = (now - self._started) / self._done * (self._total - self._done)
        if first and left > 0:
            self.print_line(
                f"by the first window, the rest takes about {duration(left)} to "
                f"{duration(_MAX_SLOWDOWN * left)}: methods that change attention are slower"
            )
        if not self.console.is_terminal and (left <= 0 or now >= self._due):
            self._due = now + LINES_SECONDS
            state = f"about {duration(left)} left" if left > 0 else "done"
            self.print_line(f"{description}: {state}")

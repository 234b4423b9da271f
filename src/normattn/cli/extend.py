"""`normattn extend`: a trained model evaluated beyond its training length, by every method."""

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
from normattn.cli.emit import emit_method
from normattn.cli.extend_reading import DEFAULT_TEXT, Reader, Texts, Unit, prepare_texts
from normattn.cli.extend_settings import (
    ExtensionSettings,
    choose,
    expand_methods,
    refuse_unused,
)
from normattn.cli.failures import memory_error_in
from normattn.errors import InputError, NormattnError
from normattn.hf import extend, load, token_scorer
from normattn.io import write_directory
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.report.terminal import Bar, say
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory
from normattn.lab.stats import Identity, MeasurementStore
from normattn.lab.studies.advice import advise
from normattn.lab.studies.extend import KIND, MEASUREMENTS, STUDY
from normattn.lab.sweep.planner import duration
from normattn.lab.training.distributed import choose_device
from normattn.score.spec import UNMODIFIED
from normattn.terminal import Console, show

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LINES_SECONDS = 10.0
"""Between two lines of progress where stderr is no terminal."""
_QUADRATIC_FROM = 16_384
"""Tokens at which attention takes about as long as all else, in small models."""
_SLOWER = 4
"""About how many times as long as the unmodified model the slowest methods take."""


def extend_model(asked: model_options.Extend) -> None:
    """Evaluate what is not yet on record in `asked.out`, report it, and save the model if wanted.

    Raises `InputError` for input that cannot serve, before anything is evaluated, and
    `NormattnError` at the end where a method did not fit into memory or gave no finite loss; what
    was measured stays.
    """
    if asked.emit is not None:
        emit_method(asked, asked.emit.lower())
        return
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    methods = expand_methods(asked.methods)
    refuse_unused(methods, asked)
    if asked.save is not None and asked.save.exists():
        raise InputError(f"--save {asked.save} exists already: choose a new folder")
    with Console(stderr=True).status(f"loading {asked.model}"):
        model, tokeniser = load(asked.model, asked.gguf, _DTYPES[asked.dtype])
    model = model.to(choose_device(asked.device))
    settings, texts, notes = _resolve(asked, model, tokeniser)
    methods, refused = _supported(
        model, methods, settings, everything=model_options.ALL in asked.methods
    )
    reader = Reader(model, tokeniser, token_scorer(model), texts, settings)
    plan = _plan(reader, methods, asked.passkey)
    out = asked.out or Path("runs") / f"extend-{settings.name}"
    run = RunDirectory.open(out, settings, KIND)
    with run.lock():
        failed = _read_all(run, reader, plan, (*notes, *refused))
        recommended = _report(out, settings)
        if asked.save is not None:
            only = methods[1] if len(methods) == 2 else None
            _save(asked.save, only or recommended, model, tokeniser, settings)
    if failed:
        raise NormattnError("; ".join(failed))


def _resolve(
    asked: model_options.Extend, model: Any, tokeniser: Any
) -> tuple[ExtensionSettings, Texts, tuple[str, ...]]:
    """The settings with every value, the windows, and sentences on what had no room in the text."""
    train_length, lengths, *_ = choose(asked, model)
    text = tuple(asked.text or DEFAULT_TEXT)
    texts, lengths, notes = prepare_texts(tokeniser, text, lengths, asked.windows, asked.seed)
    if lengths[-1] < train_length:
        raise InputError(
            f"the text ({', '.join(text)}) has room for {lengths[-1]:,} tokens in one window, less "
            f"than the training length of {train_length:,}: give more with --text"
        )
    settings = ExtensionSettings(
        **choose(asked, model, lengths)._asdict(),
        model=asked.model,
        gguf=asked.gguf,
        text=text,
        tokens=texts.digest,
        windows=len(texts),
        segment=max(1, min(lengths[0], train_length) // 8),
        dtype=asked.dtype,
        seed=asked.seed,
        weights=weights_digest(model),
    )
    return settings, texts, notes


def _using(model: Any, method: str, settings: ExtensionSettings) -> AbstractContextManager[Any]:
    """The model under a method, as a context."""
    if method == UNMODIFIED:
        return nullcontext()
    parameters = settings.parameters(method)
    return extend(model, method, train_length=settings.train_length, **parameters)


def _supported(
    model: Any, methods: Sequence[str], settings: ExtensionSettings, everything: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The methods that the model takes; of `all` the others are left out with a sentence."""
    kept, sentences = [], []
    for method in methods:
        try:
            with _using(model, method, settings):
                kept.append(method)
        except InputError as error:
            if not everything:
                raise
            sentences.append(f"{method} is left out: {error}")
    if len(kept) < 2 and sentences:
        raise InputError(sentences[0])
    return tuple(kept), tuple(sentences)


def _plan(reader: Reader, methods: Sequence[str], passkey: bool) -> list[Unit]:
    """Every unit that is wanted, texts before pass keys, which take as long again."""
    settings = reader.settings
    if passkey:
        reader.hidden(settings.passes[0], 0)  # Refuses a length without room before anything.
    return [
        Unit(kind, method, length, window)
        for kind in (("text", "key") if passkey else ("text",))
        for method in methods
        for length in settings.passes
        for window in range(settings.windows)
    ]


def _read_all(
    run: RunDirectory, reader: Reader, plan: Sequence[Unit], notes: Sequence[str]
) -> list[str]:
    """Evaluate every unit that is not on record; return sentences on methods that failed."""
    store = MeasurementStore(run.path / MEASUREMENTS)
    failed: dict[str, str] = {}

    def status(state: Literal["running", "interrupted", "finished"]) -> None:
        done = sum(store.path(unit.key).exists() for unit in plan)
        run.set_status(state, done, len(plan), "; ".join(failed.values()))

    status("running")
    finished = False
    try:
        with ReadingProgress(_work(plan)) as progress:
            for sentence in notes:
                progress.say(sentence)
            for (_, method), group in groupby(plan, lambda unit: unit[:2]):
                units = list(group)
                # A damaged record is made again.
                missing = [unit for unit in units if store.get(unit.key) is None]
                progress.skip(_work(units) - _work(missing))
                if missing and method not in failed:
                    failure = _read_method(reader, store, missing, progress)
                    failed |= {method: failure} if failure else {}
        finished = not failed
    finally:
        status("finished" if finished else "interrupted")
    return list(failed.values())


def _read_method(
    reader: Reader, store: MeasurementStore, missing: Sequence[Unit], progress: ReadingProgress
) -> str | None:
    """Evaluate units of one method; a sentence where it failed, whose rest is left out."""
    settings, method = reader.settings, missing[0].method
    with _using(reader.model, method, settings) as extension:
        whose = Identity(
            study="",
            row=settings.name,
            score=UNMODIFIED if extension is None else extension.resolved.method,
            seed=settings.seed,
            method="" if extension is None else method,
            weights=settings.weights,
            settings=settings.dtype,
            split="given",
        )
        for number, unit in enumerate(missing):
            thing = "pass key" if unit.kind == "key" else "window"
            place = f"{thing} {unit.window + 1} of {settings.windows}"
            description = f"{method}, {unit.length:,} tokens, {place}"
            progress.begin(description)
            try:
                store.put(unit.key, reader.read(unit, whose))
            except InputError:
                raise
            except (NormattnError, MemoryError, RuntimeError) as error:
                sentence = str(error)
                if not isinstance(error, NormattnError):
                    if memory_error_in(error) is None:
                        raise
                    sentence = (
                        f"out of memory with {method} at {unit.length:,} tokens: take shorter "
                        "--lengths or --dtype bf16; what was measured is kept"
                    )
                progress.skip(_work(missing[number:]))
                progress.say(sentence)
                return sentence
            progress.done(_work([unit]), description)
    return None


def _report(out: Path, settings: ExtensionSettings) -> str | None:
    """Write the page of what was measured, print it in short; return the recommended method."""
    measured = STUDY.measurements(out)
    if not measured.height:
        show("No length was evaluated in all its windows: nothing can be recommended.")
        return None
    written = STUDY.report(measured, out, settings.model_dump())
    say(out, written)
    return advise(View(measured)).method


def _save(
    place: Path, method: str | None, model: Any, tokeniser: Any, settings: ExtensionSettings
) -> None:
    """Write the model under a method, for `normattn.from_pretrained`."""
    if method is None:
        raise InputError(
            f"nothing is saved to {place}: no method was better than the unmodified model; to "
            "save one anyway, name it alone, as in --methods YaRN"
        )

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokeniser.save_pretrained(folder)

    with _using(model, method, settings):
        write_directory(place, fill)
    show(f'{place}: {method}, to be loaded by normattn.from_pretrained("{place}")')


def _work(units: Sequence[Unit]) -> float:
    """About how much these units cost, in tokens of a short window."""
    return math.fsum(unit.length * (1 + unit.length / _QUADRATIC_FROM) for unit in units)


class ReadingProgress(Bar):
    """A bar with the time left; where stderr is no terminal, a line now and then."""

    def __init__(self, total: float) -> None:
        super().__init__(TimeRemainingColumn())
        self._task = self.progress.add_task("evaluating", total=total)
        self._total, self._done = total, 0.0
        self._started = self._due = time.monotonic()

    def begin(self, description: str) -> None:
        """Name the present unit."""
        self.progress.update(self._task, description=description)

    def skip(self, amount: float) -> None:
        """Leave out work that was done before, or that is not done at all."""
        self._total -= amount
        self.progress.update(self._task, total=self._total)

    def done(self, amount: float, description: str) -> None:
        """Count work that was measured just now; the first gives the estimate of the whole."""
        first, self._done = not self._done, self._done + amount
        self.progress.update(self._task, completed=self._done)
        now = time.monotonic()
        left = (now - self._started) / self._done * (self._total - self._done)
        if first and left > 0:
            self.say(
                f"by the first window, the rest takes about {duration(left)} to "
                f"{duration(_SLOWER * left)}: methods that change attention are slower"
            )
        if not self.console.is_terminal and (left <= 0 or now >= self._due):
            self._due = now + LINES_SECONDS
            self.say(f"{description}: " + (f"about {duration(left)} left" if left > 0 else "done"))

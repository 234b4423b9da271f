"""`normattn extend`: a trained model read beyond its training length, by every method asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import TextColumn

from normattn.cli.extension_reading import OutOfMemoryError, Reader, Unit
from normattn.cli.extension_settings import (
    ALL,
    AS_IS,
    ExtensionSettings,
    chosen_factor,
    chosen_window,
    default_lengths,
    parameters_of,
    parse_lengths,
    parse_methods,
    refuse_unused,
    trained_length,
)
from normattn.cli.extension_texts import DEFAULT_TEXT, Texts, prepare_texts
from normattn.cli.options.extend import ExtendOptions
from normattn.errors import InputError, NormattnError
from normattn.hf import extend, load, token_scorer
from normattn.hf.native import take_record
from normattn.hf.tiny_model import read_configuration, small_model
from normattn.io import expanded, write_directory
from normattn.lab.evaluation import weights_digest
from normattn.lab.report.terminal import Bar, say
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory
from normattn.lab.stats import Identity, MeasurementStore
from normattn.lab.studies.advice import Advice, advise
from normattn.lab.studies.extend import KIND, MEASUREMENTS, STUDY
from normattn.lab.sweep.planner import duration
from normattn.lab.training.distributed import choose_device
from normattn.terminal import show

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_QUADRATIC_FROM = 16_384
"""Tokens at which attention takes about as long as all else, in small models."""


def extend_model(asked: ExtendOptions) -> Advice:
    """Read what is not yet on record in `asked.out`, report it all, and save the model if asked to.

    Returns the advice. Raises `InputError` for input that cannot serve, before anything is read,
    and `NormattnError` at the end where a method did not fit into memory or lost its numbers; what
    was read stays.
    """
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    name = Path(asked.gguf or asked.model).name.removesuffix(".gguf")
    out = asked.out or Path("runs") / f"extend-{name}"
    methods = parse_methods(asked.methods)
    lengths = None if asked.lengths is None else parse_lengths(asked.lengths)
    refuse_unused(methods, asked.factor, asked.window)
    _check_saving(asked, methods)
    _check_configuration(asked, lengths)
    model, tokeniser = load(asked.model, asked.gguf, _DTYPES[asked.dtype])
    model = model.to(choose_device(asked.device))
    settings, texts, notes = _resolve(asked, model, tokeniser, lengths)
    methods, refused = _served(model, methods, settings, everything=ALL in asked.methods)
    reader = Reader(model, tokeniser, token_scorer(model), texts, settings)
    plan = _plan(reader, methods, asked.passkey)
    run = RunDirectory.open(out, settings, KIND)
    with run.lock():
        failed = _read_all(run, reader, plan, (*notes, *refused))
        advice = _report(out, settings)
        _save(asked, model, tokeniser, settings, advice)
    if failed:
        raise NormattnError("; ".join(failed))
    return advice


def _check_configuration(asked: ExtendOptions, lengths: tuple[int, ...] | None) -> None:
    """Refuse what a GGUF's header or a config.json rules out, before any weight is loaded.

    The configuration of a name on the hub comes with its weights and is checked after them.
    """
    source = expanded(asked.model) if asked.gguf is None else expanded(asked.model) / asked.gguf
    if not source.exists():
        return
    config = read_configuration(source)
    take_record(config, source)  # A model saved under a method is read as it was trained.
    length = asked.train_length or trained_length(small_model(config))
    chosen_window(asked.window, length)
    chosen_factor(asked.factor, (lengths or default_lengths(length))[-1], length)


def _resolve(
    asked: ExtendOptions, model: Any, tokeniser: Any, lengths: tuple[int, ...] | None
) -> tuple[ExtensionSettings, Texts, tuple[str, ...]]:
    """The settings with every value, the windows, and sentences on what had no room in the text."""
    train_length = asked.train_length or trained_length(model)
    lengths = lengths or default_lengths(train_length)
    window = chosen_window(asked.window, train_length)
    chosen_factor(asked.factor, lengths[-1], train_length)
    text = tuple(asked.text or DEFAULT_TEXT)
    texts, lengths, notes = prepare_texts(tokeniser, text, lengths, asked.windows, asked.seed)
    if lengths[-1] < train_length:
        raise InputError(
            f"the text ({', '.join(text)}) has room for {lengths[-1]:,} tokens in one window, less "
            f"than the training length of {train_length:,}: give more with --text"
        )
    settings = ExtensionSettings(
        model=asked.model,
        gguf=asked.gguf,
        text=text,
        tokens=texts.digest,
        lengths=lengths,
        windows=len(texts),
        segment=_segment(asked.segment, min(lengths[0], train_length), len(texts.prefix)),
        train_length=train_length,
        factor=chosen_factor(asked.factor, lengths[-1], train_length),
        window=window,
        dtype=asked.dtype,
        seed=asked.seed,
        weights=weights_digest(model),
    )
    return settings, texts, notes


def _segment(segment: int | None, shortest: int, prefix: int) -> int:
    """The scored last tokens: an eighth of the shortest length that is read, unless said."""
    if segment is None:
        return max(1, shortest // 8)
    if not 1 <= segment <= shortest - prefix:
        raise InputError(
            f"--segment {segment:,} must lie between 1 and the shortest length read, "
            f"{shortest - prefix:,}"
        )
    return segment


def _served(
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


def _using(model: Any, method: str, settings: ExtensionSettings) -> Any:
    """The model under a method, as a context."""
    if method == AS_IS:
        return nullcontext()
    parameters = parameters_of(method, settings)
    return extend(model, method, train_length=settings.train_length, **parameters)


def _plan(reader: Reader, methods: Sequence[str], passkey: bool) -> list[Unit]:
    """Every unit that is wanted, texts before pass keys, which take as long again."""
    settings = reader.settings
    if passkey:
        reader.hidden(settings.passes[0], 0)  # Refuses a length without room before anything.
    kinds = ("text", "key") if passkey else ("text",)
    return [
        Unit(kind, method, length, window)
        for kind in kinds
        for method in methods
        for length in settings.passes
        for window in range(settings.windows)
    ]


def _read_all(
    run: RunDirectory, reader: Reader, plan: Sequence[Unit], notes: Sequence[str]
) -> list[str]:
    """Every unit that is not on record; sentences on methods that failed."""
    store = MeasurementStore(run.path / MEASUREMENTS)

    def status(state: Literal["running", "interrupted", "finished"], message: str = "") -> None:
        run.set_status(
            state, sum(store.path(unit.key).exists() for unit in plan), len(plan), message
        )

    status("running")
    failed: dict[str, str] = {}
    try:
        with ReadingProgress(math.fsum(work(unit.length) for unit in plan)) as progress:
            for sentence in notes:
                progress.say(sentence)
            for (_, method), group in groupby(plan, lambda unit: unit[:2]):
                mine = [unit for unit in group if method not in failed]
                failure = _read_method(reader, store, mine, progress) if mine else None
                if failure is not None:
                    failed[method] = failure
    except BaseException:
        status("interrupted")
        raise
    status("interrupted" if failed else "finished", "; ".join(failed.values()))
    return list(failed.values())


def _read_method(
    reader: Reader, store: MeasurementStore, plan: Sequence[Unit], progress: ReadingProgress
) -> str | None:
    """Read what is missing of one method; a sentence where it failed, whose rest is left out."""
    missing = [unit for unit in plan if not _has(store, unit)]
    progress.skip(math.fsum(work(unit.length) for unit in plan if unit not in missing))
    if not missing:
        return None
    settings = reader.settings
    with _using(reader.model, missing[0].method, settings) as extension:
        cell = _cell(extension, missing[0].method, settings)
        for number, unit in enumerate(missing):
            description = _described(unit, settings)
            progress.begin(description)
            try:
                store.put(unit.key, reader.read(unit, cell))
            except NormattnError as error:
                if isinstance(error, InputError):
                    raise
                progress.skip(math.fsum(work(unit.length) for unit in missing[number:]))
                sentence = _failure(error, unit, settings, store)
                progress.say(sentence)
                return sentence
            progress.done(work(unit.length), description)
    return None


def _described(unit: Unit, settings: ExtensionSettings) -> str:
    thing = "pass key" if unit.kind == "key" else "window"
    return f"{unit.method}, {unit.length:,} tokens, {thing} {unit.window + 1} of {settings.windows}"


def _failure(
    error: NormattnError, unit: Unit, settings: ExtensionSettings, store: MeasurementStore
) -> str:
    """What failed, and for memory what would fit."""
    if not isinstance(error, OutOfMemoryError):
        return str(error)
    method, length = unit.method, unit.length
    shorter = [tokens for tokens in settings.passes if tokens < length]
    read = [tokens for tokens in shorter if _has(store, unit._replace(length=tokens, window=0))]
    fits = f"{read[-1]:,} tokens fit" if read else f"try --lengths {max(2, length // 2)}"
    half = " or --dtype bf16" if settings.dtype == "fp32" else ""
    return f"out of memory with {method} at {length:,} tokens: {fits}{half}; what was read is kept"


def _cell(extension: Any, method: str, settings: ExtensionSettings) -> Identity:
    """Whose readings they are: the method as it was asked for, and with its parameters."""
    name = Path(settings.gguf or settings.model).name.removesuffix(".gguf")
    return Identity(
        study="",
        row=name,
        score=AS_IS if extension is None else extension.resolved.method,
        seed=settings.seed,
        method="" if extension is None else method,
        weights=settings.weights,
        settings=settings.dtype,
        split="given",
    )


def _has(store: MeasurementStore, unit: Unit) -> bool:
    """Whether a unit is done; a damaged one is done again."""
    return store.get(unit.key) is not None


def _report(out: Path, settings: ExtensionSettings) -> Advice:
    """Write the page of what was read, print it in short, and return what is advised."""
    measured = STUDY.measurements(out)
    if not measured.height:
        nothing = "No length was read in all its windows: nothing can be advised."
        show(nothing)
        return Advice((nothing,), None)
    written = STUDY.report(measured, out, settings.model_dump())
    advice = advise(View(measured))
    say(out, replace(written, summary=advice.sentences))
    return advice


def _check_saving(asked: ExtendOptions, methods: Sequence[str]) -> None:
    """Refuse before hours of reading what could not be saved after them."""
    if asked.save_method is not None:
        if asked.save is None:
            raise InputError("--save-method names what --save writes: give --save DIR too")
        if asked.save_method not in methods[1:]:
            raise InputError(f"--save-method {asked.save_method!r} is not one of --methods")
    if asked.save is not None and asked.save.exists():
        raise InputError(f"--save {asked.save} exists already: name a new folder")


def _save(
    asked: ExtendOptions, model: Any, tokeniser: Any, settings: ExtensionSettings, advice: Advice
) -> None:
    """The model under the method that was named or advised, for `normattn.from_pretrained`."""
    if asked.save is None:
        return
    method = asked.save_method or advice.method
    if method is None:
        raise InputError(
            f"nothing is saved to {asked.save}: no method was found better than the model as it "
            "is; --save-method NAME saves one all the same"
        )

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokeniser.save_pretrained(folder)

    with _using(model, method, settings):
        write_directory(asked.save, fill)
    show(f'{asked.save}: {method}, to be loaded by normattn.from_pretrained("{asked.save}")')


def work(length: int) -> float:
    """About how much a window of `length` tokens costs, in tokens of a short one."""
    return length * (1 + length / _QUADRATIC_FROM)


class ReadingProgress(Bar):
    """A bar, or lines where stderr is no terminal, with the time left by the windows so far."""

    def __init__(self, total: float) -> None:
        super().__init__(TextColumn(" {task.fields[left]}"))
        self._task = self.progress.add_task("reading", total=total, left="")
        self._total, self._done, self._measured = total, 0.0, 0.0
        self._started = time.monotonic()

    def begin(self, description: str) -> None:
        """Say what is being read."""
        self.progress.update(self._task, description=description)

    def skip(self, amount: float) -> None:
        """Count work that was done before, or that is left out."""
        self._done += amount
        self.progress.update(self._task, completed=self._done)

    def done(self, amount: float, description: str) -> None:
        """Count work that was measured just now; the first gives the estimate of the whole."""
        first, self._done = not self._measured, self._done + amount
        self._measured += amount
        rate = (time.monotonic() - self._started) / self._measured
        over = self._done >= self._total
        left = "" if over else f"about {duration(rate * (self._total - self._done))} left"
        self.progress.update(self._task, completed=self._done, left=left)
        if first and not over:
            self.say(f"by the first window, the rest takes {left.removesuffix(' left')}")
        if not self.console.is_terminal:
            self.say(f"{description}: {left or 'done'}")

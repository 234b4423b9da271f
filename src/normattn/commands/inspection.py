"""One trained model looked into: tables, figures and a record of every layer's attention."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from torch import nn

from normattn.atomic import write_json
from normattn.commands.inspection_figures import (
    attention_figure,
    layer_figures,
    layer_titles,
    position_figure,
    training_figure,
    write_figures,
)
from normattn.commands.inspection_inputs import Asked, Inputs, inputs_of
from normattn.commands.inspection_table import print_layers
from normattn.diagnostics import inspect_model
from normattn.diagnostics.records import (
    InspectionRecord,
    read_diagnostics,
    write_inspection,
)
from normattn.diagnostics.weights import MOST_TOKENS, attention_weights
from normattn.errors import InputError
from normattn.models import CausalLM
from normattn.models.pretrained import load_any
from normattn.models.stack_config import StackConfig
from normattn.models.translator_config import TranslatorConfig, placeless
from normattn.runs import RunDirectory, read_status
from normattn.training import (
    LoopConfig,
    TrainingConfig,
    causal,
    classification,
    masked,
    translation,
    vision,
)
from normattn.training.distribution import choose_device

KINDS: dict[str, type[LoopConfig]] = {
    workload.kind: workload.config_class
    for workload in (
        causal.CausalWorkload,
        masked.MaskedWorkload,
        classification.ClassificationWorkload,
        translation.TranslationWorkload,
        vision.VisionWorkload,
    )
}
FOLDER, RECORD, SETTINGS = "inspection", "inspection.json", "settings.json"
DRAWN_HEADS = 64


class InspectionSettings(BaseModel):
    """What is looked at; the resolved whole is written beside what was found.

    text: a file, or None for the run's own held-out data. length: tokens of a window, or of the
    longest text. windows: how many windows, texts, pairs or images, at most. attention: "sharpest",
    "all", or LAYER,HEAD, each counted from 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run: str
    text: str | None = None
    method: str = "as is"
    length: int = Field(ge=1)
    windows: int = Field(ge=1)
    bins: int = Field(ge=1)
    cosines: bool = False
    attention: str = "sharpest"
    max_tokens: int = Field(ge=1)
    seed: int = Field(ge=0)


def inspect_run(
    run: Path,
    *,
    text: Path | None,
    method: str,
    length: int | None,
    windows: int,
    bins: int,
    cosines: bool,
    attention: str,
    out: Path | None,
    as_json: bool,
    max_tokens: int,
    seed: int,
    threads: int,
) -> None:
    """Look into the finished run in the directory `run`, and print and draw what is found.

    Raises `InputError` for a directory that holds no finished run, a method that its score cannot
    take, a head that is not there, and data that is gone or too short.
    """
    config = _opened(run)
    chosen = _chosen(attention, config)
    _check_method(method, config)
    torch.set_num_threads(threads)
    expected = config.model  # type: ignore[attr-defined]
    model = load_any(run / "model", expected).to(choose_device(config.device))
    inputs = inputs_of(config, Asked(run, text, length, windows, seed), model)
    settings = InspectionSettings(
        run=str(run),
        text=None if text is None else str(text),
        method=method,
        length=inputs.length,
        windows=windows,
        bins=bins,
        cosines=cosines,
        attention=attention,
        max_tokens=max_tokens,
        seed=seed,
    )
    folder = _folder(run / FOLDER if out is None else out)
    with _using(model, method, config, inputs.length):
        record = _look(model, inputs, settings, config)
        shown = _attention(model, inputs, chosen, record)
    write_json(folder / SETTINGS, settings.model_dump())
    write_inspection(folder / RECORD, record)
    figures = _figures(run, folder, record, shown, inputs, settings)
    if as_json:
        print(json.dumps(record.model_dump(mode="json")))
    else:
        print_layers(record)
        for path in (folder / RECORD, *figures):
            print(path)


def _opened(run: Path) -> LoopConfig:
    stored = RunDirectory.existing(run)
    if stored.kind not in KINDS:
        known = f"{', '.join(map(repr, [*KINDS][:-1]))} or {[*KINDS][-1]!r}"
        raise InputError(
            f"{run} holds a run of kind {stored.kind!r}; inspect looks into one of kind {known}"
        )
    status = read_status(run)
    if status is None or status.state != "finished":
        state = f"is {status.state} at step {status.step}" if status else "has not begun"
        raise InputError(f"the run in {run} {state}; only a finished run can be looked into")
    return KINDS[stored.kind].parse(stored.config, str(run / "config.json"))


def _check_method(method: str, config: LoopConfig) -> None:
    if method != "as is" and not isinstance(config, TrainingConfig):
        raise InputError(f"--method {method} is for causal language models, which read on with it")


def _using(
    model: nn.Module, method: str, config: LoopConfig, length: int
) -> AbstractContextManager[Any]:
    if method == "as is":
        return nullcontext()
    assert isinstance(model, CausalLM)
    trained = model.config.train_length
    spec = model.config.score.with_method(method)
    return model.using(spec.resolve(train_length=trained, factor=max(1.0, length / trained)))


def _chosen(attention: str, config: LoopConfig) -> tuple[int, int] | Literal["sharpest", "all"]:
    """The head whose attention is drawn."""
    if attention == "sharpest":
        return "sharpest"
    if attention == "all":
        return "all"
    model = _model(config)
    layers, heads = model.layers, model.heads
    if isinstance(model, TranslatorConfig):
        # Of a decoder's layer each attention counts: its own, then that to the source.
        layers += 2 * model.decoder.layers
    parts = attention.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(
            f"--attention takes LAYER,HEAD (each from 0), all or sharpest, got {attention!r}"
        )
    layer, head = (int(part) for part in parts)
    if layer >= layers or head >= heads:
        raise InputError(
            f"--attention {attention}: this model has layers 0 to {layers - 1} and heads 0 to "
            f"{heads - 1}"
        )
    return layer, head


def _model(config: LoopConfig) -> StackConfig:
    model: StackConfig = getattr(config, "model")  # noqa: B009
    return model


def _score_names(model: StackConfig) -> str:
    """The score, or those of the three attentions where they differ."""
    if not isinstance(model, TranslatorConfig):
        return model.score.name
    assert model.decoder_score is not None
    names = (model.score.name, model.decoder_score.name, model.across.name)
    if names[0] == names[1] and model.across == placeless(model.score).resolve(
        train_length=model.train_length
    ):
        return names[0]
    return "{} (encoder), {} (decoder), {} (cross)".format(*names)


def _look(
    model: nn.Module, inputs: Inputs, settings: InspectionSettings, config: LoopConfig
) -> InspectionRecord:
    rows = inputs.rows.to(next(model.parameters()).device)
    with Console(file=sys.stderr).status("looking") as status:
        return inspect_model(
            model,
            rows,
            bins=settings.bins,
            cosines=settings.cosines,
            tokens_per_batch=settings.max_tokens,
            read=inputs.read,
            length=inputs.length,
            progress=lambda done, total: status.update(f"looking: text {done} of {total}"),
            score=_score_names(_model(config)),
            method=settings.method,
            train_length=_model(config).train_length,
            texts=inputs.source,
        )


class Head(NamedTuple):
    """One head's attention to the drawn text: (layer, head), its name, its layer's path, and α."""

    place: tuple[int, int]
    name: str
    layer: str
    alpha: np.ndarray


def _attention(
    model: nn.Module,
    inputs: Inputs,
    chosen: tuple[int, int] | Literal["sharpest", "all"],
    record: InspectionRecord,
) -> list[Head]:
    """What is drawn of the first text."""
    if inputs.drawn_length > MOST_TOKENS:
        print(
            f"normattn: no attention is drawn, for {inputs.drawn_length} tokens make too large a "
            f"matrix (the most is {MOST_TOKENS})",
            file=sys.stderr,
        )
        return []
    row = inputs.drawn.to(next(model.parameters()).device)
    found = attention_weights(model, row, inputs.read, inputs.drawn_length)
    weights = [found[layer.name] for layer in record.layers]
    every = [(layer, head) for layer, each in enumerate(weights) for head in range(each.shape[0])]
    if chosen == "all":
        if len(every) > DRAWN_HEADS:
            raise InputError(
                f"--attention all draws up to {DRAWN_HEADS} heads, and this model has "
                f"{len(every)}; name one as LAYER,HEAD"
            )
        wanted = every
    else:
        wanted = [_sharpest(record) if chosen == "sharpest" else chosen]
    titles = layer_titles([layer.name for layer in record.layers])
    return [
        Head(
            (layer, head),
            f"layer {titles[layer]}, head {head}",
            record.layers[layer].name,
            weights[layer][head].double().numpy(),
        )
        for layer, head in wanted
    ]


def _sharpest(record: InspectionRecord) -> tuple[int, int]:
    """The head with the least entropy against ln n."""
    shares = [
        (share, layer, head)
        for layer, found in enumerate(record.layers)
        for head, share in enumerate(found.by_head("entropy_share"))
        if share is not None
    ]
    return min(shares)[1:] if shares else (0, 0)


def _figures(
    run: Path,
    folder: Path,
    record: InspectionRecord,
    shown: Sequence[Head],
    inputs: Inputs,
    settings: InspectionSettings,
) -> list[Path]:
    name = f"{record.facts['score']}" + (
        "" if settings.method == "as is" else f" with {settings.method}"
    )
    title = f"{name}: {record.facts['texts']}"
    figures = [
        *layer_figures(record, f"Attention of {title}"),
        position_figure(record, f"Attention by position, {title}"),
        training_figure(read_diagnostics(run), f"Attention while {name} trained"),
    ]
    for head in shown:
        file = "attention" if len(shown) == 1 else f"attention_{head.place[0]}_{head.place[1]}"
        words = inputs.words(head.layer)
        figures.append(attention_figure(file, f"{name}: {head.name}", head.alpha, words))
    return write_figures(figures, folder)


def _folder(place: Path) -> Path:
    """The directory, made before anything is read; `InputError` where it cannot be."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{place} is a file; --out names a directory") from error
    except OSError as error:
        raise InputError(f"{place} cannot be made: {error.strerror}") from error
    return place

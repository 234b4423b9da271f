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
from torch import Tensor, nn

from normattn.atomic import write_json
from normattn.data.evaluation_sets import choose_places
from normattn.data.tokeniser import Tokeniser
from normattn.data.tokens import prepare_tokens
from normattn.diagnostics import inspect_model
from normattn.diagnostics.weights import attention_weights
from normattn.errors import InputError
from normattn.models import CausalLM
from normattn.models.pretrained import load_any
from normattn.recipes.inspection_table import print_layers
from normattn.reports.diagnostics_records import (
    InspectionRecord,
    read_diagnostics,
    write_inspection,
)
from normattn.reports.figures.inspection import (
    draw_attention,
    draw_layers,
    draw_positions,
    draw_training,
)
from normattn.runs import RunDirectory, read_status
from normattn.training import TrainingConfig, causal, masked
from normattn.training.distribution import choose_device
from normattn.training.masked import MaskedConfig

Config = TrainingConfig | MaskedConfig
KINDS: dict[str, type[TrainingConfig] | type[MaskedConfig]] = {
    causal.CausalWorkload.kind: TrainingConfig,
    masked.MaskedWorkload.kind: MaskedConfig,
}
FOLDER, RECORD, SETTINGS = "inspection", "inspection.json", "settings.json"
DRAWN_TOKENS, DRAWN_HEADS = 64, 64


class InspectionSettings(BaseModel):
    """What is looked at; the resolved whole is written beside what was found.

    text: a file, or None for the run's own held-out text. length: tokens of a window. windows:
    how many, at most. attention: "sharpest", "all", or LAYER,HEAD, each counted from 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class Texts(NamedTuple):
    """Windows of token ids (B, T), and where they are from."""

    ids: Tensor
    source: str


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

    Raises `InputError` for a directory that holds no finished run of a model that reads text, a
    method that its score cannot take, a head that is not there, a text that is too short.
    """
    config = _opened(run)
    settings = InspectionSettings(
        run=str(run),
        text=None if text is None else str(text),
        method=method,
        length=_default_length(config) if length is None else length,
        windows=windows,
        bins=bins,
        cosines=cosines,
        attention=attention,
        max_tokens=max_tokens,
        seed=seed,
    )
    chosen = _chosen(attention, config)
    device = choose_device(config.device)
    tokeniser = _tokeniser(run, config)
    texts = _texts(config, settings, tokeniser)
    torch.set_num_threads(threads)
    model = load_any(run / "model").to(device)
    folder = _folder(run / FOLDER if out is None else out)
    with _using(model, method, config, texts.ids.shape[1]):
        record = _look(model, texts, settings, config)
        shown = _attention(model, texts.ids, chosen, record)
    write_json(folder / SETTINGS, settings.model_dump())
    write_inspection(folder / RECORD, record)
    figures = _figures(run, folder, record, shown, texts, tokeniser, settings)
    if as_json:
        print(json.dumps(record.model_dump(mode="json")))
    else:
        print_layers(record)
        for path in (folder / RECORD, *figures):
            print(path)


def _opened(run: Path) -> Config:
    stored = RunDirectory.existing(run)
    if stored.kind not in KINDS:
        raise InputError(
            f"{run} holds a run of kind {stored.kind!r}; inspect reads text with one of kind "
            f"{' or '.join(map(repr, KINDS))} (for any other model: normattn.diagnostics)"
        )
    status = read_status(run)
    if status is None or status.state != "finished":
        state = f"is {status.state} at step {status.step}" if status else "has not begun"
        raise InputError(f"the run in {run} {state}; only a finished run can be looked into")
    return KINDS[stored.kind].parse(stored.config, str(run / "config.json"))


def _default_length(config: Config) -> int:
    return config.model.train_length


def _tokeniser(run: Path, config: Config) -> Tokeniser | None:
    return None if config.data.synthetic else Tokeniser.load(run / "tokeniser.json")


def _texts(config: Config, settings: InspectionSettings, tokeniser: Tokeniser | None) -> Texts:
    """Windows of the given file, or of documents that the run did not train on."""
    length = settings.length
    if settings.text is None:
        split = prepare_tokens(config.data).split("test")
        places = choose_places(split, length, settings.windows, settings.seed)
        spans = [(number, slice(first, first + length)) for number, first in places.tolist()]
        rows = [split.document(number)[span] for number, span in spans]
        source = f"{len(rows)} windows of {length:,} held-out tokens of {config.data.corpus}"
        return Texts(torch.from_numpy(np.stack(rows).astype(np.int64)), source)
    path = Path(settings.text)
    if tokeniser is None:
        raise InputError(
            f"the run in {settings.run} was trained on the generated tokens of "
            f"{config.data.corpus}: it has no tokeniser, and so cannot read {path}"
        )
    ids = tokeniser.encode(_read(path))
    if len(ids) < 2:
        raise InputError(f"{path} has {len(ids)} tokens; there is nothing to attend to")
    length = min(length, len(ids))
    count = min(settings.windows, len(ids) // length)
    source = f"{count} windows of {length:,} tokens of {path.name}"
    return Texts(torch.tensor(ids[: count * length]).view(count, length), source)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _using(
    model: nn.Module, method: str, config: Config, length: int
) -> AbstractContextManager[Any]:
    if method == "as is":
        return nullcontext()
    if not isinstance(model, CausalLM):
        raise InputError(f"--method {method} is for causal language models, which read on with it")
    trained = config.model.train_length
    spec = config.model.score.with_method(method)
    return model.using(spec.resolve(train_length=trained, factor=max(1.0, length / trained)))


def _chosen(attention: str, config: Config) -> tuple[int, int] | Literal["sharpest", "all"]:
    """The head whose attention is drawn."""
    if attention == "sharpest":
        return "sharpest"
    if attention == "all":
        return "all"
    layers, heads = config.model.layers, config.model.heads
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


def _look(
    model: nn.Module, texts: Texts, settings: InspectionSettings, config: Config
) -> InspectionRecord:
    ids = texts.ids.to(next(model.parameters()).device)
    with Console(file=sys.stderr).status("looking") as status:
        return inspect_model(
            model,
            ids,
            bins=settings.bins,
            cosines=settings.cosines,
            tokens_per_batch=settings.max_tokens,
            progress=lambda done, total: status.update(f"looking: text {done} of {total}"),
            score=config.model.score.name,
            method=settings.method,
            train_length=config.model.train_length,
            texts=texts.source,
        )


def _attention(
    model: nn.Module,
    ids: Tensor,
    chosen: tuple[int, int] | Literal["sharpest", "all"],
    record: InspectionRecord,
) -> list[tuple[int, int, np.ndarray]]:
    """(layer, head, α) of what is drawn, for the first tokens of the first text."""
    device = next(model.parameters()).device
    weights = list(attention_weights(model, ids[0, :DRAWN_TOKENS].to(device)).values())
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
    return [(layer, head, weights[layer][head].double().numpy()) for layer, head in wanted]


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
    shown: Sequence[tuple[int, int, np.ndarray]],
    texts: Texts,
    tokeniser: Tokeniser | None,
    settings: InspectionSettings,
) -> list[Path]:
    name = f"{record.facts['score']}" + (
        "" if settings.method == "as is" else f" with {settings.method}"
    )
    title = f"{name}: {record.facts['texts']}"
    paths = draw_layers(record, folder, f"Attention of {title}")
    paths += draw_positions(record, folder, f"Attention by position, {title}")
    paths += draw_training(read_diagnostics(run), folder, f"Attention while {name} trained")
    ids = texts.ids[0, :DRAWN_TOKENS].tolist()
    tokens = [str(i) if tokeniser is None else tokeniser.decode([i]) for i in ids]
    panels = [(f"layer {layer}, head {head}", alpha) for layer, head, alpha in shown]
    what = panels[0][0] if len(panels) == 1 else "every head"
    paths += draw_attention(panels, tokens, folder, f"{name}: attention of {what}")
    return [path for path in paths if path.suffix == ".png"]


def _folder(place: Path) -> Path:
    """The directory, made before anything is read; `InputError` where it cannot be."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{place} is a file; --out names a directory") from error
    except OSError as error:
        raise InputError(f"{place} cannot be made: {error.strerror}") from error
    return place

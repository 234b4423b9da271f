"""One trained model looked into: what every layer's attention does, measured and reported."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from normattn.cli.inspection_inputs import Inputs, folder_of, inputs_of
from normattn.cli.options.inspect import InspectOptions
from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.diagnostics import collecting, inspect_model, layer_names
from normattn.lab.diagnostics.angles import Stage
from normattn.lab.diagnostics.attention import MOST_TOKENS, attention_weights
from normattn.lab.diagnostics.inspection import Collecting, by_head
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.report.terminal import print_table, say
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory, require_finished
from normattn.lab.stats import Identity, identified, joined, sums
from normattn.lab.studies.inspect import DRAWN, KEY, KIND, QUERY, STUDY, TRAINING
from normattn.lab.training import LoopConfig, TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.tasks import classification, text, translation, vision
from normattn.models import CausalLM
from normattn.models.config import StackConfig, TranslatorConfig, without_position
from normattn.models.pretrained import load_any
from normattn.terminal import Console, warn

KINDS: dict[str, type[LoopConfig]] = {
    workload.kind: workload.config_class
    for workload in (
        text.CausalWorkload,
        text.MaskedWorkload,
        classification.ClassificationWorkload,
        translation.TranslationWorkload,
        vision.VisionWorkload,
    )
}
FOLDER, CONFIG = "inspection", "config.json"
DRAWN_HEADS = 64
_NOT_KEPT = ("out", "as_json", "threads", "device")
"""Options that no measurement depends on."""


def is_foreign(path: Path) -> bool:
    """Whether a place holds a model of transformers: a GGUF file, or a folder of its own."""
    if path.is_dir() and (path / CONFIG).is_file():
        return "model_type" in read_object(path / CONFIG)
    return path.suffix == ".gguf"


def inspect_run(asked: InspectOptions) -> None:
    """Look into the finished run in the directory `asked.run`, and print and draw what is found.

    Raises `InputError` for a directory that holds no finished run, a method that its score cannot
    take, a head that is not there, and data that is gone or too short.
    """
    run, method = asked.run, asked.method
    config = _opened(run)
    chosen = _chosen(asked.attention, config)
    _check_method(method, config)
    torch.set_num_threads(asked.threads)
    expected = config.model  # type: ignore[attr-defined]
    device = choose_device(asked.device or config.device)
    model = load_any(run / "model", expected).to(device)
    inputs = inputs_of(config, asked, model)
    folder = folder_of(run / FOLDER if asked.out is None else asked.out)
    whose = _identity(model, config, inputs, asked)
    half = torch.autocast(device.type, torch.bfloat16, enabled=asked.dtype == "bf16")
    with _using(model, method, config, inputs.length), half:
        measured = look(model, inputs, asked, _collecting(model, config))
        heads = drawn(inputs, chosen, measured, lambda: _weights_of(model, inputs))
    trained = replace(whose, protocol=TRAINING, method="", split="train", data="")
    write_page(whose, measured, heads, inputs, folder, asked, identified(trained, [_training(run)]))


def _weights_of(model: nn.Module, inputs: Inputs) -> Mapping[str, Tensor]:
    row = inputs.drawn.to(next(model.parameters()).device)
    return attention_weights(model, row, inputs.read, inputs.drawn_length)


def write_page(
    whose: Identity,
    measured: pl.DataFrame,
    heads: Sequence[pl.DataFrame],
    inputs: Inputs,
    folder: Path,
    asked: InspectOptions,
    *more: pl.DataFrame,
) -> None:
    """Write the frame and its page, and print the table of layers."""
    frame = joined(
        [
            identified(whose, [measured.with_columns(pl.lit(inputs.source).alias("factor.texts"))]),
            *(identified(replace(whose, protocol=DRAWN), [head]) for head in heads),
            *more,
        ]
    )
    kept = replace(asked, length=inputs.length, windows=len(inputs.rows))
    resolved = {name: value for name, value in vars(kept).items() if name not in _NOT_KEPT}
    resolved |= {"run": str(kept.run), "text": None if kept.text is None else str(kept.text)}
    write_json(folder / CONFIG, {"kind": KIND, "config": resolved})
    written = STUDY.report(frame, folder, resolved)
    if asked.as_json:
        print((folder / "table.json").read_text("utf-8"), end="")
        return
    view = View(frame)
    print_table(STUDY.page.tables[0].fill(view), title=STUDY.page.notes(view)[0])
    say(folder, replace(written, summary=(*written.summary, *_in_short(measured))))


def _in_short(measured: pl.DataFrame) -> list[str]:
    """The sharpest head and the largest logit of all layers."""
    names = measured["factor.layer"].unique(maintain_order=True).to_list()
    layer, head = _sharpest(measured, len(names))
    share = float(by_head(measured, "entropy_share", layer)[head])
    largest = [float(np.max(by_head(measured, "largest", layer))) for layer in range(len(names))]
    most = int(np.nanargmax(largest))
    return [
        f"The sharpest head is head {head} of {names[layer]}: its entropy is {share:.0%} of ln n.",
        f"The largest logit is {largest[most]:.3g}, in {names[most]}.",
    ]


def _opened(run: Path) -> LoopConfig:
    stored = RunDirectory.existing(run)
    if stored.kind not in KINDS:
        known = f"{', '.join(map(repr, [*KINDS][:-1]))} or {[*KINDS][-1]!r}"
        raise InputError(
            f"{run} holds a run of kind {stored.kind!r}; inspect looks into one of kind {known}"
        )
    require_finished(run, "be looked into")
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


def _collecting(model: nn.Module, config: LoopConfig) -> Collecting:
    """Who collects; of a run that continued it knows with what, and at which length."""
    if not isinstance(config, TrainingConfig) or config.continued is None:
        return collecting
    shape, continued = config.model, config.continued
    started = continued.saved(shape).score
    went_on = shape.score.with_method(continued.method).resolve(train_length=shape.train_length)
    of = ((started, shape.train_length), (went_on, config.sequence_length))
    stages = {
        score: [Stage(spec.layer(layer, shape.layers), length) for spec, length in of]
        for layer, score in enumerate(layer_names(model))
    }
    return partial(collecting, stages=stages)


def _chosen(attention: str, config: LoopConfig) -> tuple[int, int] | Literal["sharpest", "all"]:
    """The head whose attention is drawn."""
    model = _model(config)
    layers, heads = model.layers, model.heads
    if isinstance(model, TranslatorConfig):
        # Of a decoder's layer each attention counts: its own, then that to the source.
        layers += 2 * model.decoder.layers
    return chosen_head(attention, layers, heads)


def chosen_head(
    attention: str, layers: int, heads: int
) -> tuple[int, int] | Literal["sharpest", "all"]:
    """What `--attention` says, for so many layers and heads."""
    if attention == "sharpest":
        return "sharpest"
    if attention == "all":
        return "all"
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
    if names[0] == names[1] and model.across == without_position(model.score).resolve(
        train_length=model.train_length
    ):
        return names[0]
    return "{} (encoder), {} (decoder), {} (cross)".format(*names)


def _identity(
    model: nn.Module, config: LoopConfig, inputs: Inputs, asked: InspectOptions
) -> Identity:
    """Whose attention it is, to which texts."""
    shape = _model(config)
    split = "held-out" if asked.text is None else "given"
    names = (_score_names(shape), str(shape.score))
    return whose_attention(model, inputs, asked, *names, config.seed, shape.train_length, split)


def whose_attention(
    model: nn.Module,
    inputs: Inputs,
    asked: InspectOptions,
    row: str,
    score: str,
    seed: int,
    train_length: int,
    split: str,
) -> Identity:
    """The identity of an inspection: of which model, under which method, of which texts."""
    rows = inputs.rows.contiguous().numpy().tobytes()
    return Identity(
        study=KIND,
        row=row,
        score=score,
        method="" if asked.method == "as is" else asked.method,
        seed=seed,
        protocol=KIND,
        length=inputs.length,
        train_length=train_length,
        split=split,
        data=hashlib.sha256(rows).hexdigest(),
        weights=weights_digest(model),
    )


def look(
    model: nn.Module, inputs: Inputs, asked: InspectOptions, collect: Collecting = collecting
) -> pl.DataFrame:
    """What every layer does with the texts; `collect` is who collects."""
    rows = inputs.rows.to(next(model.parameters()).device)
    with Console(file=sys.stderr).status("looking") as status:
        return inspect_model(
            model,
            rows,
            bins=asked.bins,
            cosines=asked.cosines,
            tokens_per_batch=asked.max_tokens,
            read=inputs.read,
            length=inputs.length,
            progress=lambda done, total: status.update(f"looking: text {done} of {total}"),
            collect=collect,
        )


def drawn(
    inputs: Inputs,
    chosen: tuple[int, int] | Literal["sharpest", "all"],
    measured: pl.DataFrame,
    read: Callable[[], Mapping[str, Tensor]],
) -> list[pl.DataFrame]:
    """The attention of the chosen heads to the drawn text, as rows of the frame."""
    if inputs.drawn_length > MOST_TOKENS:
        warn(
            f"normattn: no attention is drawn, for {inputs.drawn_length} tokens make too large a "
            f"matrix (the most is {MOST_TOKENS})"
        )
        return []
    weights = read()
    names = measured["factor.layer"].unique(maintain_order=True).to_list()
    every = [(n, head) for n, name in enumerate(names) for head in range(len(weights[name]))]
    if chosen == "all" and len(every) > DRAWN_HEADS:
        raise InputError(
            f"--attention all draws up to {DRAWN_HEADS} heads, and this model has "
            f"{len(every)}; name one as LAYER,HEAD"
        )
    if chosen == "sharpest":
        wanted = [_sharpest(measured, len(names))]
    else:
        wanted = every if chosen == "all" else [chosen]
    return [
        _weights(weights[names[n]][head].double().numpy(), n, head, inputs.words(names[n]))
        for n, head in wanted
    ]


def _weights(
    alpha: np.ndarray, layer: int, head: int, words: tuple[Sequence[str], Sequence[str]]
) -> pl.DataFrame:
    """α (T, S) of a head: a unit for each query, a bin for each key, the tokens as factors."""
    queries, keys = words
    units = [f"{n:04d}" for n in range(len(queries))]
    rows = sums(
        *("attention", units, alpha, [1.0] * len(units)),
        axis="key",
        edges=range(len(keys)),
        layer=layer,
        head=head,
    )
    return rows.with_columns(
        pl.Series(QUERY, [query for query in queries for _ in keys], pl.String),
        pl.Series(KEY, [*keys] * len(queries), pl.String),
    )


def _sharpest(measured: pl.DataFrame, layers: int) -> tuple[int, int]:
    """The head with the least entropy against ln n."""
    shares = [
        (float(share), layer, head)
        for layer in range(layers)
        for head, share in enumerate(by_head(measured, "entropy_share", layer))
        if np.isfinite(share)
    ]
    return min(shares)[1:] if shares else (0, 0)


def _training(run: Path) -> pl.DataFrame:
    """What a probe saw while the model trained, a number for each step and head."""
    seen = [
        (field, layer, head, name, float(line.step), value)
        for line in read_diagnostics(run)
        for layer, (name, fields) in enumerate(line.layers.items())
        for field, heads in fields
        for head, value in enumerate(heads or ())
        if value is not None
    ]
    names = ("statistic", "layer", "head", "factor.layer", "bin", "sum")
    kinds = (pl.String, pl.Int64, pl.Int64, pl.String, pl.Float64, pl.Float64)
    rows = pl.DataFrame(seen, dict(zip(names, kinds, strict=True)), orient="row")
    return rows.unique(names[:-1], keep="last", maintain_order=True).with_columns(
        pl.lit("").alias("unit"),
        pl.lit("step").alias("axis"),
        (pl.col("bin") + 1).alias("bin_end"),
        pl.lit(1.0).alias("of"),
    )

"""`normattn inspect`: what every attention layer of a trained model does, measured and reported."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from normattn.cli import options
from normattn.cli.extend_settings import model_name
from normattn.cli.inspect_inputs import Inputs, foreign_inputs, inputs_of
from normattn.errors import InputError
from normattn.hf import extend, load
from normattn.hf.model_parts import known_length, model_parts
from normattn.hf.observe import observable, observe_layers, paths
from normattn.io import read_object, write_json
from normattn.lab.diagnostics import Collector, collecting, layer_names
from normattn.lab.diagnostics import inspect_model as measure_attention
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
CONFIG = "config.json"
DRAWN_HEADS = 64
_NOT_KEPT = ("out", "as_json", "threads", "device")
"""Options that no measurement depends on."""


@dataclass(frozen=True)
class Subject:
    """A model with what it reads, and how its measurements are named.

    `using` is the context in which it reads: a method, a precision. `weights` gives the attention
    of every layer to the drawn text. `training` are measurements made while it trained.
    """

    model: nn.Module
    inputs: Inputs
    folder: Path
    row: str
    score: str
    seed: int
    train_length: int
    split: str
    using: AbstractContextManager[Any]
    collect: Collecting
    weights: Callable[[], Mapping[str, Tensor]]
    training: tuple[pl.DataFrame, ...] = ()


def inspect_model(asked: options.Inspect) -> None:
    """Inspect a finished run or a model of transformers; print and draw what was measured.

    Raises `InputError` for what holds no such model, a method that its score cannot take, a head
    that is not there, data that is gone or too short, and attention that cannot be observed.
    """
    head = _parsed_head(asked.attention)
    torch.set_num_threads(asked.threads)
    subject = (_foreign if _is_foreign(asked.run) else _run)(asked)
    with subject.using:
        measured = _measured(subject, asked)
        drawn = _drawn(subject, head, measured)
    inputs, folder = subject.inputs, subject.folder
    whose = Identity(
        study=KIND,
        row=subject.row,
        score=subject.score,
        method="" if asked.method == "as is" else asked.method,
        seed=subject.seed,
        protocol=KIND,
        length=inputs.length,
        train_length=subject.train_length,
        split=subject.split,
        data=hashlib.sha256(inputs.rows.contiguous().numpy().tobytes()).hexdigest(),
        weights=weights_digest(subject.model),
    )
    trained = replace(whose, protocol=TRAINING, method="", split="train", data="")
    frame = joined(
        [
            identified(whose, [measured.with_columns(pl.lit(inputs.source).alias("factor.texts"))]),
            *(identified(replace(whose, protocol=DRAWN), [each]) for each in drawn),
            *(identified(trained, [each]) for each in subject.training),
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
    say(folder, written, _in_short(measured))


def _is_foreign(path: Path) -> bool:
    """Whether a place holds a model of transformers: a GGUF file, or a folder of its own."""
    if path.is_dir() and (path / CONFIG).is_file():
        return "model_type" in read_object(path / CONFIG)
    return path.suffix == ".gguf"


def _folder(folder: Path) -> Path:
    """The directory, made before any work; `InputError` where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{folder} is a file; --out names a directory") from error
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}") from error
    return folder


# A finished run.


def _run(asked: options.Inspect) -> Subject:
    run, method = asked.run, asked.method
    stored = RunDirectory.existing(run)
    if stored.kind not in KINDS:
        raise InputError(
            f"{run} holds a run of kind {stored.kind!r}; inspect takes one of kind "
            f"{', '.join(map(repr, KINDS))}"
        )
    require_finished(run, "be looked into")
    config: Any = KINDS[stored.kind].parse(stored.config, str(run / CONFIG))
    shape: StackConfig = config.model
    if method != "as is" and not isinstance(config, TrainingConfig):
        raise InputError(f"--method {method} is for causal language models, which read on with it")
    device = choose_device(asked.device or config.device)
    model: Any = load_any(run / "model", shape).to(device)
    inputs = inputs_of(config, asked, model)
    folder = _folder(run / "inspection" if asked.out is None else asked.out)
    using = ExitStack()
    if method != "as is":
        trained, spec = shape.train_length, shape.score.with_method(method)
        spec = spec.resolve(train_length=trained, factor=max(1.0, inputs.length / trained))
        using.enter_context(model.using(spec))
    half = torch.autocast(device.type, torch.bfloat16, enabled=asked.dtype == "bf16")
    using.enter_context(half)
    row = inputs.drawn.to(device)
    return Subject(
        model=model,
        inputs=inputs,
        folder=folder,
        row=_score_names(shape),
        score=str(shape.score),
        seed=config.seed,
        train_length=shape.train_length,
        split="held-out" if asked.text is None else "given",
        using=using,
        collect=_collecting(model, config),
        weights=lambda: attention_weights(model, row, inputs.read, inputs.drawn_length),
        training=(_training(run),),
    )


def _collecting(model: nn.Module, config: LoopConfig) -> Collecting:
    """The collector; of a run that continued it knows with what method, and at which length."""
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


def _score_names(model: StackConfig) -> str:
    """The score, or those of the three attentions where they differ."""
    if not isinstance(model, TranslatorConfig):
        return model.score.name
    assert model.decoder_score is not None
    names = (model.score.name, model.decoder_score.name, model.across.name)
    across = without_position(model.score).resolve(train_length=model.train_length)
    if names[0] == names[1] and model.across == across:
        return names[0]
    return "{} (encoder), {} (decoder), {} (cross)".format(*names)


def _training(run: Path) -> pl.DataFrame:
    """What was recorded while the model trained, a number for each step and head."""
    seen = [
        (name, layer, head, score, float(line.step), value)
        for line in read_diagnostics(run)
        for layer, (score, fields) in enumerate(line.layers.items())
        for name, heads in fields
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


# A model of transformers.


def _foreign(asked: options.Inspect) -> Subject:
    name = model_name(asked.run)
    half = torch.bfloat16 if asked.dtype == "bf16" else torch.float32
    model, tokeniser = load(asked.run, dtype=half)
    model = model.to(choose_device(asked.device or "auto"))
    inputs = foreign_inputs(model, tokeniser, asked)

    def weights() -> Mapping[str, Tensor]:
        with observable(model):
            row = inputs.drawn.to(model.device)
            return attention_weights(model, row, inputs.read, inputs.drawn_length, paths(model))

    try:
        trained = known_length(model_parts(model))[0]
    except InputError:
        trained = inputs.length
    return Subject(
        model=model,
        inputs=inputs,
        folder=_folder(asked.out or Path("runs") / f"inspect-{name}"),
        row=name,
        score=type(model).__name__,
        seed=asked.seed,
        train_length=trained,
        split="given",
        using=nullcontext() if asked.method == "as is" else extend(model, asked.method),
        collect=observing,
        weights=weights,
    )


@contextmanager
def observing(
    model: nn.Module,
    edges: Sequence[int] | None = None,
    *,
    reach: bool = False,
    cosines: bool = False,
) -> Iterator[Collector]:
    """Collect what every attention layer does while inside, each named by its path in the model.

    Takes the place of `collecting` in `lab.diagnostics.inspect_model`; attention beyond the
    training length (`reach`) is not measured. Raises `InputError` at the end for a model none of
    whose layers takes its attention from transformers' AttentionInterface.
    """
    collector = Collector(paths(model), edges, cosines=cosines)
    with observe_layers(model, collector):
        yield collector
    if not collector.sums:
        raise InputError("this model has attention code of its own, which cannot be observed")


# What is measured and drawn.


def _measured(subject: Subject, asked: options.Inspect) -> pl.DataFrame:
    inputs, model = subject.inputs, subject.model
    with Console(file=sys.stderr).status("inspecting") as status:
        return measure_attention(
            model,
            inputs.rows.to(next(model.parameters()).device),
            bins=asked.bins,
            cosines=asked.cosines,
            tokens_per_batch=asked.max_tokens,
            read=inputs.read,
            length=inputs.length,
            progress=lambda done, total: status.update(f"inspecting: text {done} of {total}"),
            collect=subject.collect,
        )


def _parsed_head(attention: str) -> tuple[int, int] | str:
    """`--attention`: "sharpest", "all", or a layer and a head."""
    if attention in ("sharpest", "all"):
        return attention
    parts = attention.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(
            f"--attention takes LAYER,HEAD (each from 0), all or sharpest, got {attention!r}"
        )
    return int(parts[0]), int(parts[1])


def _drawn(
    subject: Subject, wanted: tuple[int, int] | str, measured: pl.DataFrame
) -> list[pl.DataFrame]:
    """The attention of the wanted heads to the drawn text, as measurements."""
    inputs, names = subject.inputs, _layers(measured)
    if inputs.drawn_length > MOST_TOKENS:
        warn(
            f"normattn: no attention is drawn, for {inputs.drawn_length} tokens make too large a "
            f"matrix (the most is {MOST_TOKENS})"
        )
        return []
    weights = subject.weights()
    every = [(n, head) for n, name in enumerate(names) for head in range(len(weights[name]))]
    if wanted == "all" and len(every) > DRAWN_HEADS:
        raise InputError(
            f"--attention all draws up to {DRAWN_HEADS} heads, and this model has {len(every)}; "
            "name one as LAYER,HEAD"
        )
    if isinstance(wanted, tuple) and wanted not in every:
        raise InputError(
            f"--attention {wanted[0]},{wanted[1]}: this model has layers 0 to {len(names) - 1} and "
            f"heads 0 to {max(head for _, head in every)}"
        )
    heads = every if wanted == "all" else [_sharpest(measured)]
    if isinstance(wanted, tuple):
        heads = [wanted]
    return [_head(subject, weights, names[n], n, head) for n, head in heads]


def _head(
    subject: Subject, weights: Mapping[str, Tensor], name: str, layer: int, head: int
) -> pl.DataFrame:
    """α (T, S) of a head: a unit for each query, a bin for each key, the tokens as factors."""
    queries, keys = subject.inputs.words(name)
    units = [f"{n:04d}" for n in range(len(queries))]
    alpha = weights[name][head].double().numpy()
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


def _layers(measured: pl.DataFrame) -> list[str]:
    names: list[str] = measured["factor.layer"].unique(maintain_order=True).to_list()
    return names


def _sharpest(measured: pl.DataFrame) -> tuple[int, int]:
    """The head with the least entropy against ln n."""
    shares = [
        (float(share), layer, head)
        for layer in range(len(_layers(measured)))
        for head, share in enumerate(by_head(measured, "entropy_share", layer))
        if np.isfinite(share)
    ]
    return min(shares)[1:] if shares else (0, 0)


def _in_short(measured: pl.DataFrame) -> list[str]:
    """The sharpest head and the largest logit of all layers."""
    names, (layer, head) = _layers(measured), _sharpest(measured)
    share = float(by_head(measured, "entropy_share", layer)[head])
    largest = [float(np.max(by_head(measured, "largest", n))) for n in range(len(names))]
    most = int(np.nanargmax(largest))
    return [
        f"The sharpest head is head {head} of {names[layer]}: its entropy is {share:.0%} of ln n.",
        f"The largest logit is {largest[most]:.3g}, in {names[most]}.",
    ]

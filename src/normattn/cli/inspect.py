"""`normattn inspect`: what every attention layer of a trained model does, measured and reported."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import nn

from normattn.cli import options
from normattn.cli.extend_settings import model_name
from normattn.cli.inspect_inputs import KINDS, Inputs, foreign_inputs
from normattn.errors import InputError
from normattn.hf import extend, load
from normattn.hf.model_parts import known_length, model_parts
from normattn.hf.observe import observable, paths
from normattn.io import read_object, write_json
from normattn.kernels.stats import observing as observing_attention
from normattn.lab.diagnostics import Collector, collecting
from normattn.lab.diagnostics import inspect_model as measure_attention
from normattn.lab.diagnostics.attention import MOST_TOKENS, attention_weights
from normattn.lab.diagnostics.inspection import Collecting
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.report.terminal import print_table, say
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory, require_finished
from normattn.lab.stats import Identity, identified, joined, sums
from normattn.lab.studies.inspect import DRAWN, KEY, KIND, QUERY, STUDY, TRAINING, sharpest
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.models.config import StackConfig, TranslatorConfig
from normattn.models.pretrained import load_any
from normattn.score.spec import is_unmodified
from normattn.terminal import Console, warn

CONFIG = "config.json"
_NOT_KEPT = ("out", "threads", "device")
"""Options that no measurement depends on."""


@dataclass(frozen=True)
class Subject:
    """A model with what it reads, whose it is, and where the page goes.

    `paths` names the attention modules of a model of transformers, which `collect` observes.
    `training` are measurements made while it trained. `reach`: whether attention beyond the
    training length is measured.
    """

    model: nn.Module
    inputs: Inputs
    whose: Identity
    out: Path
    collect: Collecting
    paths: Mapping[Any, Any] | None = None
    training: pl.DataFrame | None = None
    reach: bool = True


def inspect_model(asked: options.Inspect) -> None:
    """Inspect a finished run or a model of transformers; print and draw what was measured.

    Raises `InputError` for what holds no such model, a method that its score cannot take, a head
    that is not there, data that is gone or too short, and attention that cannot be observed.
    """
    wanted = None
    if asked.attention != "sharpest":
        numbers = [part.strip() for part in asked.attention.split(",")]
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise InputError(
                f"--attention takes LAYER,HEAD (each from 0) or sharpest, got {asked.attention!r}"
            )
        wanted = int(numbers[0]), int(numbers[1])
    torch.set_num_threads(asked.threads)
    foreign = asked.run.suffix == ".gguf"
    if asked.run.is_dir() and (asked.run / CONFIG).is_file():
        foreign = "model_type" in read_object(asked.run / CONFIG)
    with ExitStack() as using:
        subject = (_foreign if foreign else _finished)(asked, using)
        out, model, inputs = subject.out, subject.model, subject.inputs
        if out.exists() and not out.is_dir():
            raise InputError(f"{out} is a file; --out names a directory")
        out.mkdir(parents=True, exist_ok=True)  # before any work
        with Console(file=sys.stderr).status("inspecting") as status:
            measured = measure_attention(
                model,
                inputs.rows.to(next(model.parameters()).device),
                bins=asked.bins,
                reach=subject.reach,
                cosines=asked.cosines,
                tokens_per_batch=asked.max_tokens,
                read=inputs.read,
                length=inputs.length,
                progress=lambda done, total: status.update(f"inspecting: text {done} of {total}"),
                collect=subject.collect,
            )
        drawn = _drawn(subject, wanted, measured)
    whose = replace(
        subject.whose,
        study=KIND,
        protocol=KIND,
        method="" if is_unmodified(asked.method) else asked.method,
        length=inputs.length,
        data=hashlib.sha256(inputs.rows.contiguous().numpy().tobytes()).hexdigest(),
        weights=weights_digest(model),
    )
    trained = replace(whose, protocol=TRAINING, method="", split="train", data="")
    parts = [(whose, measured.with_columns(pl.lit(inputs.source).alias("factor.texts")))]
    parts += [] if drawn is None else [(replace(whose, protocol=DRAWN), drawn)]
    parts += [] if subject.training is None else [(trained, subject.training)]
    frame = joined(identified(each, [rows]) for each, rows in parts)
    kept = vars(replace(asked, length=inputs.length, windows=len(inputs.rows)))
    resolved = {name: value for name, value in kept.items() if name not in _NOT_KEPT}
    resolved |= {"run": str(asked.run), "text": None if asked.text is None else str(asked.text)}
    write_json(out / CONFIG, {"kind": KIND, "config": resolved})
    written = STUDY.report(frame, out, resolved)
    view = View(frame)
    print_table(STUDY.page.tables[0].fill(view), title=STUDY.page.notes(view)[0])
    say(out, written)


def _finished(asked: options.Inspect, using: ExitStack) -> Subject:
    """The model of a finished run, under the method and at the precision that are wanted."""
    run, method = asked.run, asked.method
    stored = RunDirectory.existing(run)
    if stored.kind not in KINDS:
        raise InputError(
            f"{run} holds a run of kind {stored.kind!r}; inspect takes one of kind "
            f"{', '.join(map(repr, KINDS))}"
        )
    require_finished(run, "be looked into")
    settings, inputs_of = KINDS[stored.kind]
    config: Any = settings.parse(stored.config, str(run / CONFIG))
    shape: StackConfig = config.model
    if not is_unmodified(method) and not isinstance(config, TrainingConfig):
        raise InputError(f"--method {method} is for causal language models only")
    device = choose_device(asked.device or config.device)
    model: Any = load_any(run / "model", shape).to(device)
    inputs = inputs_of(config, asked, model)
    trained = shape.train_length
    if not is_unmodified(method):
        factor = max(1.0, inputs.length / trained)
        spec = shape.score.with_method(method).resolve(train_length=trained, factor=factor)
        using.enter_context(model.using(spec))
    half = torch.autocast(device.type, torch.bfloat16, enabled=asked.dtype == "bf16")
    using.enter_context(half)
    scores = [shape.score]
    if isinstance(shape, TranslatorConfig) and shape.decoder_score is not None:
        scores += [shape.decoder_score, shape.across]
    names = dict.fromkeys(score.name for score in scores)
    split = "held-out" if asked.text is None else "given"
    whose = Identity("", " + ".join(names), str(shape.score), config.seed, split=split)
    return Subject(
        model,
        inputs,
        replace(whose, train_length=trained),
        asked.out or run / "inspection",
        collecting,
        training=_training(run),
        # A continued run has met further distances and angles than its model's training length.
        reach=not (isinstance(config, TrainingConfig) and config.continued),
    )


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


def _foreign(asked: options.Inspect, using: ExitStack) -> Subject:
    """A model of transformers, under the method that is wanted."""
    name = model_name(asked.run)
    half = torch.bfloat16 if asked.dtype == "bf16" else torch.float32
    model, tokeniser = load(asked.run, dtype=half)
    model = model.to(choose_device(asked.device or "auto"))
    inputs = foreign_inputs(model, tokeniser, asked)
    try:
        trained = known_length(model_parts(model))[0]
    except InputError:
        trained = inputs.length
    if not is_unmodified(asked.method):
        using.enter_context(extend(model, asked.method))
    whose = Identity("", name, type(model).__name__, asked.seed, split="given")
    return Subject(
        model,
        inputs,
        replace(whose, train_length=trained),
        asked.out or Path("runs") / f"inspect-{name}",
        observing,
        paths(model),
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
    with observable(model), observing_attention(collector):
        yield collector
    if not collector.sums:
        raise InputError("this model uses its own attention code, which cannot be observed")


def _drawn(
    subject: Subject, wanted: tuple[int, int] | None, measured: pl.DataFrame
) -> pl.DataFrame | None:
    """The attention of a head to the drawn text, as measurements; None of too long a text.

    α (T, S) has a unit for each query and a bin for each key, with the tokens as factors.
    """
    inputs, model = subject.inputs, subject.model
    if inputs.drawn_length > MOST_TOKENS:
        warn(
            f"normattn: no attention is drawn, for {inputs.drawn_length} tokens make too large a "
            f"matrix (the most is {MOST_TOKENS})"
        )
        return None
    row = inputs.drawn.to(next(model.parameters()).device)
    with nullcontext() if subject.paths is None else observable(model):
        weights = attention_weights(model, row, inputs.read, inputs.drawn_length, subject.paths)
    names: list[str] = measured["factor.layer"].unique(maintain_order=True).to_list()
    layer, head = sharpest(measured) if wanted is None else wanted
    if layer >= len(names) or head >= len(weights[names[layer]]):
        most = max(len(weights[name]) for name in names)
        raise InputError(
            f"--attention {layer},{head}: this model has layers 0 to {len(names) - 1} and heads 0 "
            f"to {most - 1}"
        )
    queries, keys = inputs.words(names[layer])
    alpha = weights[names[layer]][head].double().numpy()
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

"""`normattn inspect`: measure every attention layer of a trained model, and write a report."""

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
from normattn.cli.inspect_inputs import KINDS, Inputs, transformers_inputs
from normattn.errors import InputError
from normattn.hf import extend, load
from normattn.hf.model_parts import known_length, model_parts
from normattn.hf.observe import observable, paths
from normattn.io import read_object, write_json
from normattn.kernels.stats import observing as observing_attention
from normattn.lab.diagnostics import Collector, collecting
from normattn.lab.diagnostics import inspect_model as measure_attention
from normattn.lab.diagnostics.attention import MAX_TOKENS, attention_weights
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.report.terminal import print_report, print_table
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory, require_finished
from normattn.lab.stats import Identity, concat, sums, with_identity
from normattn.lab.studies.inspect import DRAWN, KEY, KIND, QUERY, STUDY, TRAINING, sharpest
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import refuse_other_data
from normattn.models.config import StackConfig, TranslatorConfig
from normattn.models.pretrained import load_any
from normattn.score.spec import is_unmodified
from normattn.terminal import Console, warn

CONFIG = "config.json"


@dataclass(frozen=True)
class Subject:
    """A model with its inputs, the identity of its measurements, and the folder of the report.

    `paths` names the attention modules of a transformers model. `training` are measurements from
    its training. `reach`: whether attention beyond the training length is measured.
    """

    model: nn.Module
    inputs: Inputs
    identity: Identity
    out: Path
    paths: Mapping[Any, Any] | None = None
    training: pl.DataFrame | None = None
    reach: bool = True


def inspect_model(args: options.Inspect) -> None:
    """Inspect a finished run or a transformers model, print a summary and write the report."""
    head = [part.strip() for part in args.attention.split(",")]
    if head != ["sharpest"] and (len(head) != 2 or not all(part.isdecimal() for part in head)):
        raise InputError(
            f"--attention takes LAYER,HEAD (each from 0) or sharpest, got {args.attention!r}"
        )
    torch.set_num_threads(args.threads)
    of_transformers = args.run.suffix == ".gguf"
    if args.run.is_dir() and (args.run / CONFIG).is_file():
        of_transformers = "model_type" in read_object(args.run / CONFIG)
    with ExitStack() as contexts:
        subject = (_open_transformers_model if of_transformers else _open_run)(args, contexts)
        out, model, inputs = subject.out, subject.model, subject.inputs
        out.mkdir(parents=True, exist_ok=True)  # before any work
        with Console(file=sys.stderr).status("inspecting") as status:
            measured = measure_attention(
                model,
                inputs.rows.to(next(model.parameters()).device),
                bins=args.bins,
                reach=subject.reach,
                cosines=args.cosines,
                tokens_per_batch=args.max_tokens,
                read=inputs.read,
                length=inputs.length,
                progress=lambda done, total: status.update(f"inspecting: text {done} of {total}"),
                collect=collecting if subject.paths is None else observing,
            )
        drawn = _attention_of_head(subject, head, measured)
    frame = _identified(subject, args, measured, drawn)
    resolved = dict(vars(replace(args, length=inputs.length, windows=len(inputs.rows))))
    for unrecorded in ("out", "threads", "device"):  # They do not affect measurements.
        del resolved[unrecorded]
    resolved |= {"run": str(args.run), "text": None if args.text is None else str(args.text)}
    write_json(out / CONFIG, {"kind": KIND, "config": resolved})
    written = STUDY.report(frame, out, resolved)
    view = View(frame)
    print_table(STUDY.page.tables[0].fill(view), title=STUDY.page.notes(view)[0])
    print_report(out, written)


def _identified(
    subject: Subject, args: options.Inspect, measured: pl.DataFrame, drawn: pl.DataFrame | None
) -> pl.DataFrame:
    """All measurements with their identities: statistics, drawn attention, training."""
    inputs = subject.inputs
    identity = replace(
        subject.identity,
        study=KIND,
        protocol=KIND,
        method="" if is_unmodified(args.method) else args.method,
        length=inputs.length,
        data=hashlib.sha256(inputs.rows.contiguous().numpy().tobytes()).hexdigest(),
        weights=weights_digest(subject.model),
    )
    trained = replace(identity, protocol=TRAINING, method="", split="train", data="")
    parts = [(identity, measured.with_columns(pl.lit(inputs.source).alias("factor.texts")))]
    parts += [] if drawn is None else [(replace(identity, protocol=DRAWN), drawn)]
    parts += [] if subject.training is None else [(trained, subject.training)]
    return concat(with_identity(each, [rows]) for each, rows in parts)


def _open_run(args: options.Inspect, contexts: ExitStack) -> Subject:
    run, method = args.run, args.method
    stored = RunDirectory.existing(run)
    if stored.kind not in KINDS:
        raise InputError(
            f"{run} holds a run of kind {stored.kind!r}; inspect takes one of kind "
            f"{', '.join(map(repr, KINDS))}"
        )
    require_finished(run, "be looked into")
    settings, inputs_of, refused = KINDS[stored.kind]
    for name in refused:
        if getattr(args, name) is not None:
            raise InputError(f"--{name} is for language models only")
    config: Any = settings.parse(stored.config, str(run / CONFIG))
    shape: StackConfig = config.model
    if not is_unmodified(method) and not isinstance(config, TrainingConfig):
        raise InputError(f"--method {method} is for causal language models only")
    device = choose_device(args.device or config.device)
    model: Any = load_any(run / "model", shape).to(device)
    data = config.prepare() if args.text is None else None
    if data is not None:
        refuse_other_data(data, run)
    inputs = inputs_of(config, args, model, data)
    trained = shape.train_length
    if not is_unmodified(method):
        factor = max(1.0, inputs.length / trained)
        spec = shape.score.with_method(method).resolve(train_length=trained, factor=factor)
        contexts.enter_context(model.using(spec))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16")
    contexts.enter_context(autocast)
    scores = [shape.score]
    if isinstance(shape, TranslatorConfig) and shape.decoder_score is not None:
        scores += [shape.decoder_score, shape.resolved_cross_score]
    names = dict.fromkeys(score.name for score in scores)
    split = "held-out" if args.text is None else "given"
    identity = Identity("", " + ".join(names), str(shape.score), config.seed, split=split)
    return Subject(
        model,
        inputs,
        replace(identity, train_length=trained),
        args.out or run / "inspection",
        training=_training(run),
        # A continued run has seen longer distances than its model's training length.
        reach=not (isinstance(config, TrainingConfig) and config.continued),
    )


def _training(run: Path) -> pl.DataFrame:
    recorded = [
        (name, layer, head, score, float(line.step), value)
        for line in read_diagnostics(run)
        for layer, (score, fields) in enumerate(line.layers.items())
        for name, heads in fields
        for head, value in enumerate(heads or ())
        if value is not None
    ]
    names = ("statistic", "layer", "head", "factor.layer", "bin", "sum")
    dtypes = (pl.String, pl.Int64, pl.Int64, pl.String, pl.Float64, pl.Float64)
    rows = pl.DataFrame(recorded, dict(zip(names, dtypes, strict=True)), orient="row")
    return rows.unique(names[:-1], keep="last", maintain_order=True).with_columns(
        pl.lit("").alias("unit"),
        pl.lit("step").alias("axis"),
        (pl.col("bin") + 1).alias("bin_end"),
        pl.lit(1.0).alias("of"),
    )


def _open_transformers_model(args: options.Inspect, contexts: ExitStack) -> Subject:
    name = model_name(args.run)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    model, tokeniser = load(args.run, dtype=dtype)
    model = model.to(choose_device(args.device or "auto"))
    inputs = transformers_inputs(model, tokeniser, args)
    try:
        trained = known_length(model_parts(model))[0]
    except InputError:
        trained = inputs.length
    if not is_unmodified(args.method):
        contexts.enter_context(extend(model, args.method))
    out = args.out or Path("runs") / f"inspect-{name}"
    identity = Identity("", name, type(model).__name__, args.seed, split="given")
    return Subject(model, inputs, replace(identity, train_length=trained), out, paths(model))


@contextmanager
def observing(
    model: nn.Module,
    edges: Sequence[int] | None = None,
    *,
    reach: bool = False,
    cosines: bool = False,
) -> Iterator[Collector]:
    """Collect statistics of a transformers model's attention layers, by their paths; no `reach`.

    Raises `InputError` at the end if no layer takes its attention function from transformers'
    AttentionInterface.
    """
    collector = Collector(paths(model), edges, cosines=cosines)
    with observable(model), observing_attention(collector):
        yield collector
    if not collector.sums:
        raise InputError("this model uses its own attention code, which cannot be observed")


def _attention_of_head(
    subject: Subject, wanted: Sequence[str], measured: pl.DataFrame
) -> pl.DataFrame | None:
    """The attention weights of a head on the drawn text, as measurements; None if it is too long.

    `wanted` is a layer and a head, or "sharpest". A unit is a query, a bin a key.
    """
    inputs, model = subject.inputs, subject.model
    if inputs.drawn_length > MAX_TOKENS:
        warn(
            f"normattn: no attention is drawn, for {inputs.drawn_length} tokens make too large a "
            f"matrix (the most is {MAX_TOKENS})"
        )
        return None
    row = inputs.drawn.to(next(model.parameters()).device)
    with nullcontext() if subject.paths is None else observable(model):
        weights = attention_weights(model, row, inputs.read, inputs.drawn_length, subject.paths)
    names: list[str] = measured["factor.layer"].unique(maintain_order=True).to_list()
    layer, head = sharpest(measured) if len(wanted) == 1 else map(int, wanted)
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

"""`normattn score`, `verify` and `extend --emit`: a model's score, and the settings of engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from normattn.cli import model_options
from normattn.cli.extend_settings import (
    choose_values,
    expand_methods,
    open_parameters,
    refuse_unused,
)
from normattn.errors import InputError
from normattn.hf.engine_check import verify
from normattn.hf.engines import ENGINES, Deployment, checked_gguf_keys, emit
from normattn.hf.llama_cpp import architecture_of, read_gguf, write_gguf
from normattn.hf.load import read_configuration
from normattn.hf.native import refuse_applied
from normattn.hf.plan import plan
from normattn.hf.score_of import score_of
from normattn.hf.tiny_model import in_float64, small_model
from normattn.io import expand_path, write_text
from normattn.score.spec import UNMODIFIED
from normattn.terminal import show, warn


def name_scores(args: model_options.Score) -> int:
    """Print the score of every layer, of a small model; return 0 if all are verified, else 1."""
    config = read_configuration(args.model)
    score = score_of(in_float64(small_model(config)), args.tokens)
    model_type = config.get_text_config().model_type
    if args.as_json:
        names = ("layer", "difference", "verified", "lacks", "mask_note")
        layers = [
            {"score": layer.spec and str(layer.spec)} | {x: getattr(layer, x) for x in names}
            for layer in score.layers
        ]
        record = {"model": args.model, "model_type": model_type, "tokens": score.tokens}
        _print_json({**record, "verified": score.verified, "layers": layers})
    else:
        show(f"{args.model}: {model_type}, {len(score.layers)} attention layers")
        for line in score.lines():
            show(f"  {line}")
    return 0 if score.verified else 1


def verify_engine(args: model_options.Verify) -> int:
    """Print the verdict; return 0 if the engine's settings are as intended, else 1."""
    verdict = verify(args.model, args.against, args.method, train_length=args.train_length)
    if args.as_json:
        _print_json({"equal": verdict.equal, **dataclasses.asdict(verdict)})
    else:
        show(verdict)
    return 0 if verdict.equal else 1


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False, indent=2))


def emit_method(args: model_options.Extend, engine: str) -> None:
    """Print the settings with which an engine serves a model, or write them to `args.out`.

    They come from a small random model; weights are read only to copy a GGUF file.
    """
    methods = [method for method in expand_methods(args.methods) if method != UNMODIFIED]
    if len(methods) != 1:
        raise InputError("--emit needs one method, such as --methods 'YaRN(factor=4)'")
    refuse_unused(methods, args)
    model = expand_path(args.model)
    source = model if args.gguf is None else model / args.gguf
    out = args.out
    copies = engine == "gguf" and source.suffix == ".gguf"
    if out is not None and out.suffix == ".gguf" and not copies:
        raise InputError(f"--out {out}: only --emit gguf of a GGUF file writes one")
    deployment = _plan_deployment(args, source, methods[0])
    text = emit(deployment, engine)
    if out is None:
        print(text, end="")
    elif copies:
        write_gguf(source, out, checked_gguf_keys(deployment))
    else:
        write_text(out, text, new=True)
    older = "" if args.engine_version is None else f"written for {engine} {args.engine_version}, "
    warn(f"{older}checked with {ENGINES[engine].version}")
    if out is not None:
        method = deployment.plan.spec.method_text
        show(f"{out}: {method} for {engine}, up to {deployment.max_length:,} tokens")


def _plan_deployment(args: model_options.Extend, source: Path, method: str) -> Deployment:
    config = read_configuration(source if args.gguf else args.model)
    refuse_applied(config)
    model = small_model(config)
    length, lengths, factor, window = choose_values(args, model)
    max_length, values = lengths[-1], {"factor": factor, "window": window}
    parameters = {name: values[name] for name in open_parameters(method)}
    planned = plan(model, method, length, **parameters)
    reach = round(length * getattr(planned.spec.rope_scaling, "stretch", max_length / length))
    if args.lengths is not None and max_length > reach:
        raise InputError(
            f"{planned.spec.method_text} reaches {reach:,} tokens, but --lengths asks for "
            f"{max_length:,}: leave --factor out, or give a larger one"
        )
    max_length = reach if args.lengths is None else max_length
    text = config.get_text_config()
    architecture = architecture_of(text.model_type)
    if source.suffix == ".gguf":
        architecture = read_gguf(source).architecture
    # The field of a text configuration that is nested in another configuration.
    parts = getattr(config, "sub_configs", {})
    text_config_name = next((name for name in parts if getattr(config, name, None) is text), None)
    name = str(source if source.exists() else args.model)
    return Deployment(
        name, planned, max_length, architecture, text_config_name, args.engine_version
    )

"""`normattn score` and `normattn verify`: the score of a model, and the settings of its engine."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from normattn.cli import model_options
from normattn.hf.engine_check import verify
from normattn.hf.load import read_configuration
from normattn.hf.score_of import score_of
from normattn.hf.tiny_model import in_float64, small_model
from normattn.terminal import show


def name_scores(args: model_options.Score) -> int:
    """Print the score of every layer, of a small model; return 0 if all are verified, else 1.

    Raises `InputError` where there is no configuration, for a model_type that transformers does not
    know, and for layers that cannot be recorded.
    """
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

"""`normattn score` and `normattn verify`: what a model of transformers, and its engine, compute."""

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


def name_scores(asked: model_options.Score) -> int:
    """Print the score of every layer; 0 where each is verified, 1 where one is not.

    A small model of the configuration is used. Raises `InputError` for what holds no configuration,
    a kind that transformers does not know, and layers that cannot be recorded.
    """
    config = read_configuration(asked.model)
    found = score_of(in_float64(small_model(config)), asked.tokens)
    model_type = config.get_text_config().model_type
    if asked.as_json:
        layers = [
            {
                "layer": layer.layer,
                "score": None if layer.spec is None else str(layer.spec),
                "difference": layer.difference,
                "verified": layer.verified,
                "lacks": layer.lacks,
                "beside": layer.beside,
            }
            for layer in found.layers
        ]
        record = {"model": asked.model, "model_type": model_type, "tokens": found.tokens}
        _print_json({**record, "verified": found.verified, "layers": layers})
    else:
        show(f"{asked.model}: {model_type}, {len(found.layers)} attention layers")
        for line in found.lines():
            show(f"  {line}")
    return 0 if found.verified else 1


def verify_engine(asked: model_options.Verify) -> int:
    """Print the verdict; 0 where the engine's settings give what is meant, 1 where not."""
    verdict = verify(asked.model, asked.against, asked.method, train_length=asked.train_length)
    if asked.as_json:
        _print_json({"equal": verdict.equal, **dataclasses.asdict(verdict)})
    else:
        show(verdict)
    return 0 if verdict.equal else 1


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False, indent=2))

"""What `normattn score` prints: the score of every layer of a model."""

from __future__ import annotations

import json
from typing import Any

from normattn.terminal import show


def read_score(model: str, tokens: int, as_json: bool) -> int:
    """Read the scores of a model's layers off a small model of its configuration, and print them.

    Returns 0 where every layer's score is verified, 1 where one is not.

    Raises `InputError` for what holds no configuration, a kind that transformers does not know, and
    layers that cannot be recorded.
    """
    from normattn.hf.score_of import ModelScore, score_of
    from normattn.hf.tiny_model import in_float64, read_configuration, small_model

    config = read_configuration(model)
    score: ModelScore = score_of(in_float64(small_model(config)), tokens)
    if as_json:
        print(json.dumps(_record(model, config, score), ensure_ascii=False, indent=2))
        return 0 if score.verified else 1
    show(f"{model}: {config.get_text_config().model_type}, {len(score.layers)} attention layers")
    for line in score.lines():
        show(f"  {line}")
    return 0 if score.verified else 1


def _record(model: str, config: Any, score: Any) -> dict[str, Any]:
    return {
        "model": model,
        "model_type": config.get_text_config().model_type,
        "tokens": score.tokens,
        "verified": score.verified,
        "layers": [
            {
                "layer": layer.layer,
                "score": None if layer.spec is None else str(layer.spec),
                "difference": layer.difference,
                "verified": layer.verified,
                "lacks": layer.lacks,
                "beside": layer.beside,
            }
            for layer in score.layers
        ],
    }

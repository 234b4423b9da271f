"""Invalid calls of the Python interface; each should raise an `InputError`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from normattn.layers.attention import attention
from normattn.models import CausalLM, CausalLMConfig, generate

ODD: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a list": lambda: [[1, 2], [3, 4]],
    "a number": lambda: 3,
    "a text": lambda: "abc",
    "an array": lambda: np.ones((2, 4), np.int64),
    "floats": lambda: torch.ones(2, 4),
    "truths": lambda: torch.ones(2, 4, dtype=torch.bool),
    "one axis": lambda: torch.ones(4, dtype=torch.long),
    "three axes": lambda: torch.ones(2, 4, 1, dtype=torch.long),
    "bytes": lambda: torch.ones(2, 4, dtype=torch.uint8),
    "sparse": lambda: torch.ones(2, 4, dtype=torch.long).to_sparse(),
    "below 0": lambda: torch.full((2, 4), -1),
    "beyond the vocabulary": lambda: torch.full((2, 4), 20),
    "complex": lambda: torch.ones(2, 4, dtype=torch.complex64),
}
OPERANDS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a list": lambda: [[[[1.0]]]],
    "an array": lambda: np.ones((1, 2, 4, 8), np.float32),
    "a text": lambda: "abc",
    "sparse": lambda: torch.ones(1, 2, 4, 8).to_sparse(),
    "without numbers": lambda: torch.ones(1, 2, 4, 8, device="meta"),
    "whole numbers": lambda: torch.ones(1, 2, 4, 8, dtype=torch.long),
    "three axes": lambda: torch.ones(2, 4, 8),
    "another type": lambda: torch.ones(1, 2, 4, 8, dtype=torch.float64),
    "another batch": lambda: torch.ones(3, 2, 4, 8),
    "no head": lambda: torch.ones(1, 0, 4, 8),
}
SCORES: list[Any] = [None, 3, b"KNA", ["KNA"], "", "KNA-", "KNB", "KNA@1", object(), "\ud800"]
LIMITS: list[Any] = [1.5, 0, -1, None, "2", True, float("nan"), 10.0]
PROMPTS: list[Any] = [None, [], [[]], [[1.5]], ["ab"], "ab", [[True]], [None], [[[1]]], [[20]], 3]


def small_model() -> CausalLM:
    """A model of one layer and 20 tokens."""
    torch.manual_seed(0)
    return CausalLM(CausalLMConfig(vocab_size=20, dim=16, layers=1, heads=2, train_length=8)).eval()


def calls() -> dict[str, Callable[[], Any]]:
    """Every invalid call, by its description."""
    model: Any = small_model()
    attend: Any = attention
    made: Any = generate
    cases: dict[str, Callable[[], Any]] = {}
    for name in ("forward", "hidden", "loss", "token_scores", "prefill"):
        for kind, make in ODD.items():
            cases[f"{name} of {kind}"] = partial(_given, getattr(model, name), make)
    whole = torch.ones(1, 2, 4, 8)
    for place in range(3):
        for kind, make in OPERANDS.items():
            cases[f"attention with {'qkv'[place]} {kind}"] = partial(_operand, whole, place, make)
    for name in ("attn_mask", "key_padding", "query_padding", "q_positions", "k_positions"):
        for kind in ("a list", "a number", "a text", "an array", "sparse", "three axes", "complex"):
            cases[f"attention with {name} {kind}"] = partial(
                attend, whole, whole, whole, "Baseline", **{name: ODD[kind]()}
            )
    for score in SCORES:
        shown = repr(str(score)[:9])
        cases[f"attention by {shown}"] = partial(attend, whole, whole, whole, score)
        cases[f"using {shown}"] = partial(model.using, score or 0)
    for limit in LIMITS:
        cases[f"generate {limit!r} tokens"] = partial(made, model, [[1]], limit)
        if limit is not True:
            cases[f"generate by chunks of {limit!r}"] = partial(made, model, [[1]], 1, chunk=limit)
    for prompt in PROMPTS:
        cases[f"generate from {prompt!r}"] = partial(made, model, prompt, 1)
    return cases


def _given(reader: Callable[[Any], Any], make: Callable[[], Any]) -> Any:
    return reader(make())


def _operand(whole: Any, place: int, make: Callable[[], Any]) -> Any:
    operands = [whole, whole, whole]
    operands[place] = make()
    return attention(operands[0], operands[1], operands[2], "Baseline")

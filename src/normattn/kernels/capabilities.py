"""What each kernel serves, as one table: `why_not` reads it, so that it cannot lie.

A problem shows some features; a kernel serves it when all of them are in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from normattn.errors import InputError
from normattn.kernels.place import on_cpu
from normattn.kernels.problem import Problem
from normattn.plain import transformed

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Feature:
    """Something that a problem may show, and what a kernel without it says."""

    shown: Callable[[Problem], bool]
    refusal: str


def _learns(x: torch.Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _irregular(p: Problem) -> bool:
    seen = p.visibility
    matter = seen.causal or seen.window is not None or p.two_regimes or p.bias is not None
    return matter and not seen.aligned


FEATURES: Mapping[str, Feature] = {
    "one regime": Feature(
        lambda p: not p.two_regimes, "it is for two regimes, and there is only one"
    ),
    "two regimes": Feature(lambda p: p.two_regimes, "it has one score per pair, not two regimes"),
    "no bias": Feature(lambda p: p.bias is None, "it is for a bias by distance, and there is none"),
    "bias": Feature(lambda p: p.bias is not None, "it adds no bias to the score"),
    "bias gradient": Feature(lambda p: _learns(p.bias), "it gives no gradient to a bias"),
    "short bias": Feature(
        lambda p: p.bias is not None and p.bias.shape[1] < p.v.shape[2],
        "its bias must have as many distances as there are keys",
    ),
    "pairs": Feature(
        lambda p: p.pairs is not None, "it takes no bias that depends on both positions of a pair"
    ),
    "normaliser": Feature(
        lambda p: p.normaliser is not None, "its weights are those of softmax, and of no other"
    ),
    "selection": Feature(
        lambda p: p.selection is not None, "it hands nothing on from a query to the next"
    ),
    "no carry": Feature(
        lambda p: p.carry is None, "it is for scores carried up through layers, and there are none"
    ),
    "carry": Feature(lambda p: p.carry is not None, "it takes no scores of the layers below"),
    "sink": Feature(lambda p: p.sink is not None, "it has no sink"),
    "cap": Feature(lambda p: p.cap is not None, "it has no cap"),
    "sliding window": Feature(
        lambda p: p.visibility.window is not None, "it takes no window beside plain causality"
    ),
    "documents": Feature(
        lambda p: p.visibility.query_documents is not None,
        "it takes no documents beside plain causality",
    ),
    "mask": Feature(
        lambda p: p.visibility.mask is not None, "it takes no mask beside plain causality"
    ),
    "mask gradient": Feature(
        lambda p: _learns(p.visibility.mask), "it gives no gradient to a mask"
    ),
    "padding": Feature(
        lambda p: p.visibility.padding is not None, "it takes no padding, which is a mask"
    ),
    "irregular positions": Feature(
        _irregular, "it needs consecutive positions: any others take a mask, and it takes no mask"
    ),
    "no causality": Feature(lambda p: not p.visibility.causal, "it is for causal attention"),
    "other rows than keys": Feature(
        lambda p: p.visibility.causal and p.q.shape[2] not in (1, p.v.shape[2]),
        "its causal mask needs as many queries as keys",
    ),
    "more rows than keys": Feature(
        lambda p: p.q.shape[2] > p.v.shape[2], "it needs a key at every query's position"
    ),
    "earlier keys": Feature(
        lambda p: p.q.shape[2] < p.v.shape[2], "it needs a query at every key's position"
    ),
    "no rows": Feature(lambda p: p.q.shape[2] == 0, "it needs a query"),
    "other value size": Feature(
        lambda p: p.v.shape[-1] != p.q.shape[-1], "its values must have the size of the keys"
    ),
    "dropout": Feature(lambda p: p.dropout > 0, "it drops no weights"),
    "float64": Feature(
        lambda p: p.q.dtype == torch.float64, "it computes in float32, float16 or bfloat16"
    ),
    "half precision": Feature(
        lambda p: p.q.dtype in _HALF, "it does not compute in half precision"
    ),
    "torch.func": Feature(
        lambda p: transformed(),
        "torch.func and forward-mode derivatives see through plain operations only",
    ),
    "CUDA": Feature(
        lambda p: p.q.device.type == "cuda" or not on_cpu(p.q),
        "it stands on operations that only a CPU has",
    ),
}
_ALL = frozenset(FEATURES)
# Keys are counted by v: with two regimes there may be fewer near keys than far ones.


@dataclass(frozen=True)
class Capabilities:
    """A kernel's row: what it serves, whether it can be differentiated twice, and a remark."""

    kernel: str
    serves: frozenset[str]
    second_derivative: bool
    note: str


_PLAIN = _ALL - {
    *("bias", "bias gradient", "short bias", "pairs", "normaliser", "selection"),
    *("sink", "cap", "sliding window", "documents"),
    *("mask", "mask gradient", "padding", "irregular positions", "carry", "torch.func"),
}
TABLE: Mapping[str, Capabilities] = {
    row.kernel: row
    for row in (
        Capabilities(
            "fused",
            _PLAIN - {"two regimes", "other rows than keys", "other value size"},
            False,
            "scaled_dot_product_attention; on CUDA it reaches the stock flash operators",
        ),
        Capabilities(
            "bias",
            (_PLAIN | {"bias", "bias gradient"})
            - {"no bias", "two regimes", "more rows than keys", "dropout"},
            False,
            "a bias by distance as a strided view of one line; its gradient by diagonal sums",
        ),
        Capabilities(
            "two-regime",
            _PLAIN
            - {
                *("one regime", "no causality", "more rows than keys", "no rows"),
                *("other value size", "dropout", "CUDA"),
            },
            False,
            "the far part by a CPU's flash operator, the near band by tiles",
        ),
        Capabilities(
            "two-regime-flash",
            _PLAIN
            - {
                *("one regime", "no causality", "more rows than keys", "earlier keys", "no rows"),
                *("other value size", "dropout", "CUDA"),
            },
            False,
            "both parts by a CPU's flash operator, the near one in sliding chunks",
        ),
        Capabilities(
            "carried",
            _ALL
            - {
                *("no carry", "two regimes", "pairs", "normaliser", "selection", "mask gradient"),
                "torch.func",
            },
            False,
            "scores of all layers in one buffer, undone in the backward; one number per pair",
        ),
        Capabilities(
            "concatenated",
            _ALL - {"no carry", "two regimes", "mask gradient", "torch.func"},
            False,
            "the features of all layers side by side, by any kernel that serves the rest",
        ),
        Capabilities(
            "chunked",
            _ALL - {"pairs", "normaliser", "selection", "mask gradient", "carry", "torch.func"},
            False,
            "tiles of nearly any problem; no T × S matrix",
        ),
        Capabilities(
            "strips",
            _ALL - {"carry", "torch.func"},
            True,
            "the definition by strips of whole rows, each computed once more in the backward",
        ),
        Capabilities(
            "precise",
            _ALL,
            False,
            "half precision widened to float32: no score is rounded, by the fastest kernel",
        ),
        Capabilities("reference", _ALL, True, "the definition; holds the whole T × S matrix"),
    )
}


def shown(problem: Problem) -> frozenset[str]:
    """The features of a problem."""
    return frozenset(name for name, feature in FEATURES.items() if feature.shown(problem))


def why_not(kernel: str, problem: Problem) -> str | None:
    """The reason why a kernel cannot serve the problem, or None.

    Its row of the table says it, and where scores are carried the layers below, which one kernel
    sums.
    """
    serves = capabilities(kernel).serves
    for name, feature in FEATURES.items():
        if name not in serves and feature.shown(problem):
            return feature.refusal
    return None if problem.carry is None else problem.carry.elsewhere(kernel)


def capabilities(kernel: str) -> Capabilities:
    """The row of a kernel. Raises `InputError` for an unknown name."""
    if kernel not in TABLE:
        raise InputError(f"unknown kernel {kernel!r}; expected one of {', '.join(TABLE)}")
    return TABLE[kernel]


def capability_table() -> str:
    """The table in Markdown: a line per feature, a column per kernel."""
    lines = ["| a problem with | " + " | ".join(TABLE) + " |", "| --- |" + " --- |" * len(TABLE)]
    for name in FEATURES:
        marks = ("yes" if name in row.serves else "no" for row in TABLE.values())
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    twice = ("yes" if row.second_derivative else "no" for row in TABLE.values())
    return "\n".join([*lines, "| a second derivative | " + " | ".join(twice) + " |"])

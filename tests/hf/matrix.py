"""Which family is served by which method, and which score it has: tried on tiny models."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import normattn
from normattn import InputError, score_of
from normattn.hf.score_of import TOLERANCE, LayerScore

from .families import logits
from .tiny import LENGTH, VOCABULARY, build, configuration

COUNT = 3 * LENGTH // 2
METHODS: dict[str, dict[str, Any]] = {
    **{key: {"factor": 4} for key in ("PI", "NTK", "NTK-mixed")},
    "ABF": {"base": 3e7},
    "YaRN": {"factor": 4},
    "DynamicNTK": {},
    "ReRoPE": {"window": 4},
    "LeakyReRoPE": {"window": 4, "s": 3.0},
    "SelfExtend": {"window": 4, "group": 3},
    "DualChunk": {"size": 9, "local": 4},
    "logn+": {},
}
# Values with which a method changes nothing on a text of COUNT tokens.
NOTHING: dict[str, dict[str, Any]] = {
    **{key: {"factor": 1} for key in ("PI", "NTK", "NTK-mixed", "YaRN")},
    **{key: {"train_length": COUNT} for key in ("DynamicNTK", "DualChunk", "logn+")},
    "ReRoPE": {"window": COUNT, "train_length": COUNT},
    "LeakyReRoPE": {"window": 4, "s": 1.0},
    "SelfExtend": {"window": COUNT, "group": 3, "train_length": COUNT},
}
SERVED = "served"
CLOSE, EFFECT = 1e-3, 1e-4
STEPS = (9, 6, 6, 1, 1, 1)


def tokens(count: int = COUNT, rows: int = 2) -> Tensor:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (rows, count), generator=generator)


@torch.no_grad()
def stepwise(
    model: Any, ids: Tensor, steps: Iterable[int] = STEPS, cache: Any = None, **masks: Tensor
) -> Tensor:
    """The logits of a prefill, a longer step and single tokens; `masks` are of all tokens."""
    given: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    found, at = [], 0
    for step in steps:
        given |= {name: mask[:, : at + step] for name, mask in masks.items()}
        out = model(input_ids=ids[:, at : at + step], use_cache=True, **given)
        given["past_key_values"], at = out.past_key_values, at + step
        found.append(out.logits)
    return torch.cat(found, 1)


def row(family: str, methods: Iterable[str] = METHODS) -> dict[str, str]:
    """What each method says to the family's tiny model: "served", the refusal, or what is wrong.

    Served means: the method has an effect, none where its values mean none, decodes as it reads,
    agrees with transformers' own YaRN and linear scaling where there is one, and is undone exactly.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, ids = build(family), tokens()
        as_trained = logits(model, ids)
        cached = _has_cache(model, ids, as_trained)
        return {name: _try(family, model, name, ids, as_trained, cached) for name in methods}


def _try(family: str, model: Any, name: str, ids: Tensor, as_trained: Tensor, cached: bool) -> str:
    said = SERVED
    try:
        wrong = _faults(family, model, name, ids, as_trained, cached)
    except InputError as refusal:
        said, wrong = general(str(refusal)), []
    if not torch.equal(logits(model, ids), as_trained):
        wrong.append("is not undone")
    return "WRONG: " + "; ".join(wrong) if wrong else said


_GENERAL = (
    (r"^\w+ cannot be extended: ", ""),
    (r"^\w+For\w+ ", "the model "),
    (r"^layer \d+ of this model \(\w+\)", "a layer"),
    (r"^a layer reads \d+ keys of \d+ tokens:", "a layer has other keys than its tokens:"),
    (r"and \S+ needs unscaled ones", "and the method needs unscaled ones"),
)


def general(refusal: str) -> str:
    """The reason without the names of the model and the method, which the table has."""
    reason = " ".join(refusal.split())
    for pattern, words in _GENERAL:
        reason = re.sub(pattern, words, reason)
    return reason


def _faults(
    family: str, model: Any, name: str, ids: Tensor, as_trained: Tensor, cached: bool
) -> list[str]:
    wrong: list[str] = []
    length = {"train_length": LENGTH}
    with normattn.extend(model, name, **length, **METHODS[name]) as extension:
        found = logits(model, ids)
        if not float((found - as_trained).abs().max()) > EFFECT:
            wrong.append("no effect")
        decoded = stepwise(model, ids) if cached else found
        if not _close(decoded, found):
            wrong.append("a cache gives other logits")
    if name in NOTHING:
        with normattn.extend(model, name, **{**length, **NOTHING[name]}):
            if not _close(logits(model, ids), as_trained):
                wrong.append("changes what it promises not to")
    # Ours leaves layers within a window as trained, theirs scales them as well.
    left = extension.resolved.left
    theirs = None if left else native(family, model, name, ids, as_trained)
    if theirs is not None and not _close(found, theirs):
        wrong.append("differs from transformers' own")
    return wrong


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= CLOSE * max(1.0, float(other.abs().max())))


def _has_cache(model: Any, ids: Tensor, as_trained: Tensor) -> bool:
    """Whether the model's own cache gives what it gives without."""
    try:
        return _close(stepwise(model, ids), as_trained)
    except Exception:  # some take no cache, or cannot go on with several tokens
        return False


def native(family: str, model: Any, name: str, ids: Tensor, as_trained: Tensor) -> Tensor | None:
    """The logits of the same weights with transformers' own scaling; None where it has none."""
    kind = {"YaRN": "yarn", "PI": "linear"}.get(name)
    config = configuration(family)
    text = config.get_text_config()
    given = getattr(text, "rope_parameters", None)
    if kind is None or not isinstance(given, Mapping):
        return None
    text.rope_parameters = _scaled(given, kind)
    try:
        other = type(model)(config).eval()
        other.load_state_dict(model.state_dict())
        found = logits(other, ids)
    except Exception:  # a family whose own code knows no scaling
        return None
    return None if torch.equal(found, as_trained) else found


def _scaled(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Rope parameters with this scaling on the layers that see everything."""
    if any(isinstance(each, Mapping) for each in given.values()):
        return {
            name: each
            if "sliding" in name or not isinstance(each, Mapping)
            else _scaled(each, kind)
            for name, each in given.items()
        }
    if given.get("rope_type", "default") != "default":
        return dict(given)
    more = {"original_max_position_embeddings": LENGTH} if kind == "yarn" else {}
    return {**given, "rope_type": kind, "factor": 4.0, **more}


PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SCORES = "## Scores"
"""Where the part of the page begins that `scripts/family_scores.py` makes."""


def read_page(path: Path = PAGE) -> dict[str, dict[str, str]]:
    """The rows of the page as it stands."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = lines.index("## Reasons")
    reasons = [line.partition(". ")[2] for line in lines[start + 2 : lines.index(SCORES) - 1]]
    total = next(line.split("|")[1].strip() for line in lines if line.startswith("| **of "))
    rows = {}
    for line in lines[:start]:
        cells = [each.strip() for each in line.strip("|").split("|")]
        if len(cells) == len(METHODS) + 1 and cells[0] not in ("family", "---", total):
            answers = [SERVED if each == "●" else reasons[int(each) - 1] for each in cells[1:]]
            rows[cells[0]] = dict(zip(METHODS, answers, strict=True))
    return rows


def score_row(family: str) -> tuple[str, ...]:
    """What is said of each run of layers with one score; a sentence where nothing can be read."""
    # Few enough keys for so short a text to leave others out.
    more = {"keep_window_size": 6} if family == "doge" else {}
    try:
        read = score_of(build(family, **more))
    except InputError as error:
        return (f"all layers: not identified: {' '.join(str(error).split())}",)
    return tuple(f"layer {layer.layer}: {_said(layer)}" for layer in read.layers)


def _said(layer: LayerScore) -> str:
    """The score; else what is missing, without the layer's name and what differs by processor."""
    note = "" if layer.mask_note is None else f" ({layer.mask_note})"
    if layer.verified:
        return f"`{layer.spec}`{note}"
    lacks = str(layer.lacks).partition("): ")[2]
    agrees = layer.difference is not None and layer.difference < TOLERANCE
    but = f"; otherwise `{layer.spec}`{note}" if agrees else ""
    return "not identified: " + re.sub(r" by \S+ of its largest output", "", lacks) + but


def score_line(family: str, said: Sequence[str]) -> str:
    """The family's row of the table."""
    return f"| {family} | {'<br>'.join(_short(said))} |"


def _short(said: Sequence[str]) -> list[str]:
    """One answer of all layers alone; else each answer once, with its layers."""
    layers: dict[str, list[str]] = {}
    for line in said:
        where, _, score = line.partition(": ")
        layers.setdefault(score, []).append(where.removeprefix("layer "))
    if len(layers) == 1:
        return list(layers)
    return [f"layer {', '.join(dict.fromkeys(w))}: {score}" for score, w in layers.items()]

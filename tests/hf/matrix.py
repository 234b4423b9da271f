"""Which family is served by which method: every answer is tried on a tiny model, and checked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import normattn
from normattn import InputError

from .tiny import LENGTH, VOCABULARY, build, configuration

COUNT = 3 * LENGTH // 2
METHODS: dict[str, dict[str, Any]] = {
    "PI": {"factor": 4},
    "NTK": {"factor": 4},
    "NTK-mixed": {"factor": 4},
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
def logits(model: Any, ids: Tensor) -> Tensor:
    """Those of one forward without a cache."""
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@torch.no_grad()
def stepwise(
    model: Any, ids: Tensor, steps: Iterable[int] = STEPS, cache: Any = None, **masks: Tensor
) -> Tensor:
    """Those of a prefill, a longer step and single tokens; `masks` are of all tokens."""
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
    try:
        wrong = _faults(family, model, name, ids, as_trained, cached)
    except InputError as refusal:
        wrong = [] if torch.equal(logits(model, ids), as_trained) else ["is not undone"]
        return "WRONG: " + "; ".join(wrong) if wrong else general(str(refusal))
    return "WRONG: " + "; ".join(wrong) if wrong else SERVED


_GENERAL = (
    (r"^\w+ cannot be extended: ", ""),
    (r"^\w+For\w+ ", "the model "),
    (r"^layer \d+ of this model \(\w+\)", "a layer"),
    (
        r"^a layer reads \d+ keys of \d+ tokens: they",
        "a layer has other keys than its tokens: they",
    ),
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
    if not torch.equal(logits(model, ids), as_trained):
        wrong.append("is not undone")
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


KINDS = {"YaRN": "yarn", "PI": "linear"}


def native(family: str, model: Any, name: str, ids: Tensor, as_trained: Tensor) -> Tensor | None:
    """The logits of the same weights with transformers' own scaling; None where it has none."""
    if name not in KINDS:
        return None
    config = configuration(family)
    text = config.get_text_config()
    given = getattr(text, "rope_parameters", None)
    if not isinstance(given, Mapping):
        return None
    text.rope_parameters = _scaled(given, KINDS[name])
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
            name: _scaled(each, kind)
            if isinstance(each, Mapping) and "sliding" not in name
            else each
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

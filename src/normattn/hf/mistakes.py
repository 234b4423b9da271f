"""The usual mistakes in what an engine is told of positions, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from normattn.hf.config_values import ROPE_NAMES, ROPE_NUMBERS
from normattn.hf.engine_input import Told
from normattn.score import ScoreSpec

_COUNTED = ("yarn", "llama3", "longrope")
"""The kinds whose frequencies depend on the trained length."""
_KNOWN = {
    *(*ROPE_NAMES, *ROPE_NUMBERS, "truncate", "finetuned", "mrope_section", "mrope_interleaved"),
    *("short_factor", "long_factor"),
}
_DEFAULT_BASE = 10000.0
Rope = Mapping[str, Any]


@dataclass(frozen=True)
class Meant:
    """What is meant: `spec` is None for the model as its configuration says.

    `trained` and `longest` are tokens, `bases` the rotary bases of the model.
    """

    name: str
    spec: ScoreSpec | None
    trained: int | None
    longest: int | None
    bases: tuple[float, ...]


@dataclass(frozen=True)
class Given:
    """What an engine was told, and what came of it.

    `plain`: its positions are those of training. `as_meant`: nothing differs from what is meant.
    `own`: the rope parameters that the model's own configuration has.
    """

    told: Told
    plain: bool
    as_meant: bool
    own: frozenset[str]


def mistakes(meant: Meant, given: Given) -> Iterator[str]:
    """Every usual mistake that was made; none where the model's own configuration was told."""
    if given.as_meant and meant.spec is None:
        return
    for rope in given.told.rope.values():
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind in _COUNTED:
            yield from _length(meant, given, rope, kind)
        yield from _ignored(meant, given, rope, kind)
        yield from _base(meant, given, rope)
        if kind == "yarn" and float(rope.get("factor") or 1) > 1:
            yield from _static(meant)
    yield from _length_alone(meant, given)


def _length(meant: Meant, given: Given, rope: Rope, kind: str) -> Iterator[str]:
    name = {"yarn": "YaRN"}.get(kind, kind)
    length, whole = rope.get("original_max_position_embeddings"), _configured(given.told)
    if length is None:
        yield (
            f"{name}'s factor {_number(rope.get('factor'))} stands without "
            "original_max_position_embeddings: transformers, SGLang and llama.cpp take the longest "
            f"length, {whole:,}, for it, and vLLM does not start"
        )
    counted = whole if length is None else int(length)
    if meant.trained is not None and counted > meant.trained:
        source = "max_position_embeddings" if length is None else "original_max_position_embeddings"
        yield (
            f"{name} stands on top of a length that was multiplied already: its turns are counted "
            f"within {counted:,} tokens ({source}), and the weights were trained to read "
            f"{meant.trained:,}"
        )


def _ignored(meant: Meant, given: Given, rope: Rope, kind: str) -> Iterator[str]:
    factors = {
        name: value
        for name, value in rope.items()
        if "factor" in name and "partial" not in name and _number(value) not in ("1", "None")
    }
    engine = {"vllm": {"mixed_b"}, "sglang": {"attn_factor"}}.get(given.told.engine, set())
    unknown = sorted(rope.keys() - _KNOWN - given.own - engine)
    for name in unknown:
        yield f"{name} is no rope parameter: it is ignored"
    if given.plain and factors and (meant.spec is not None or kind == "default"):
        said = ", ".join(f"{name}={_number(value)}" for name, value in sorted(factors.items()))
        yield f"the factors are ignored ({said}): {_why_ignored(given.told, kind)}"
    factor = rope.get("attention_factor")
    if kind == "yarn" and factor is not None and not given.as_meant:
        yield (
            f"attention_factor={_number(factor)} stands in place of the factor that YaRN makes of "
            "its stretch, 0.1·ln s + 1: it is the factor itself, not a switch"
        )


def _why_ignored(told: Told, kind: str) -> str:
    beside = told.raw.keys() & {"rope_parameters", "rope_scaling"}
    if isinstance(told.raw.get("text_config"), Mapping) and beside:
        return "they stand beside text_config, whose own rope parameters are the decoder's"
    return f"with rope_type {kind!r} the frequencies are those of training"


def _base(meant: Meant, given: Given, rope: Rope) -> Iterator[str]:
    told = rope.get("rope_theta")
    bases = set(meant.bases) - {_DEFAULT_BASE}
    if told is None and rope and not given.as_meant and bases and _lost(given.told):
        yield (
            "rope_theta is missing beside the scaling, which replaces all there was: the base is "
            f"{_DEFAULT_BASE:,.0f} instead of {max(bases):,.0f}"
        )


def _lost(told: Told) -> bool:
    """Whether the base that comes of it is the default for want of another."""
    config = told.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta") or _DEFAULT_BASE) == _DEFAULT_BASE


def _static(meant: Meant) -> Iterator[str]:
    within = "" if meant.trained is None else f" within {meant.trained:,} tokens"
    yield (
        f"YaRN is static: it changes short prompts too, those{within} that the model was trained "
        "for; serve them without it where they matter"
    )


def _length_alone(meant: Meant, given: Given) -> Iterator[str]:
    scaled = any(
        str(rope.get("rope_type", rope.get("type", "default"))) != "default"
        for rope in given.told.rope.values()
    )
    longest = given.told.longest
    if (
        given.plain
        and not scaled
        and longest is not None
        and meant.trained is not None
        and longest > meant.trained
    ):
        yield (
            f"the length alone was raised, to {longest:,} tokens: the frequencies are those of "
            f"training, which read {meant.trained:,}"
        )


def _configured(told: Told) -> int:
    inner = told.raw.get("text_config")
    raw = inner if isinstance(inner, Mapping) else told.raw
    longest = raw.get("max_position_embeddings")
    return int(longest) if isinstance(longest, int | float) else 0


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)

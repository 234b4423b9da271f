"""`verify`: does an engine compute the intended positions from its settings?

Both sides become configurations of transformers, rewritten to what the engine computes where it
reads a setting differently. A small model of each (`tiny_model`) then gives frequencies, amplitude,
softmax scale, windows and rotary width at a short, the trained and the longest length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from normattn.errors import InputError
from normattn.hf.engine_input import (
    ENGINE_NAMES,
    SCALING_FIELDS,
    EngineSettings,
    config_dict,
    decoder_fields,
    read_engine_settings,
    rope_parameter_sets,
)
from normattn.hf.engines import NEEDS_ORIGINAL_LENGTH, derived_length
from normattn.hf.llama_cpp import yarn_factor
from normattn.hf.load import read_configuration
from normattn.hf.model_parts import explained, known_length, model_parts, rope_type_of
from normattn.hf.native import take_record
from normattn.hf.plan import Plan, plan, replaces_attention
from normattn.hf.tiny_model import (
    SHORT,
    Positions,
    differences,
    read_positions,
    rotates,
    small_model,
)
from normattn.io import expand_path

_ROPE_FIELDS = {"partial_rotary_factor", "finetuned", "mrope_section", "mrope_interleaved"}
_ENGINE_ROPE_FIELDS = {"vllm": {"mixed_b"}, "sglang": {"attn_factor"}}
_ORIGINAL = "original_max_position_embeddings"
_DEFAULT_BASE = 10000.0
_MAX_LENGTH = 1 << 31


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`.

    Attributes:
        intended: a description of the method.
        differences: what is not as intended, a sentence each; empty where all is equal.
        mistakes: common mistakes in the settings, a sentence each.
    """

    intended: str
    differences: tuple[str, ...]
    mistakes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the engine computes the intended positions, up to the intended length."""
        return not self.differences

    def __str__(self) -> str:
        head = "as intended" if self.equal else "not as intended"
        return "\n".join([f"{head}: {self.intended}", *self.differences, *self.mistakes])


def verify(
    folder: str | Path,
    against: str | Path,
    method: str | None = None,
    *,
    train_length: int | None = None,
) -> Verdict:
    """Compare an engine's settings with the intended ones.

        normattn.verify("extended", "served/config.json")

    Args:
        folder: the model: a folder, a GGUF file, a config.json or a name on the hub. The intended
            method is the one that it was saved with, or that of its configuration.
        against: the engine's settings: a folder, a config.json, a JSON of some of its fields
            (as for vLLM and SGLang), a GGUF file, or a text: a command line, a compose file, a
            YAML of options, or `--emit gguf`'s keys.
        method: the intended method instead, e.g. "YaRN(factor=4)".
        train_length: the training length of the model; by default that of its configuration.

    Raises `InputError` for input that is not a configuration, and for a method that no rotary
    configuration can express (ReRoPE, log-n).
    """
    config = read_configuration(folder)
    if (record := take_record(config, folder)) is not None:
        method = method or record["method"]
        train_length = train_length or record["train_length"]
    model_file = expand_path(folder)
    if model_file.suffix == ".gguf":
        config = read_engine_settings(model_file, config_dict(config)).config
    with explained(str(against), "cannot be compared"), torch.device("cpu"):
        settings = read_engine_settings(against, config_dict(config))
        intended = _resolve_intention(config, method, train_length)
        reach = intended.max_length
        compared = {intended.train_length, reach, settings.max_length}
        for rope in (*rope_parameter_sets(config_dict(config)), *settings.ropes):
            if rope_type_of(rope) == "dynamic" and reach is not None:  # which changes beyond it
                compared.add(int(reach * max(2.0, float(rope.get("factor") or 1.0))))
        lengths = [length for length in compared if length and SHORT < length < _MAX_LENGTH]
        unmodified = read_positions(config, lengths)
        if not rotates(unmodified):
            raise InputError(
                f"no layer of a {config.get_text_config().model_type} model passes rotary "
                "positions to its attention function, so there is nothing to compare"
            )
        settings = _apply_engine_rules(settings, config, unmodified)
        computed = read_positions(settings.config, lengths)
        planned = intended.plan
        expected = unmodified if planned is None else _extended(unmodified, planned)
        problems = (
            *differences(expected, computed),
            *settings.ignored,
            *_length_differences(intended, settings),
        )
        mistakes: Iterable[str] = ()
        if problems or planned is not None:
            unscaled = not any(differences(unmodified, computed))
            mistakes = _mistakes(intended, settings, config, unscaled, correct=not problems)
        return Verdict(intended.text, problems, tuple(mistakes))


class _Intention(NamedTuple):
    """The intended method and its description; `plan` is None for the model's configuration."""

    text: str
    plan: Plan | None
    train_length: int | None
    max_length: int | None


def _resolve_intention(config: Any, method: str | None, length: int | None) -> _Intention:
    model, planned = small_model(config), None
    parts = model_parts(model)
    trained: int | None
    if method is None:
        longest = getattr(parts.config, "max_position_embeddings", None)
        originals = (rope.get(_ORIGINAL) for rope in (*parts.ropes, parts.config.to_dict()))
        trained = length or next((x for x in originals if isinstance(x, int) and x), longest)
        text = f"{parts.name} as its configuration says"
    else:
        planned = plan(model, method, length if length is not None else known_length(parts)[0])
        spec = planned.spec
        if replaces_attention(spec):
            raise InputError(
                f"no configuration of rotary positions expresses {spec.method}: an engine without "
                "normattn runs the unmodified model"
            )
        trained, text = spec.train_length, spec.method_text
        factor = getattr(spec.rope_scaling, "stretch", None)
        longest = None if factor is None or trained is None else int(trained * factor)
    text += "" if trained is None else f", trained on {trained:,} tokens"
    text += "" if longest in (None, trained) else f", up to {longest:,} tokens"
    return _Intention(text, planned, trained, longest)


def _extended(unmodified: Positions, planned: Plan) -> Positions:
    """The positions under a method that changes frequencies."""
    extended = {length: dict(layers) for length, layers in unmodified.items()}
    for layer in planned.layers:
        if layer.rotation is not None:
            theta, amplitude = layer.rotation.spectrum(planned.spec)
            for layers in extended.values():
                values = layers[layer.index]
                layers[layer.index] = replace(values, frequencies=theta, amplitude=amplitude)
    return extended


def _apply_engine_rules(
    settings: EngineSettings, config: Any, unmodified: Positions
) -> EngineSettings:
    """The settings with which transformers computes what the engine computes.

    They also get the engine's longest text, and a sentence for each setting that the engine ignores
    or refuses. The rules are vLLM's `get_rope` and `_get_and_verify_max_len`, and SGLang's
    counterparts.
    """
    engine, raw, ignored = settings.engine, copy.deepcopy(settings.raw), list(settings.ignored)
    spectra = (values.frequencies for values in unmodified[SHORT].values())
    rotary_dim = 2 * next(theta.numel() for theta in spectra if theta is not None)
    if settings.rotary_dim not in (None, rotary_dim):
        ignored.append(
            f"rotary width: {settings.rotary_dim} features rotate instead of {rotary_dim}"
        )
    if engine != "llama.cpp" and not settings.complete:
        model_rope: Any = next(iter(rope_parameter_sets(config_dict(config))), {})
        ignored += [
            f"{name} is missing in an override that replaces all: it was {model_rope[name]}"
            for rope in settings.ropes
            for name in ("partial_rotary_factor", "mrope_section")
            if name not in rope and model_rope.get(name) not in (None, 1, 1.0)
        ]
    max_length = settings.max_length
    if engine in ("vllm", "sglang"):
        derived = derived_length(decoder_fields(raw), engine)
        ropes, longest = rope_parameter_sets(raw), derived or math.inf
        if settings.allows_long and engine == "sglang":
            longest = math.inf
        elif settings.allows_long:  # a row of vLLM's table for each derived or scaled position
            for rope in (rope for rope in ropes if "yarn" in rope_type_of(rope)):
                rows = float(rope.get(_ORIGINAL) or derived or 0) * float(rope.get("factor") or 1)
                longest = max(longest, rows)
        if max_length and max_length > longest:
            ignored.append(
                f"{ENGINE_NAMES[engine]} does not serve a length of {max_length:,}: it derives "
                f"{derived:,} tokens from max_position_embeddings, which must be raised"
            )
        max_length = max_length or derived
        for rope in ropes:
            ignored += _apply_rope_rules(rope, raw, engine, max_length)
    return replace(settings, raw=raw, max_length=max_length, ignored=tuple(ignored))


def _apply_rope_rules(
    rope: dict[str, Any], raw: Mapping[str, Any], engine: str, max_length: int | None
) -> Iterator[str]:
    """Rewrite rope parameters to what vLLM or SGLang computes; yield what it ignores or refuses."""
    rope_type, original = rope_type_of(rope), rope.get(_ORIGINAL)
    if engine == "sglang" and rope_type == "yarn":
        default = yarn_factor(float(rope.get("factor") or 1.0))
        ignored, multiple = rope.pop("attention_factor", None), rope.pop("attn_factor", None)
        if ignored is not None and abs(float(ignored) - default) > 1e-4:
            yield (
                "attention_factor is ignored: SGLang reads attn_factor, a multiple of 0.1·ln s + 1"
            )
        if multiple is not None:
            rope["attention_factor"] = float(multiple) * default
    if engine == "sglang":
        return
    if rope_type in NEEDS_ORIGINAL_LENGTH and original is None:
        if raw.get(_ORIGINAL) is None:
            yield f"vLLM does not start: {rope_type} needs {_ORIGINAL}"
    elif rope_type == "longrope" and max_length and max_length > int(original or 0):
        rope["short_factor"] = rope["long_factor"]
    if rope_type == "dynamic" and "factor" in rope and "alpha" not in rope:
        yield (
            "vLLM makes one base of dynamic NTK for all lengths: it does not follow the length of "
            "each text"
        )


def _length_differences(intended: _Intention, settings: EngineSettings) -> Iterator[str]:
    trained, reach, longest = intended.train_length, intended.max_length, settings.max_length
    for original in (rope.get(_ORIGINAL) for rope in settings.ropes):
        if isinstance(original, int | float) and trained not in (None, original):
            yield f"trained length: {int(original):,} instead of {trained:,} tokens"
    if longest is None or reach is None:
        return
    if longest < reach and (intended.plan is not None or settings.engine == "hf"):
        shared = f": {settings.slots} parallel requests share the context (-np)"
        text = f"longest text: {longest:,} instead of {reach:,} tokens"
        yield text + shared * (settings.slots > 1)
    if longest > reach:
        yield f"longest text: {longest:,} tokens; the intended method reaches {reach:,}"


def _mistakes(
    intended: _Intention, settings: EngineSettings, config: Any, unscaled: bool, correct: bool
) -> Iterator[str]:
    """A sentence for each common mistake; the engine's positions are `unscaled` or `correct`."""
    model_ropes = rope_parameter_sets(config_dict(config))
    bases = {float(rope["rope_theta"]) for rope in model_ropes if rope.get("rope_theta")}
    known = SCALING_FIELDS | _ROPE_FIELDS | _ENGINE_ROPE_FIELDS.get(settings.engine, set())
    known = known.union(*model_ropes)
    trained, max_length = intended.train_length, settings.max_length or 0
    for rope in settings.ropes:
        rope_type = rope_type_of(rope)
        if rope_type in NEEDS_ORIGINAL_LENGTH:
            yield from _original_length_mistakes(intended, settings, rope)
        for name in sorted(rope.keys() - known):
            yield f"{name} is no rope parameter: it is ignored"
        if unscaled and (intended.plan is not None or rope_type == "default"):
            yield from _ignored_factors(settings, rope)
        factor, bases = rope.get("attention_factor"), bases - {_DEFAULT_BASE}
        if not correct and rope_type == "yarn" and factor is not None:
            yield (
                f"attention_factor={_format_number(factor)} replaces the factor that YaRN makes "
                "of its stretch, 0.1·ln s + 1: it is the factor itself, not a switch"
            )
        if not correct and rope.get("rope_theta") is None and bases:
            computed = getattr(settings.config.get_text_config(), "rope_parameters", None) or {}
            if float(computed.get("rope_theta") or _DEFAULT_BASE) == _DEFAULT_BASE:
                yield (
                    "rope_theta is missing next to the scaling, which replaces all there was: the "
                    f"base is {_DEFAULT_BASE:,.0f} instead of {max(bases):,.0f}"
                )
        if rope_type == "yarn" and float(rope.get("factor") or 1) > 1:
            within = "" if trained is None else f" (within {trained:,} tokens)"
            yield (
                f"YaRN is static: it changes short prompts too{within}; if these matter, serve "
                "them without it"
            )
    longer = trained is not None and max_length > trained
    if unscaled and longer and all(rope_type_of(rope) == "default" for rope in settings.ropes):
        yield (
            f"the length alone was raised, to {max_length:,} tokens: the frequencies are those of "
            f"training, which read {trained:,}"
        )


def _ignored_factors(settings: EngineSettings, rope: Mapping[str, Any]) -> Iterator[str]:
    names = [name for name in sorted(rope) if "factor" in name and "partial" not in name]
    factors = {name: _format_number(rope[name]) for name in names}
    changed = ", ".join(f"{name}={n}" for name, n in factors.items() if n not in ("1", "None"))
    why = f"with rope_type {rope_type_of(rope)!r} the frequencies are those of training"
    nested = decoder_fields(settings.raw) is not settings.raw
    if nested and rope_parameter_sets({**settings.raw, "text_config": None}):
        why = "they are outside of text_config, whose own rope parameters are the decoder's"
    if changed:
        yield f"the factors are ignored ({changed}): {why}"


def _original_length_mistakes(
    intended: _Intention, settings: EngineSettings, rope: Mapping[str, Any]
) -> Iterator[str]:
    rope_type, source = rope_type_of(rope), _ORIGINAL
    name = "YaRN" if rope_type == "yarn" else rope_type
    length = rope.get(source)
    if length is None:
        source = "max_position_embeddings"
        length = decoder_fields(settings.raw).get(source) or 0
        factor = _format_number(rope.get("factor"))
        yield (
            f"{name}'s factor {factor} is given without {_ORIGINAL}: vLLM does not start, and "
            f"other engines take the longest length, {int(length):,}, for it"
        )
    if intended.train_length is not None and length > intended.train_length:
        yield (
            f"{name} is applied to a length that was multiplied already: rotations are counted "
            f"within {int(length):,} tokens ({source}), and the weights were trained on "
            f"{intended.train_length:,}"
        )


def _format_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)

"""`verify`: does an engine compute, from what it was told, the positions that were meant?

Both sides become what is computed (`positions`): frequencies, amplitude, softmax scale, windows and
rotary width, at a short, the trained and the longest length. A small model of transformers says so
for transformers, vLLM and SGLang, with what those two read otherwise; `llama_cpp` for llama.cpp.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from normattn.errors import InputError
from normattn.hf.engine_input import Told, decoder_of, raw_of, read_told
from normattn.hf.gguf import read_gguf
from normattn.hf.llama_cpp import Served, converted, kind_of, serve
from normattn.hf.model_parts import (
    ROPE_NAMES,
    ROPE_NUMBERS,
    innermost,
    known_length,
    model_parts,
)
from normattn.hf.native import take_record
from normattn.hf.plan import plan, replaces_attention
from normattn.hf.positions import (
    SHORT,
    LayerValues,
    Positions,
    differences,
    read_positions,
    rotates,
)
from normattn.hf.rope_detection import Spectrum, method_frequencies, method_gain
from normattn.hf.tiny_model import read_configuration, small_model
from normattn.io import expanded
from normattn.score import ScoreSpec

_UNMULTIPLIED = (
    *("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"),
)
"""Kinds whose factor vLLM does not multiply max_position_embeddings with."""
_COUNTED = ("yarn", "llama3", "longrope")
"""Kinds whose frequencies depend on the trained length."""
_PARAMETERS = {
    *(*ROPE_NAMES, *ROPE_NUMBERS, "truncate", "finetuned", "mrope_section", "mrope_interleaved"),
    *("short_factor", "long_factor"),
}
_ENGINE_PARAMETERS = {"vllm": {"mixed_b"}, "sglang": {"attn_factor"}}
_BASE = 10000.0


@dataclass(frozen=True)
class Verdict:
    """What `verify` found.

    Attributes:
        meant: the method in words.
        differences: what is not as meant, a sentence each; none where all is equal.
        mistakes: the usual mistakes that were made, a sentence each.
    """

    meant: str
    differences: tuple[str, ...]
    mistakes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether all that is computed of positions is as meant, and the lengths are."""
        return not self.differences

    def __str__(self) -> str:
        head = "as meant" if self.equal else "not as meant"
        return "\n".join([f"{head}: {self.meant}", *self.differences, *self.mistakes])


@dataclass(frozen=True)
class _Meant:
    """What is meant: `spec` is None for the model as its configuration says.

    `trained` and `longest` are tokens, `bases` the rotary bases of the model, `spectra` those of
    the layers that a method changes, whose amplitude is its factor alone.
    """

    name: str
    spec: ScoreSpec | None
    trained: int | None
    longest: int | None
    bases: tuple[float, ...]
    spectra: Mapping[int, Spectrum]


def verify(
    folder: str | Path,
    against: str | Path,
    method: str | None = None,
    *,
    train_length: int | None = None,
) -> Verdict:
    """Compare what an engine was told with what is meant.

        normattn.verify("extended", "served/config.json")

    Args:
        folder: the model: a folder, a GGUF file, a config.json or a name on the hub. What is meant
            is the method that it was saved under, or the model as its configuration says.
        against: what the engine was told: a folder, a config.json, a JSON of some of its fields
            (as for vLLM and SGLang), a GGUF file, or a text: a command line, a compose file, a
            YAML of options, or `--emit gguf`'s keys.
        method: the method that is meant instead, e.g. "YaRN(factor=4)".
        train_length: how far the model was trained to read; by default what its configuration says.

    Raises `InputError` for what is no configuration, and for a method that no rotary configuration
    says (ReRoPE, log-n).
    """
    config = read_configuration(folder)
    record = take_record(config, folder)
    if record is not None:
        method = method or record["method"]
        train_length = train_length or record["train_length"]
    file = expanded(folder)
    own = read_gguf(file) if file.suffix == ".gguf" else None
    told = read_told(against, raw_of(config), own)
    meant = _meant(config, method, train_length)
    lengths = _lengths_to_compare(config, meant, told)
    base = read_positions(config, lengths)
    if not rotates(base):
        raise InputError(
            f"{folder}: no layer of a {config.get_text_config().model_type} model shows rotary "
            "positions to its attention function, so there is nothing to compare"
        )
    wanted = _extended(base, meant.spectra)
    if own is not None and method is None:
        as_is = replace(told, keys=own.own, flags={}, divisors=own.divisors)
        wanted = _by_llama_cpp(as_is, base, config)[0]
    if told.engine == "llama.cpp":
        computed, served = _by_llama_cpp(told, base, config)
        told = replace(told, longest=served.longest, rope={"": served.rope})
        sentences = list(served.ignored)
    else:
        told, computed, sentences = _by_transformers(told, config, lengths)
    found = (*differences(wanted, computed), *sentences, *_lengths(meant, told))
    if not found and meant.spec is None:
        return Verdict(meant.name, (), ())
    plain = not any(differences(base, computed))
    mistakes = _mistakes(meant, told, plain, not found, raw_of(config))
    return Verdict(meant.name, found, tuple(mistakes))


def _meant(config: Any, method: str | None, length: int | None) -> _Meant:
    small = small_model(config)
    parts = model_parts(small)
    longest = getattr(parts.config, "max_position_embeddings", None)
    named = (rope.get("rope_theta") for rope in parts.ropes)
    bases = tuple(sorted(float(base) for base in named if base is not None))
    if method is None:
        originals = [rope.get("original_max_position_embeddings") for rope in parts.ropes]
        originals.append(getattr(parts.config, "original_max_position_embeddings", None))
        trained = next((one for one in originals if isinstance(one, int)), longest)
        name = f"{parts.name} as its configuration says"
        return _Meant(name, None, length or trained, longest, bases, {})
    planned = plan(small, method, length if length is not None else known_length(parts)[0])
    spec = planned.spec
    if replaces_attention(spec):
        raise InputError(
            f"no configuration of rotary positions says {spec.method}: an engine without normattn "
            "reads the model as it was trained"
        )
    assert spec.train_length is not None
    spectra = {
        layer.index: (method_frequencies(spec, layer.rotation).abs(), method_gain(spec))
        for layer in planned.layers
        if layer.rotation is not None
    }
    stretch = getattr(spec.rope_scaling, "stretch", None)
    reach = None if stretch is None else int(spec.train_length * stretch)
    return _Meant(spec.method, spec, spec.train_length, reach, bases, spectra)


def _lengths_to_compare(config: Any, meant: _Meant, told: Told) -> list[int]:
    """The trained and the longest length, and where dynamic NTK has changed the frequencies."""
    known = {meant.trained, meant.longest, told.longest}
    for rope in (*_ropes(raw_of(config)), *told.rope.values()):
        if kind_of(rope) == "dynamic" and meant.longest is not None:
            known.add(int(meant.longest * max(2.0, float(rope.get("factor") or 1.0))))
    return [length for length in known if length is not None and SHORT < length < 1 << 31]


def _extended(base: Positions, spectra: Mapping[int, Spectrum]) -> Positions:
    """The positions under a method: its frequencies, the model's own amplitude times its factor."""

    def extended(index: int, values: LayerValues) -> LayerValues:
        if index not in spectra:
            return values
        theta, gain = spectra[index]
        return replace(values, frequencies=theta, amplitude=gain * base[SHORT][index].amplitude)

    return {
        length: {index: extended(index, values) for index, values in layers.items()}
        for length, layers in base.items()
    }


def _by_transformers(
    told: Told, config: Any, lengths: list[int]
) -> tuple[Told, Positions, list[str]]:
    """What transformers, vLLM or SGLang compute of what they were told; what they refuse."""
    raw = copy.deepcopy(told.raw)
    own: Any = next(iter(_ropes(raw_of(config))), {})
    sentences = [
        f"{name} is missing in an override that replaces all: it was {own[name]}"
        for rope in told.rope.values()
        for name in ("partial_rotary_factor", "mrope_section")
        if rope and not told.whole and name not in rope and own.get(name) not in (None, 1, 1.0)
    ]
    if told.engine != "hf":
        derived = _derived_length(raw, told.engine)
        if told.longest is not None and derived is not None and told.longest > derived:
            sentences.append(
                f"{told.engine} refuses a length of {told.longest:,}: it derives {derived:,} "
                "tokens from max_position_embeddings, which must be raised"
            )
        told = replace(told, longest=told.longest or derived)
        for rope in _ropes(raw):
            read = _as_vllm_reads if told.engine == "vllm" else _as_sglang_reads
            sentences += read(rope, raw, told.longest)
    return told, read_positions(replace(told, raw=raw).config, lengths), sentences


def _ropes(raw: Mapping[str, Any]) -> list[Any]:
    """Every set of rope parameters of a configuration's decoder."""
    decoder = decoder_of(raw)
    return list(innermost(decoder.get("rope_parameters") or decoder.get("rope_scaling")))


def _derived_length(raw: Mapping[str, Any], engine: str) -> int | None:
    """The longest text by the engine's own rule.

    `_get_and_verify_max_len` of vLLM, `get_context_length` of SGLang.
    """
    decoder, factor = decoder_of(raw), 1.0
    length = decoder.get("max_position_embeddings")
    for rope in _ropes(raw):
        if engine == "vllm":
            gemma = "gemma3" in str(decoder.get("model_type"))
            multiplied = not gemma and kind_of(rope) not in _UNMULTIPLIED
        else:
            original = "original_max_position_embeddings" in rope
            multiplied = not original and kind_of(rope) != "llama3"
        factor = float(rope.get("factor") or factor) if multiplied else factor
    return int(length * factor) if isinstance(length, int) else None


def _as_vllm_reads(rope: Any, raw: Mapping[str, Any], longest: int | None) -> Iterator[str]:
    """Turn rope parameters into those of which transformers makes what vLLM makes."""
    kind, original = kind_of(rope), rope.get("original_max_position_embeddings")
    if kind in _COUNTED and original is None:
        if raw.get("original_max_position_embeddings") is None:
            yield f"vLLM does not start: {kind} needs original_max_position_embeddings"
    elif kind == "longrope" and longest and longest > int(original or 0):
        rope["short_factor"] = rope["long_factor"]
    if kind == "dynamic" and "factor" in rope and "alpha" not in rope:
        yield (
            "vLLM makes one base of dynamic NTK for all lengths: it does not follow the length of "
            "each text"
        )


def _as_sglang_reads(rope: Any, raw: Mapping[str, Any], longest: int | None) -> Iterator[str]:
    """Turn rope parameters into those of which transformers makes what SGLang makes."""
    if kind_of(rope) != "yarn":
        return
    usual = 0.1 * math.log(max(float(rope.get("factor") or 1.0), 1.0)) + 1
    own = rope.pop("attention_factor", None)
    if own is not None and abs(float(own) - usual) > 1e-4:
        yield "attention_factor is ignored: SGLang reads attn_factor, a multiple of 0.1·ln s + 1"
    if "attn_factor" in rope:
        rope["attention_factor"] = float(rope.pop("attn_factor")) * usual


def _by_llama_cpp(told: Told, base: Positions, config: Any) -> tuple[Positions, Served]:
    """The positions that llama.cpp computes in the layers of this model."""
    text = config.get_text_config()
    rotated = [layer for layer in base[SHORT].values() if layer.frequencies is not None]
    theta = next((x for x in rotated if x.window is None), rotated[0]).frequencies
    assert theta is not None
    keys, divisors = dict(told.keys), told.divisors
    if "context_length" not in keys:
        length = int(getattr(text, "max_position_embeddings", 0) or 0)
        fields = {"rope_parameters": (_ropes(raw_of(config)) or [{}])[0]}
        written, divisors = converted({**fields, "max_position_embeddings": length}, theta)
        keys = {**written, **keys}
    if "gemma3" in str(text.model_type):
        keys.setdefault("_swa_base", _BASE)
    loaded = None if divisors is None else torch.as_tensor(divisors).flatten()
    served = serve(keys, told.flags, told.file, 2 * theta.numel(), loaded)
    window = keys.get("attention.sliding_window")

    def computed(layer: LayerValues) -> LayerValues:
        frequencies, amplitude = served.full if layer.window is None else served.within
        if layer.frequencies is not None:
            layer = replace(layer, frequencies=frequencies, amplitude=amplitude)
        if keys.get("general.architecture") == "deepseek2":
            layer = replace(layer, scale=float(text.qk_head_dim) ** -0.5 * served.score_gain)
        if layer.window is None or window is None:
            return layer
        return replace(layer, window=int(window))

    return {
        length: {index: computed(layer) for index, layer in layers.items()}
        for length, layers in base.items()
    }, served


def _lengths(meant: _Meant, told: Told) -> Iterator[str]:
    for rope in told.rope.values():
        length = rope.get("original_max_position_embeddings")
        if isinstance(length, int | float) and meant.trained not in (None, length):
            yield f"trained length: {int(length):,} instead of {meant.trained:,} tokens"
    if told.longest is None or meant.longest is None:
        return
    if told.longest < meant.longest and (meant.spec is not None or told.engine == "hf"):
        yield f"longest text: {told.longest:,} instead of {meant.longest:,} tokens"
    if told.longest > meant.longest:
        yield f"longest text: {told.longest:,} tokens, and what is meant reaches {meant.longest:,}"


def _mistakes(
    meant: _Meant, told: Told, plain: bool, as_meant: bool, raw: Mapping[str, Any]
) -> Iterator[str]:
    """Every usual mistake that was made, a sentence each.

    `plain`: the positions are those of training. `raw` is the model's own configuration.
    """
    known = {name for rope in _ropes(raw) for name in rope} | _PARAMETERS
    known |= _ENGINE_PARAMETERS.get(told.engine, set())
    for rope in told.rope.values():
        kind, factor = kind_of(rope), rope.get("attention_factor")
        if kind in _COUNTED:
            yield from _length_mistakes(meant, told, rope, kind)
        yield from (
            f"{name} is no rope parameter: it is ignored" for name in sorted(rope.keys() - known)
        )
        if plain and (meant.spec is not None or kind == "default"):
            yield from _ignored_factors(told, rope, kind)
        if kind == "yarn" and factor is not None and not as_meant:
            yield (
                f"attention_factor={_number(factor)} stands in place of the factor that YaRN makes "
                "of its stretch, 0.1·ln s + 1: it is the factor itself, not a switch"
            )
        if rope and rope.get("rope_theta") is None and not as_meant:
            yield from _lost_base(meant, told)
        if kind == "yarn" and float(rope.get("factor") or 1) > 1:
            within = "" if meant.trained is None else f" within {meant.trained:,} tokens"
            yield (
                f"YaRN is static: it changes short prompts too, those{within} that the model was "
                "trained for; serve them without it where they matter"
            )
    longer = told.longest is not None and meant.trained is not None and told.longest > meant.trained
    if plain and longer and all(kind_of(rope) == "default" for rope in told.rope.values()):
        yield (
            f"the length alone was raised, to {told.longest:,} tokens: the frequencies are those "
            f"of training, which read {meant.trained:,}"
        )


def _length_mistakes(
    meant: _Meant, told: Told, rope: Mapping[str, Any], kind: str
) -> Iterator[str]:
    """A length that is missing, or that was multiplied already."""
    name, length = {"yarn": "YaRN"}.get(kind, kind), rope.get("original_max_position_embeddings")
    source, counted = "original_max_position_embeddings", length
    if length is None:
        source, counted = "max_position_embeddings", told.decoder.get("max_position_embeddings")
        counted = counted if isinstance(counted, int | float) else 0
        yield (
            f"{name}'s factor {_number(rope.get('factor'))} stands without "
            "original_max_position_embeddings: transformers, SGLang and llama.cpp take the longest "
            f"length, {int(counted):,}, for it, and vLLM does not start"
        )
    if meant.trained is not None and counted is not None and counted > meant.trained:
        yield (
            f"{name} stands on top of a length that was multiplied already: its turns are counted "
            f"within {int(counted):,} tokens ({source}), and the weights were trained to read "
            f"{meant.trained:,}"
        )


def _ignored_factors(told: Told, rope: Mapping[str, Any], kind: str) -> Iterator[str]:
    factors = ", ".join(
        f"{name}={_number(value)}"
        for name, value in sorted(rope.items())
        if "factor" in name and "partial" not in name and _number(value) not in ("1", "None")
    )
    why = f"with rope_type {kind!r} the frequencies are those of training"
    if told.decoder is not told.raw and told.raw.keys() & {"rope_parameters", "rope_scaling"}:
        why = "they stand beside text_config, whose own rope parameters are the decoder's"
    if factors:
        yield f"the factors are ignored ({factors}): {why}"


def _lost_base(meant: _Meant, told: Told) -> Iterator[str]:
    """The base of the model that an override dropped, so that the default stands in its place."""
    bases = set(meant.bases) - {_BASE}
    rope = getattr(told.config.get_text_config(), "rope_parameters", None) or {}
    if bases and float(rope.get("rope_theta") or _BASE) == _BASE:
        yield (
            "rope_theta is missing beside the scaling, which replaces all there was: the base is "
            f"{_BASE:,.0f} instead of {max(bases):,.0f}"
        )


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)

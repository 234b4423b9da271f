"""`verify`: does an engine compute, from what it was told, the positions that were meant?

Both sides become what is computed (`positions`): frequencies, amplitude, softmax scale, windows and
rotary width, at a short, the trained and the longest length. A small model of transformers says so
for transformers, vLLM and SGLang, with what those two read otherwise; `llama_cpp` for llama.cpp.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.engine_input import Told, raw_of, told
from normattn.hf.gguf import read_divisors, read_values
from normattn.hf.llama_cpp import Served, serve, values
from normattn.hf.mistakes import Given, Meant, mistakes
from normattn.hf.model_parts import known_length, model_parts
from normattn.hf.native import take_record
from normattn.hf.plan import plan
from normattn.hf.positions import (
    SHORT,
    Positions,
    differences,
    read_positions,
    rotates,
    with_rotation,
)
from normattn.hf.rotation_tables import method_frequencies
from normattn.hf.tiny_model import read_configuration, small_model
from normattn.io import expanded

_UNMULTIPLIED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn")
"""Kinds whose factor vLLM does not multiply max_position_embeddings with."""


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
    keys = read_values(file) if file.suffix == ".gguf" else {}
    given = told(against, raw_of(config), keys)
    meant, rotations = _meant(config, method, train_length)
    known = {meant.trained, meant.longest, given.longest} - {None}
    lengths = [length for length in known if length is not None and SHORT < length < 1 << 31]
    base = read_positions(config, lengths)
    if not rotates(base):
        raise InputError(
            f"{folder}: no layer of a {config.get_text_config().model_type} model turns by its "
            "position, so there is nothing to compare"
        )
    wanted = with_rotation(base, _extended(base, rotations))
    if keys and method is None:
        own = dataclasses.replace(given, keys=_without_architecture(keys), flags={})
        own = dataclasses.replace(own, divisors=read_divisors(file))
        wanted = _by_llama_cpp(own, base, config)[0]
    given, computed, sentences = _computed(given, base, config, lengths)
    found = [*differences(wanted, computed), *sentences, *_lengths(meant, given)]
    plain = not list(differences(base, computed))
    seen = Given(given, plain, not found, _parameters(raw_of(config)))
    return Verdict(meant.name, tuple(found), tuple(mistakes(meant, seen)))


def _meant(
    config: Any, method: str | None, length: int | None
) -> tuple[Meant, dict[int, tuple[Tensor, float]]]:
    """What is meant; frequencies of the layers that a method changes, and its gain of amplitude."""
    small = small_model(config)
    parts = model_parts(small)
    longest = getattr(parts.config, "max_position_embeddings", None)
    bases = sorted(
        float(rope["rope_theta"]) for rope in parts.ropes if rope.get("rope_theta") is not None
    )
    if method is None:
        originals = {rope.get("original_max_position_embeddings") for rope in parts.ropes}
        originals.add(getattr(parts.config, "original_max_position_embeddings", None))
        trained = next((one for one in originals if isinstance(one, int)), longest)
        name = f"{parts.name} as its configuration says"
        return Meant(name, None, length or trained, longest, tuple(bases)), {}
    planned = plan(small, method, length if length is not None else known_length(parts)[0])
    spec = planned.spec
    if spec.remapping is not None or spec.logn is not None or spec.blockwise:
        raise InputError(
            f"no configuration of rotary positions says {spec.method}: an engine without normattn "
            "reads the model as it was trained"
        )
    assert spec.train_length is not None
    gain = 1.0 if spec.rope_scaling is None else spec.rope_scaling.gain(spec.train_length) ** 0.5
    rotations = {
        layer.index: (method_frequencies(spec, layer.rotation).abs(), gain)
        for layer in planned.layers
        if layer.rotation is not None
    }
    stretch = getattr(spec.rope_scaling, "stretch", None)
    reach = None if stretch is None else int(spec.train_length * stretch)
    return Meant(spec.method, spec, spec.train_length, reach, tuple(bases)), rotations


def _extended(
    base: Positions, rotations: Mapping[int, tuple[Tensor, float]]
) -> dict[int, tuple[Tensor, float]]:
    """The frequencies under a method, and the model's own amplitude times the method's."""
    return {
        index: (theta, gain * base[SHORT][index].amplitude)
        for index, (theta, gain) in rotations.items()
        if index in base[SHORT]
    }


def _computed(
    given: Told, base: Positions, config: Any, lengths: list[int]
) -> tuple[Told, Positions, list[str]]:
    """What the engine computes of what it was told; what it refuses or ignores."""
    if given.engine == "llama.cpp":
        computed, served = _by_llama_cpp(given, base, config)
        made = dataclasses.replace(given, longest=served.longest, rope={"": served.rope})
        return made, computed, list(served.ignored)
    sentences: list[str] = []
    raw = copy.deepcopy(given.raw)
    ropes = list(_scalings(raw))
    sentences += _lost_width(given, config)
    longest = given.longest
    if given.engine in ("vllm", "sglang"):
        derived = _derived_length(raw, ropes, given.engine)
        if longest is not None and derived is not None and longest > derived:
            sentences.append(
                f"{given.engine} refuses a length of {longest:,}: it derives {derived:,} tokens "
                "from max_position_embeddings, which must be raised"
            )
        for rope in ropes:
            sentences += _as_engine_reads(rope, raw, given.engine, longest or derived)
        longest = longest or derived
    made = dataclasses.replace(given, raw=raw, longest=longest)
    return (
        dataclasses.replace(given, longest=longest),
        read_positions(made.config, lengths),
        sentences,
    )


def _scalings(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every set of rope parameters of the decoder."""
    inner = raw.get("text_config")
    decoder = inner if isinstance(inner, dict) else raw
    rope = decoder.get("rope_parameters") or decoder.get("rope_scaling")
    if isinstance(rope, dict):
        nested = [value for value in rope.values() if isinstance(value, dict)]
        yield from nested or [rope]


def _type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _lost_width(given: Told, config: Any) -> Iterator[str]:
    """A partial_rotary_factor or mrope_section that the model has and an override drops."""
    own = next(_scalings(raw_of(config)), {})
    for rope in given.rope.values():
        for name in ("partial_rotary_factor", "mrope_section"):
            if (
                rope
                and not given.whole
                and name not in rope
                and own.get(name) not in (None, 1, 1.0)
            ):
                yield f"{name} is missing in an override that replaces all: it was {own[name]}"


def _derived_length(raw: Mapping[str, Any], ropes: list[dict[str, Any]], engine: str) -> int | None:
    """The longest text by the engine's own rule.

    `_get_and_verify_max_len` of vLLM, `get_context_length` of SGLang.
    """
    inner = raw.get("text_config")
    decoder = inner if isinstance(inner, Mapping) else raw
    length = decoder.get("max_position_embeddings")
    if not isinstance(length, int):
        return None
    factor = 1.0
    for rope in ropes:
        if engine == "vllm" and "gemma3" not in str(decoder.get("model_type")):
            factor = factor if _type(rope) in _UNMULTIPLIED else float(rope.get("factor") or factor)
        if engine == "sglang" and _type(rope) != "llama3":
            original = "original_max_position_embeddings" in rope
            factor = factor if original else float(rope.get("factor") or factor)
    return int(length * factor)


def _as_engine_reads(
    rope: dict[str, Any], raw: Mapping[str, Any], engine: str, longest: int | None
) -> Iterator[str]:
    """Turn rope parameters into those of which transformers makes what the engine makes."""
    kind = _type(rope)
    factor = float(rope.get("factor") or 1.0)
    original = rope.get("original_max_position_embeddings")
    if engine == "vllm":
        if kind in ("yarn", "llama3", "longrope") and original is None:
            if raw.get("original_max_position_embeddings") is None:
                yield f"vLLM does not start: {kind} needs original_max_position_embeddings"
        elif kind == "longrope" and longest and longest > int(original or 0):
            rope["short_factor"] = rope["long_factor"]
        if kind == "dynamic" and "factor" in rope and "alpha" not in rope:
            yield (
                "vLLM makes one base of dynamic NTK for all lengths: it does not follow the length "
                "of each text"
            )
    elif kind == "yarn":
        usual = 0.1 * math.log(max(factor, 1.0)) + 1
        own = rope.pop("attention_factor", None)
        if own is not None and abs(float(own) - usual) > 1e-4:
            yield (
                "attention_factor is ignored: SGLang reads attn_factor, a multiple of 0.1·ln s + 1"
            )
        if "attn_factor" in rope:
            rope["attention_factor"] = float(rope.pop("attn_factor")) * usual


def _by_llama_cpp(given: Told, base: Positions, config: Any) -> tuple[Positions, Served]:
    """The positions that llama.cpp computes in the layers of this model."""
    text = config.get_text_config()
    full = [
        values.frequencies
        for values in base[SHORT].values()
        if values.frequencies is not None and values.window is None
    ] or [v.frequencies for v in base[SHORT].values() if v.frequencies is not None]
    keys, divisors = dict(given.keys), given.divisors
    if "context_length" not in keys:
        written, divisors = _converted(config, full[0])
        keys = {**written, **keys}
    if "gemma3" in str(text.model_type):
        keys.setdefault("_swa_base", 10000.0)
    loaded = None if divisors is None else torch.as_tensor(divisors).flatten()
    served = serve(keys, given.flags, given.file, 2 * full[0].numel(), loaded)
    windows = keys.get("attention.sliding_window")
    positions = {}
    for length, layers in base.items():
        made = {}
        for index, layer in layers.items():
            theta, size = served.full if layer.window is None else served.within
            if layer.frequencies is not None:
                layer = dataclasses.replace(layer, frequencies=theta, amplitude=size)
            if keys.get("general.architecture") == "deepseek2":
                scale = float(text.qk_head_dim) ** -0.5 * served.score_gain
                layer = dataclasses.replace(layer, scale=scale)
            if layer.window is not None and windows is not None:
                layer = dataclasses.replace(layer, window=int(windows))
            made[index] = layer
        positions[length] = made
    return positions, served


def _converted(config: Any, theta: Tensor) -> tuple[dict[str, Any], Any]:
    """The keys that llama.cpp's converter writes for this configuration, and divisors."""
    text = config.get_text_config()
    ropes = list(_scalings(raw_of(config))) or [{}]
    rope = dict(ropes[0])
    length = int(getattr(text, "max_position_embeddings", 0) or 0)
    divisors = None
    if _type(rope) == "llama3":
        size = 2 * theta.numel()
        plain = float(rope["rope_theta"]) ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        rope, divisors = {"rope_theta": rope["rope_theta"]}, plain / theta
    fields = {"rope_parameters": rope, "max_position_embeddings": length}
    keys = {name.partition(".")[2]: value for name, (_, value) in values("a", fields).items()}
    return keys, divisors


def _without_architecture(keys: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{keys.get('general.architecture')}."
    return {name.removeprefix(prefix): value for name, value in keys.items()}


def _parameters(raw: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for rope in _scalings(raw) for name in rope)


def _lengths(meant: Meant, given: Told) -> Iterator[str]:
    for rope in given.rope.values():
        length = rope.get("original_max_position_embeddings")
        if isinstance(length, int | float) and meant.trained not in (None, length):
            yield f"trained length: {int(length):,} instead of {meant.trained:,} tokens"
    if given.longest is None or meant.longest is None or given.longest == meant.longest:
        return
    if given.longest < meant.longest and (meant.spec is not None or given.engine == "hf"):
        yield f"longest text: {given.longest:,} instead of {meant.longest:,} tokens"
    if given.longest > meant.longest:
        yield f"longest text: {given.longest:,} tokens, and what is meant reaches {meant.longest:,}"

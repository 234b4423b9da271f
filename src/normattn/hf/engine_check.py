"""`verify`: does an engine compute the intended positions from its settings?

Both sides become configurations in transformers' words, llama.cpp's flags and GGUF keys included,
with what engines read otherwise (`_read_as_engine`, `llama_cpp.computed`). A small model of each
then says what is computed (`tiny_model`): frequencies, amplitude, softmax scale, windows and rotary
width, at a short, the trained and the longest length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.hf.engine_input import (
    NAMES,
    SCALING,
    EngineSettings,
    decoder_of,
    gguf_settings,
    raw_of,
    read_engine_settings,
    ropes_of,
)
from normattn.hf.engines import COUNTED, derived_length
from normattn.hf.load import read_configuration
from normattn.hf.model_parts import explained, kind_of, known_length, model_parts
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

_PARAMETERS = {"partial_rotary_factor", "finetuned", "mrope_section", "mrope_interleaved", *SCALING}
_ENGINE_PARAMETERS = {"vllm": {"mixed_b"}, "sglang": {"attn_factor"}}
_ORIGINAL = "original_max_position_embeddings"
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
    record = take_record(config, folder)
    if record is not None:
        method = method or record["method"]
        train_length = train_length or record["train_length"]
    file = expand_path(folder)
    if file.suffix == ".gguf":
        config = gguf_settings(file, raw_of(config)).config
    given = read_engine_settings(against, raw_of(config))
    with explained(given.file, "cannot be compared"):
        meant = _meant(config, method, train_length)
        lengths = {meant.trained, meant.longest, given.longest}
        for rope in (*ropes_of(raw_of(config)), *given.ropes):
            # Where dynamic NTK has changed the frequencies.
            if kind_of(rope) == "dynamic" and meant.longest is not None:
                lengths.add(int(meant.longest * max(2.0, float(rope.get("factor") or 1.0))))
        compared = [length for length in lengths if length and SHORT < length < 1 << 31]
        base = read_positions(config, compared)
        if not rotates(base):
            raise InputError(
                f"no layer of a {config.get_text_config().model_type} model passes rotary "
                "positions to its attention function, so there is nothing to compare"
            )
        given = _read_as_engine(given, config, base)
        computed = read_positions(given.config, compared)
        wanted = base if meant.plan is None else _extended(base, meant.plan)
        found = (
            *differences(wanted, computed),
            *given.ignored,
            *_length_differences(meant, given),
        )
        if not found and meant.plan is None:
            return Verdict(str(meant), (), ())
        plain = not any(differences(base, computed))
        mistakes = _mistakes(meant, given, config, plain, as_meant=not found)
        return Verdict(str(meant), found, tuple(mistakes))


class _Meant(NamedTuple):
    """What is meant; `plan` is None for the model as its configuration says."""

    name: str
    plan: Plan | None
    trained: int | None
    longest: int | None
    bases: set[float]

    def __str__(self) -> str:
        trained = "" if self.trained is None else f", trained to read {self.trained:,} tokens"
        same = self.longest in (None, self.trained)
        return self.name + trained + ("" if same else f", up to {self.longest:,} tokens")


def _meant(config: Any, method: str | None, length: int | None) -> _Meant:
    small = small_model(config)
    parts = model_parts(small)
    bases = {float(rope["rope_theta"]) for rope in parts.ropes if rope.get("rope_theta")}
    if method is None:
        longest = getattr(parts.config, "max_position_embeddings", None)
        originals = (rope.get(_ORIGINAL) for rope in (*parts.ropes, parts.config.to_dict()))
        trained = next((one for one in originals if isinstance(one, int) and one), longest)
        name = f"{parts.name} as its configuration says"
        return _Meant(name, None, length or trained, longest, bases)
    planned = plan(small, method, length if length is not None else known_length(parts)[0])
    spec = planned.spec
    if replaces_attention(spec):
        raise InputError(
            f"no configuration of rotary positions expresses {spec.method}: an engine without "
            "normattn runs the unmodified model"
        )
    assert spec.train_length is not None
    stretch = getattr(spec.rope_scaling, "stretch", None)
    reach = None if stretch is None else int(spec.train_length * stretch)
    return _Meant(spec.method_text, planned, spec.train_length, reach, bases)


def _extended(base: Positions, planned: Plan) -> Positions:
    """The positions under a method."""
    rotated = [layer for layer in planned.layers if layer.rotation is not None]
    spectra = {layer.index: layer.spectrum(planned.spec) for layer in rotated}
    extended: Positions = {}
    for length, layers in base.items():
        extended[length] = dict(layers)
        for index in spectra.keys() & layers.keys():
            theta, amplitude = spectra[index]
            values = replace(layers[index], frequencies=theta, amplitude=amplitude)
            extended[length][index] = values
    return extended


def _read_as_engine(given: EngineSettings, config: Any, base: Positions) -> EngineSettings:
    """The settings with which transformers computes what the engine does of them.

    With the engine's longest text, and what it ignores or refuses, a sentence each: vLLM by its
    `get_rope` and `_get_and_verify_max_len`, SGLang by its own of these.
    """
    own: Any = next(iter(ropes_of(raw_of(config))), {})
    ignored, raw, longest = list(given.ignored), copy.deepcopy(given.raw), given.longest
    width = (
        2 * next(x.frequencies for x in base[SHORT].values() if x.frequencies is not None).numel()
    )
    if given.width not in (None, width):
        ignored.append(f"rotary width: {given.width} features rotate instead of {width}")
    if given.engine != "llama.cpp" and not given.whole:
        ignored += [
            f"{name} is missing in an override that replaces all: it was {own[name]}"
            for rope in given.ropes
            for name in ("partial_rotary_factor", "mrope_section")
            if name not in rope and own.get(name) not in (None, 1, 1.0)
        ]
    if given.engine in ("vllm", "sglang"):
        derived = derived_length(decoder_of(raw), given.engine)
        if longest is not None and derived is not None and longest > derived:
            ignored.append(
                f"{NAMES[given.engine]} refuses a length of {longest:,}: it derives {derived:,} "
                "tokens from max_position_embeddings, which must be raised"
            )
        longest = longest or derived
        for rope in ropes_of(raw):
            read = _read_by_vllm if given.engine == "vllm" else _read_by_sglang
            ignored += read(rope, raw, longest)
    return replace(given, raw=raw, longest=longest, ignored=tuple(ignored))


def _read_by_vllm(
    rope: dict[str, Any], raw: Mapping[str, Any], longest: int | None
) -> Iterator[str]:
    kind, original = kind_of(rope), rope.get(_ORIGINAL)
    if kind in COUNTED and original is None:
        if raw.get(_ORIGINAL) is None:
            yield f"vLLM does not start: {kind} needs {_ORIGINAL}"
    elif kind == "longrope" and longest and longest > int(original or 0):
        rope["short_factor"] = rope["long_factor"]
    if kind == "dynamic" and "factor" in rope and "alpha" not in rope:
        yield (
            "vLLM makes one base of dynamic NTK for all lengths: it does not follow the length of "
            "each text"
        )


def _read_by_sglang(rope: dict[str, Any], *_: object) -> Iterator[str]:
    if kind_of(rope) != "yarn":
        return
    usual = 0.1 * math.log(max(float(rope.get("factor") or 1.0), 1.0)) + 1
    own, times = rope.pop("attention_factor", None), rope.pop("attn_factor", None)
    if own is not None and abs(float(own) - usual) > 1e-4:
        yield "attention_factor is ignored: SGLang reads attn_factor, a multiple of 0.1·ln s + 1"
    if times is not None:
        rope["attention_factor"] = float(times) * usual


def _length_differences(meant: _Meant, given: EngineSettings) -> Iterator[str]:
    for rope in given.ropes:
        length = rope.get(_ORIGINAL)
        if isinstance(length, int | float) and meant.trained not in (None, length):
            yield f"trained length: {int(length):,} instead of {meant.trained:,} tokens"
    if given.longest is None or meant.longest is None:
        return
    if given.longest < meant.longest and (meant.plan is not None or given.engine == "hf"):
        yield f"longest text: {given.longest:,} instead of {meant.longest:,} tokens"
    if given.longest > meant.longest:
        yield f"longest text: {given.longest:,} tokens, and what is meant reaches {meant.longest:,}"


def _mistakes(
    meant: _Meant, given: EngineSettings, config: Any, plain: bool, as_meant: bool
) -> Iterator[str]:
    """Every usual mistake that was made, a sentence each; `plain`: positions are as trained."""
    known = {name for rope in ropes_of(raw_of(config)) for name in rope} | _PARAMETERS
    known |= _ENGINE_PARAMETERS.get(given.engine, set())
    for rope in given.ropes:
        kind, factor = kind_of(rope), rope.get("factor")
        if kind in COUNTED:
            yield from _counted_within(meant, given, rope)
        for name in sorted(rope.keys() - known):
            yield f"{name} is no rope parameter: it is ignored"
        named = {x: _number(rope[x]) for x in sorted(rope) if "factor" in x and "partial" not in x}
        factors = ", ".join(f"{x}={n}" for x, n in named.items() if n not in ("1", "None"))
        if factors and plain and (meant.plan is not None or kind == "default"):
            why = f"with rope_type {kind!r} the frequencies are those of training"
            if decoder_of(given.raw) is not given.raw and ropes_of(
                {**given.raw, "text_config": None}
            ):
                why = "they are outside of text_config, whose own rope parameters are the decoder's"
            yield f"the factors are ignored ({factors}): {why}"
        own, held = rope.get("attention_factor"), meant.bases - {_BASE}
        if not as_meant and kind == "yarn" and own is not None:
            yield (
                f"attention_factor={_number(own)} replaces the factor that YaRN makes of its "
                "stretch, 0.1·ln s + 1: it is the factor itself, not a switch"
            )
        if not as_meant and rope.get("rope_theta") is None and held:
            read = getattr(given.config.get_text_config(), "rope_parameters", None) or {}
            if float(read.get("rope_theta") or _BASE) == _BASE:
                yield (
                    "rope_theta is missing next to the scaling, which replaces all there was: the "
                    f"base is {_BASE:,.0f} instead of {max(held):,.0f}"
                )
        if kind == "yarn" and float(factor or 1) > 1:
            within = "" if meant.trained is None else f" within {meant.trained:,} tokens"
            yield (
                f"YaRN is static: it changes short prompts too, those{within} that the model was "
                "trained for; serve them without it where they matter"
            )
    longer = meant.trained is not None and (given.longest or 0) > meant.trained
    if plain and longer and all(kind_of(rope) == "default" for rope in given.ropes):
        yield (
            f"the length alone was raised, to {given.longest:,} tokens: the frequencies are those "
            f"of training, which read {meant.trained:,}"
        )


def _counted_within(meant: _Meant, given: EngineSettings, rope: Mapping[str, Any]) -> Iterator[str]:
    """A trained length that is missing, or that was multiplied already."""
    name, source = {"yarn": "YaRN"}.get(kind_of(rope), kind_of(rope)), _ORIGINAL
    counted = rope.get(source)
    if counted is None:
        source = "max_position_embeddings"
        counted = decoder_of(given.raw).get(source) or 0
        takes = (
            "transformers, SGLang and llama.cpp take"
            if given.engine == "hf"
            else (f"{NAMES[given.engine]} takes")
        )
        then = f"{takes} the longest length, {int(counted):,}, for it"
        then += ", and vLLM does not start" if given.engine == "hf" else ""
        then = "vLLM does not start" if given.engine == "vllm" else then
        yield f"{name}'s factor {_number(rope.get('factor'))} is given without {_ORIGINAL}: {then}"
    if meant.trained is not None and counted > meant.trained:
        yield (
            f"{name} is applied to a length that was multiplied already: rotations are counted "
            f"within {int(counted):,} tokens ({source}), and the weights were trained to read "
            f"{meant.trained:,}"
        )


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)

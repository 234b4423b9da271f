"""`verify`: does an engine compute the intended positions from its settings?

Both sides become configurations in transformers' words, llama.cpp's flags and GGUF keys included,
with what engines read otherwise (`_READ`, `llama_cpp.read_settings`). A small model of each then
says what is computed (`tiny_model`): frequencies, amplitude, softmax scale, windows and rotary
width, at a short, the trained and the longest length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.hf.engine_input import (
    SCALING,
    Told,
    decoder_of,
    of_gguf,
    raw_of,
    read_told,
    ropes_of,
)
from normattn.hf.engines import COUNTED, derived_length
from normattn.hf.model_parts import explained, kind_of, known_length, model_parts
from normattn.hf.native import take_record
from normattn.hf.plan import Plan, plan, replaces_attention
from normattn.hf.tiny_model import (
    SHORT,
    LayerValues,
    Positions,
    differences,
    read_configuration,
    read_positions,
    rotates,
    small_model,
)
from normattn.io import expanded

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


class _Meant(NamedTuple):
    """What is meant; `plan` is None for the model as its configuration says."""

    name: str
    plan: Plan | None
    trained: int | None
    longest: int | None
    bases: set[float]


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
    file = expanded(folder)
    if file.suffix == ".gguf":
        config = of_gguf(file, raw_of(config)).config
    told = read_told(against, raw_of(config))
    with explained(told.file, "cannot be compared"):
        return _compare(config, told, method, train_length)


def _compare(config: Any, told: Told, method: str | None, train_length: int | None) -> Verdict:
    """Both sides as what is computed, and what differs."""
    meant = _meant(config, method, train_length)
    lengths = _lengths_to_compare(config, meant, told)
    base = read_positions(config, lengths)
    if not rotates(base):
        raise InputError(
            f"no layer of a {config.get_text_config().model_type} model passes rotary positions "
            "to its attention function, so there is nothing to compare"
        )
    told, served = _computed(told, config, lengths)
    rotated = (x.frequencies for x in base[SHORT].values() if x.frequencies is not None)
    width = 2 * next(rotated).numel()
    if told.width not in (None, width):
        wrong = f"rotary width: {told.width} features rotate instead of {width}"
        told = replace(told, ignored=(*told.ignored, wrong))
    found = (
        *differences(base if meant.plan is None else _extended(base, meant.plan), served),
        *told.ignored,
        *_length_differences(meant, told),
    )
    if not found and meant.plan is None:
        return Verdict(meant.name, (), ())
    plain = not any(differences(base, served))
    mistakes = _mistakes(meant, told, plain, not found, config)
    return Verdict(meant.name, found, tuple(mistakes))


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
    return _Meant(spec.method, planned, spec.train_length, reach, bases)


def _lengths_to_compare(config: Any, meant: _Meant, told: Told) -> list[int]:
    """The trained and the longest length, and where dynamic NTK has changed the frequencies."""
    known = {meant.trained, meant.longest, told.longest}
    for rope in (*ropes_of(raw_of(config)), *told.ropes):
        if kind_of(rope) == "dynamic" and meant.longest is not None:
            known.add(int(meant.longest * max(2.0, float(rope.get("factor") or 1.0))))
    return [length for length in known if length is not None and SHORT < length < 1 << 31]


def _extended(base: Positions, planned: Plan) -> Positions:
    """The positions under a method."""
    rotated = [layer for layer in planned.layers if layer.rotation is not None]
    spectra = {layer.index: layer.spectrum(planned.spec) for layer in rotated}

    def extended(index: int, values: LayerValues) -> LayerValues:
        theta, amplitude = spectra.get(index, (values.frequencies, values.amplitude))
        return replace(values, frequencies=theta, amplitude=amplitude)

    return {
        length: {index: extended(index, values) for index, values in layers.items()}
        for length, layers in base.items()
    }


def _computed(told: Told, config: Any, lengths: list[int]) -> tuple[Told, Positions]:
    """What an engine computes, and what it was told with the length and what it ignores."""
    own: Any = next(iter(ropes_of(raw_of(config))), {})
    ignored = list(told.ignored)
    if told.engine != "llama.cpp" and not told.whole:
        ignored += [
            f"{name} is missing in an override that replaces all: it was {own[name]}"
            for rope in told.ropes
            for name in ("partial_rotary_factor", "mrope_section")
            if name not in rope and own.get(name) not in (None, 1, 1.0)
        ]
    raw, longest = copy.deepcopy(told.raw), told.longest
    if told.engine in _READ:
        derived = derived_length(decoder_of(raw), told.engine)
        if longest is not None and derived is not None and longest > derived:
            ignored.append(
                f"{told.engine} refuses a length of {longest:,}: it derives {derived:,} "
                "tokens from max_position_embeddings, which must be raised"
            )
        longest = longest or derived
        for rope in ropes_of(raw):
            ignored += _READ[told.engine](rope, raw, longest)
    read = read_positions(replace(told, raw=raw).config, lengths)
    return replace(told, longest=longest, ignored=tuple(ignored)), read


def _read_as_vllm(
    rope: dict[str, Any], raw: Mapping[str, Any], longest: int | None
) -> Iterator[str]:
    """Change rope parameters so that transformers computes what vLLM's `get_rope` does.

    Yields what vLLM ignores or refuses.
    """
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


def _read_as_sglang(
    rope: dict[str, Any], raw: Mapping[str, Any], longest: int | None
) -> Iterator[str]:
    """The same for SGLang's `get_rope`."""
    if kind_of(rope) != "yarn":
        return
    usual = 0.1 * math.log(max(float(rope.get("factor") or 1.0), 1.0)) + 1
    own, times = rope.pop("attention_factor", None), rope.pop("attn_factor", None)
    if own is not None and abs(float(own) - usual) > 1e-4:
        yield "attention_factor is ignored: SGLang reads attn_factor, a multiple of 0.1·ln s + 1"
    if times is not None:
        rope["attention_factor"] = float(times) * usual


_READ: dict[str, Callable[[dict[str, Any], Mapping[str, Any], int | None], Iterator[str]]] = {
    "vllm": _read_as_vllm,
    "sglang": _read_as_sglang,
}
"""How engines read rope parameters otherwise than transformers."""


def _length_differences(meant: _Meant, told: Told) -> Iterator[str]:
    for rope in told.ropes:
        length = rope.get(_ORIGINAL)
        if isinstance(length, int | float) and meant.trained not in (None, length):
            yield f"trained length: {int(length):,} instead of {meant.trained:,} tokens"
    if told.longest is None or meant.longest is None:
        return
    if told.longest < meant.longest and (meant.plan is not None or told.engine == "hf"):
        yield f"longest text: {told.longest:,} instead of {meant.longest:,} tokens"
    if told.longest > meant.longest:
        yield f"longest text: {told.longest:,} tokens, and what is meant reaches {meant.longest:,}"


def _mistakes(meant: _Meant, told: Told, plain: bool, as_meant: bool, config: Any) -> Iterator[str]:
    """Every usual mistake that was made, a sentence each; `plain`: positions are as trained."""
    known = {name for rope in ropes_of(raw_of(config)) for name in rope} | _PARAMETERS
    known |= _ENGINE_PARAMETERS.get(told.engine, set())
    for rope in told.ropes:
        kind = kind_of(rope)
        if kind in COUNTED:
            yield from _counted_within(meant, told, rope)
        for name in sorted(rope.keys() - known):
            yield f"{name} is no rope parameter: it is ignored"
        if plain and (meant.plan is not None or kind == "default"):
            yield from _ignored_factors(told, rope)
        if not as_meant:
            yield from _lost_values(meant, told, rope)
        if kind == "yarn" and float(rope.get("factor") or 1) > 1:
            within = "" if meant.trained is None else f" within {meant.trained:,} tokens"
            yield (
                f"YaRN is static: it changes short prompts too, those{within} that the model was "
                "trained for; serve them without it where they matter"
            )
    longer = meant.trained is not None and (told.longest or 0) > meant.trained
    if plain and longer and all(kind_of(rope) == "default" for rope in told.ropes):
        yield (
            f"the length alone was raised, to {told.longest:,} tokens: the frequencies are those "
            f"of training, which read {meant.trained:,}"
        )


def _counted_within(meant: _Meant, told: Told, rope: Mapping[str, Any]) -> Iterator[str]:
    """A trained length that is missing, or that was multiplied already."""
    name, source = {"yarn": "YaRN"}.get(kind_of(rope), kind_of(rope)), _ORIGINAL
    counted = rope.get(source)
    if counted is None:
        source = "max_position_embeddings"
        counted = decoder_of(told.raw).get(source) or 0
        yield (
            f"{name}'s factor {_number(rope.get('factor'))} is given without {_ORIGINAL}: "
            f"transformers, SGLang and llama.cpp take the longest length, {int(counted):,}, for "
            "it, and vLLM does not start"
        )
    if meant.trained is not None and counted > meant.trained:
        yield (
            f"{name} is applied to a length that was multiplied already: rotations are counted "
            f"within {int(counted):,} tokens ({source}), and the weights were trained to read "
            f"{meant.trained:,}"
        )


def _ignored_factors(told: Told, rope: Mapping[str, Any]) -> Iterator[str]:
    given = {x: _number(rope[x]) for x in sorted(rope) if "factor" in x and "partial" not in x}
    factors = ", ".join(f"{x}={value}" for x, value in given.items() if value not in ("1", "None"))
    why = f"with rope_type {kind_of(rope)!r} the frequencies are those of training"
    if decoder_of(told.raw) is not told.raw and ropes_of({**told.raw, "text_config": None}):
        why = "they stand beside text_config, whose own rope parameters are the decoder's"
    if factors:
        yield f"the factors are ignored ({factors}): {why}"


def _lost_values(meant: _Meant, told: Told, rope: Mapping[str, Any]) -> Iterator[str]:
    """A factor used as a switch, and a base that an override dropped."""
    factor, own = rope.get("attention_factor"), meant.bases - {_BASE}
    if kind_of(rope) == "yarn" and factor is not None:
        yield (
            f"attention_factor={_number(factor)} replaces the factor that YaRN makes "
            "of its stretch, 0.1·ln s + 1: it is the factor itself, not a switch"
        )
    if rope.get("rope_theta") is None and own:
        read = getattr(told.config.get_text_config(), "rope_parameters", None) or {}
        if float(read.get("rope_theta") or _BASE) == _BASE:
            yield (
                "rope_theta is missing beside the scaling, which replaces all there was: the base "
                f"is {_BASE:,.0f} instead of {max(own):,.0f}"
            )


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)

"""`verify`: does what an engine was told give the frequencies, factor and lengths that were meant?

Both configurations are made as small models and their layers probed (`detect_layers`), so that
what is compared is what transformers computes; vLLM, SGLang and llama.cpp compute the same of the
same words. Their mistakes with names are in `mistakes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.mistakes import Given, Meant, mistakes
from normattn.hf.model_parts import ModelParts, known_length, model_parts
from normattn.hf.native import take_record
from normattn.hf.plan import plan
from normattn.hf.probe import probe
from normattn.hf.rope_detection import Layer, detect_layers
from normattn.hf.rope_tables import read_tables, spectra_of
from normattn.hf.rotation_tables import method_amplitude, method_frequencies
from normattn.hf.served import Told, raw_of, told
from normattn.hf.tiny_model import read_configuration, small_model

_CLOSE = 1e-4
"""How far frequencies and factors may differ, as a share: configurations are read in float32."""
Turns = dict[int, tuple[Tensor, float]]


class _Turned(NamedTuple):
    """How layers turn: those that see everything, and those within a window, as always trained."""

    full: Turns
    within: Turns


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
        """Whether frequencies, factor and lengths are those meant."""
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
            is the method that it was saved under, or the model as it was trained.
        against: what the engine was told: a folder, a config.json, a JSON of some of its fields
            (as for vLLM and SGLang), a GGUF file, or a text with an engine's flags.
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
    meant, turned = _meant(config, method, train_length)
    if not turned.full and not turned.within:
        raise InputError(
            f"{folder}: no layer of a {config.get_text_config().model_type} model turns by its "
            "position, so there is nothing to compare"
        )
    given = told(against, raw_of(config))
    turns = _turns(given.config)
    within = _compared(turned.within, turns.within)
    differences = [
        *_compared(turned.full, turns.full),
        *(f"layers within a window: {sentence}" for sentence in within),
        *_lengths(meant, given),
    ]
    seen = Given(
        told=given,
        plain=not _compared(turns.full, _turns_as_trained(meant, turned, config)),
        as_meant=not differences,
    )
    return Verdict(meant.name, tuple(differences), tuple(mistakes(meant, seen)))


def _meant(config: Any, method: str | None, length: int | None) -> tuple[Meant, _Turned]:
    """What is meant, and how each layer then turns."""
    small = small_model(config)
    if method is None:
        parts = model_parts(small)
        longest = getattr(parts.config, "max_position_embeddings", None)
        known = length or longest
        if length is None and longest is not None:
            originals = {rope.get("original_max_position_embeddings") for rope in parts.ropes}
            known = next((original for original in originals if original is not None), longest)
        name = f"{parts.name} as its configuration says"
        return Meant(name, None, known, longest, _bases(parts)), _turned(parts)
    planned = plan(small, method, length if length is not None else _known(small))
    spec = planned.spec
    if spec.remapping is not None or spec.logn is not None or spec.blockwise:
        raise InputError(
            f"no configuration of rotary positions says {spec.method}: an engine without normattn "
            "reads the model as it was trained"
        )
    turns = {
        layer.index: (
            method_frequencies(spec, layer.rotation),
            method_amplitude(spec, layer.rotation),
        )
        for layer in planned.layers
        if layer.rotation is not None
    }
    assert spec.train_length is not None
    longest = int(spec.train_length * getattr(spec.rope_scaling, "stretch", 1.0))
    turned = _Turned(turns, _within(planned.parts, planned.layers))
    return Meant(spec.method, spec, spec.train_length, longest, _bases(planned.parts)), turned


def _known(small: Any) -> int:
    return known_length(model_parts(small))[0]


def _bases(parts: ModelParts) -> tuple[float, ...]:
    bases = {rope.get("rope_theta") for rope in parts.ropes}
    return tuple(sorted(float(base) for base in bases if isinstance(base, int | float)))


def _turns(config: Any) -> _Turned:
    return _turned(model_parts(small_model(config)))


def _turned(parts: ModelParts) -> _Turned:
    layers = detect_layers(parts, probe(parts).layers)
    full = {
        layer.index: (layer.rotation.frequencies, layer.rotation.amplitude)
        for layer in layers
        if layer.rotation is not None
    }
    return _Turned(full, _within(parts, layers))


def _within(parts: ModelParts, layers: Sequence[Layer]) -> Turns:
    """The frequencies and factors that layers within a window are given, which no method changes.

    Layers that the embeddings do not turn have none.
    """
    spectra, turns = spectra_of(parts.model), {}
    for layer in layers:
        heard = layer.probed
        if layer.sliding is None or heard.unrotated is None:
            continue
        tables = read_tables(heard.tables, spectra)
        if tables is not None and not torch.equal(heard.unrotated.query, heard.call.query):
            turns[layer.index] = (tables.frequencies, tables.amplitude)
    return turns


def _turns_as_trained(meant: Meant, turned: _Turned, config: Any) -> Turns:
    """The frequencies before any method."""
    return turned.full if meant.spec is None else _turns(config).full


def _compared(meant: Turns, turns: Turns) -> list[str]:
    """Sentences on frequencies and factors that differ."""
    return [*_frequencies(meant, turns), *_factors(meant, turns)]


def _frequencies(meant: Turns, turns: Turns) -> list[str]:
    """A sentence on frequencies that differ."""
    if meant.keys() != turns.keys():
        return [
            f"layers with rotary positions: {sorted(turns)} instead of {sorted(meant)}: this is "
            "another model's configuration"
        ]
    for layer, (theta, _) in meant.items():
        other = turns[layer][0]
        if theta.shape != other.shape:
            return [
                f"layer {layer} turns {other.numel()} pairs of features instead of "
                f"{theta.numel()}: this is another model's configuration"
            ]
    if not meant:
        return []
    off = {n: _off(theta, turns[n][0]) for n, (theta, _) in meant.items()}
    worst = max(off, key=lambda n: float(off[n].max()))
    if float(off[worst].max()) <= _CLOSE:
        return []
    theta, other = meant[worst][0], turns[worst][0]
    pair = int(off[worst].argmax())
    layers = [n for n, difference in off.items() if float(difference.max()) > _CLOSE]
    return [
        f"inverse frequencies: {int((off[worst] > _CLOSE).sum())} of {theta.numel()} differ in "
        f"{len(layers)} of {len(meant)} layers; pair {pair} turns by {float(other[pair]):.4g} a "
        f"token instead of {float(theta[pair]):.4g}"
    ]


def _off(one: Tensor, other: Tensor) -> Tensor:
    """How far apart, as a share of the larger; 0 where both are 0."""
    largest = torch.maximum(one.abs(), other.abs()).clamp(min=1e-30)
    return (one - other).abs() / largest


def _factors(meant: Turns, turns: Turns) -> list[str]:
    for layer, (_, size) in meant.items():
        other = turns[layer][1] if layer in turns else size
        if abs(size - other) > _CLOSE * size:
            return [f"attention factor: cos and sin times {other:.5g} instead of {size:.5g}"]
    return []


def _lengths(meant: Meant, given: Told) -> list[str]:
    sentences = []
    for rope in given.rope.values():
        length = rope.get("original_max_position_embeddings")
        if (
            isinstance(length, int | float)
            and meant.trained is not None
            and length != meant.trained
        ):
            sentences.append(f"trained length: {int(length):,} instead of {meant.trained:,} tokens")
    if given.longest is not None and meant.longest is not None and given.longest < meant.longest:
        sentences.append(f"longest text: {given.longest:,} instead of {meant.longest:,} tokens")
    return sentences

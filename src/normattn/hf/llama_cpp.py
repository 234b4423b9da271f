"""GGUF files, and what llama.cpp computes of positions from their keys and the flags of a command.

Files are read, copied with other values, and refused where transformers would not read them.
ggml-org/llama.cpp: `llama_context` (src/llama-context.cpp) resolves flags and keys, `rope_yarn`
(ggml/src/ggml-cpu/ops.cpp) turns them into angles, tools/server/README.md lists flags and
environment variables, gguf-py/gguf/constants.py keys. Its YaRN is the paper's, with ⌊ ⌋ and ⌈ ⌉.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from normattn.errors import InputError
from normattn.hf.model_parts import innermost, kind_of
from normattn.hf.rope_detection import Spectrum
from normattn.io import open_file, write_with
from normattn.score.parts import rope_frequencies
from normattn.score.parts.rope_scaling import YaRN

_SAME = {"mistral": "llama", "mixtral": "llama"}
"""What the converter of llama.cpp writes as another architecture."""
_DIVISORS, _LONGROPE = "rope_freqs.", "rope_factors_"
"""How tensors begin that divide frequencies: those of Llama 3.1 and of LongRoPE."""
_TENSOR_BYTES, _VALUE_BYTES = 24, 13
"""The least that the description of a tensor and of a value take in a file."""


class Gguf(NamedTuple):
    """A file: its values by key (lists left out), and its tensors by name."""

    values: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def architecture(self) -> str:
        """What its keys begin with."""
        return str(self.values.get("general.architecture"))

    @property
    def own(self) -> dict[str, Any]:
        """The values by key, without the architecture."""
        prefix = f"{self.architecture}."
        return {name.removeprefix(prefix): value for name, value in self.values.items()}

    @property
    def divisors(self) -> Any:
        """The numbers that divide the frequencies (`rope_freqs.weight`), or None.

        Raises `InputError` for a file whose numbers are LongRoPE's, which differ with the length.
        """
        for name in self.tensors:
            if name.startswith(_LONGROPE):
                raise InputError(f"the file holds {name}: LongRoPE of a GGUF is not compared here")
        held = (tensor for name, tensor in self.tensors.items() if name.startswith(_DIVISORS))
        return next((tensor.data for tensor in held), None)


def read_gguf(path: Path) -> Gguf:
    """The head of a GGUF file, no weight. Raises `InputError` for a damaged one.

    Its counts are compared with its size before they are believed.
    """
    from gguf import GGUFReader, GGUFValueType

    with open_file(path) as file:
        start = file.read(24)
        size = file.seek(0, 2)
    if start[:4] != b"GGUF" or len(start) < 24:
        raise InputError(f"{path} is not a GGUF file, or cut within its header")
    _, tensors, values = struct.unpack("<IQQ", start[4:])
    if tensors * _TENSOR_BYTES + values * _VALUE_BYTES > size:
        raise InputError(
            f"{path} is damaged: its header counts {tensors:,} tensors and {values:,} values, more "
            f"than its {size:,} bytes can hold"
        )
    try:
        reader = GGUFReader(str(path))
        fields = [x for x in reader.fields.values() if GGUFValueType.ARRAY not in x.types]
        named = {str(tensor.name): tensor for tensor in reader.tensors}
        return Gguf({field.name: field.contents() for field in fields}, named)
    except Exception as error:  # the reader fails as its arrays do, in many ways
        raise InputError(f"{path} is cut or damaged: {type(error).__name__}: {error}") from error


def architecture_of(model_type: str) -> str | None:
    """What a GGUF of a family of transformers calls its architecture; None if it is not known."""
    from gguf.constants import MODEL_ARCH_NAMES

    name = model_type.removesuffix("_text")
    names = (_SAME.get(name, name), name.replace("_", "-"), name.replace("_", ""))
    known = set(MODEL_ARCH_NAMES.values())
    return next((candidate for candidate in names if candidate in known), None)


def refuse_scaled(path: Path) -> None:
    """Raise `InputError` for a file whose frequencies are scaled, by its keys or by a tensor.

    transformers (5.23) reads neither, and would compute with plain frequencies.
    """
    held = read_gguf(path)
    keys = held.own
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    # As llama.cpp reads a factor without a type.
    kind = keys.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind != "none":
        raise InputError(
            f"{path} says a {kind} scaling already, which transformers does not read: give the "
            "file as it was before, or the model as a folder"
        )
    scaled = next((name for name in held.tensors if name.startswith((_DIVISORS, _LONGROPE))), None)
    if scaled is not None:
        raise InputError(
            f"{path} holds {scaled}, which scales its frequencies and which transformers does not "
            "read: give the model as a folder"
        )


def write_gguf(source: Path, target: Path, changed: Mapping[str, tuple[str, Any]]) -> None:
    """A copy of a GGUF file with other values under some keys, whole or not at all.

    Raises `InputError` where `target` exists or cannot be written.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    reader = GGUFReader(str(source))
    kinds = {"u32": "UINT32", "f32": "FLOAT32", "str": "STRING"}
    values = {
        name: MetadataDetails(GGUFValueType[kinds[kind]], value)
        for name, (kind, value) in changed.items()
    }

    def fill(temporary: Path) -> None:
        architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
        writer = GGUFWriter(temporary, architecture, endianess=reader.endianess)
        alignment = reader.fields.get(Keys.General.ALIGNMENT)
        if alignment is not None:
            writer.data_alignment = alignment.contents()
        copy_with_new_metadata(reader, writer, values, [])

    write_with(target, fill, new=True)


_FLAG_OF = {
    "rope.freq_base": "--rope-freq-base",
    "rope.scaling.type": "--rope-scaling",
    "rope.scaling.factor": "--rope-scale",
    "rope.scaling.original_context_length": "--yarn-orig-ctx",
    "rope.scaling.yarn_beta_fast": "--yarn-beta-fast",
    "rope.scaling.yarn_beta_slow": "--yarn-beta-slow",
}
"""The flags that say what GGUF keys say."""
FLAGS = frozenset(
    {"--ctx-size", "--rope-freq-scale", "--yarn-ext-factor", "--yarn-attn-factor"}
    | set(_FLAG_OF.values())
)
ENVIRONMENT = {f"LLAMA_ARG_{name[2:].replace('-', '_').upper()}": name for name in FLAGS} | {
    "LLAMA_ARG_ROPE_SCALING_TYPE": "--rope-scaling"
}
_KINDS = ("none", "linear", "yarn", "longrope")


def values(architecture: str, fields: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The keys of a GGUF file that say these fields, with the kind of each value.

    Raises `InputError` for a scaling that llama.cpp does not have.
    """
    rope = _one_scaling(fields["rope_parameters"])
    kind = kind_of(rope)
    keys: dict[str, tuple[str, Any]] = {
        "context_length": ("u32", int(fields["max_position_embeddings"]))
    }
    if rope.get("rope_theta") is not None:
        keys["rope.freq_base"] = ("f32", float(rope["rope_theta"]))
    keys["rope.scaling.type"] = ("str", kind.replace("default", "none"))
    if kind != "default":
        keys["rope.scaling.factor"] = ("f32", float(rope["factor"]))
    if kind == "yarn":
        length = int(rope["original_max_position_embeddings"])
        keys["rope.scaling.original_context_length"] = ("u32", length)
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                keys[f"rope.scaling.yarn_{name}"] = ("f32", float(rope[name]))
        if "attention_factor" in rope:
            # Beside the 1 + 0.1·ln s that llama.cpp multiplies with by itself.
            own = float(rope["attention_factor"]) / _mscale(float(rope["factor"]))
            keys["rope.scaling.attn_factor"] = ("f32", own)
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def _one_scaling(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of the layers that see everything: llama.cpp scales no others."""
    nested = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    own = nested.pop("full_attention", None) if nested else rope
    if own is None or any(kind_of(other) != "default" for other in nested.values()):
        raise InputError(
            "llama.cpp and GGUF hold one kind of scaling, for the layers that see everything; this "
            "model scales others too"
        )
    if own.get("truncate") is False:
        raise InputError("llama.cpp has YaRN with ⌊ ⌋ and ⌈ ⌉ only, not truncate=false")
    if kind_of(own) not in ("default", "linear", "yarn"):
        raise InputError(
            f"llama.cpp reads {kind_of(own)} frequencies from a tensor of the GGUF file that the "
            "converter writes; flags and keys cannot say them"
        )
    return own


def flags(fields: Mapping[str, Any], architecture: str) -> list[str]:
    """The flags that say these fields. Raises as `values` does.

    The server caps a slot at the context_length of the file whatever --ctx-size asks for, and
    overwrites --yarn-attn-factor where YaRN is on (ggml-org/llama.cpp#17945), hence --override-kv.
    """
    options, overrides = [], []
    for key, (kind, value) in values(architecture, fields).items():
        text = value if kind == "str" else re.sub(r"\.0$", "", f"{float(value):.10g}")
        flag = _FLAG_OF.get(key.removeprefix(f"{architecture}."))
        if flag is None:
            overrides.append(f"--override-kv {key}={'int' if kind == 'u32' else 'float'}:{text}")
        elif text != "none":
            options.append(f"{flag} {text}")
    return [*options, *overrides]


def converted(fields: Mapping[str, Any], theta: Tensor) -> tuple[dict[str, Any], Tensor | None]:
    """The keys, without architecture, that llama.cpp's converter writes, and the divisors.

    `fields` are those of a configuration that give `theta`.
    """
    rope = dict(next(innermost(fields["rope_parameters"]), {}))
    divisors = None
    if kind_of(rope) == "llama3":
        divisors = rope_frequencies(2 * theta.numel(), float(rope["rope_theta"])) / theta
        rope = {"rope_theta": rope["rope_theta"]}
    keys = values("", {**fields, "rope_parameters": rope})
    return {name.removeprefix("."): value for name, (_, value) in keys.items()}, divisors


@dataclass(frozen=True)
class Served:
    """What llama.cpp computes.

    Attributes:
        full, within: frequencies and amplitude of layers that see everything, and within a window.
        score_gain: what DeepSeek's YaRN multiplies the softmax scale with.
        longest: the tokens of a slot, which the server caps at the file's context_length.
        ignored: flags without effect, a sentence each.
        rope: the scaling in transformers' words.
    """

    full: Spectrum
    within: Spectrum
    score_gain: float
    longest: int | None
    ignored: tuple[str, ...]
    rope: dict[str, Any]


def serve(
    keys: Mapping[str, Any],
    given: Mapping[str, str],
    file: str,
    width: int,
    divisors: Tensor | None = None,
) -> Served:
    """What llama.cpp makes of GGUF keys (without their architecture) and of flags.

    `width` is the number of rotated features where no key says it; `divisors` are those of
    `rope_freqs.weight`. Raises `InputError` for a value that it would not read.
    """
    kind = given.get("--rope-scaling") or str(keys.get("rope.scaling.type", "linear"))
    if kind not in _KINDS:
        raise InputError(f"{file}: llama.cpp has no rope scaling {kind!r}: {', '.join(_KINDS)}")
    numbers = _numbers(given, file)

    def yarn(name: str, usual: float) -> float:
        """A flag of YaRN, which leaves the usual value where it is below 0.

        The loaders of some architectures (grok, laguna) read a key in its place, that of llama does
        not: a file of llama with 16 and 2 as its betas gave other probabilities than the flags.
        """
        value, key = numbers.get(f"--yarn-{name}", -1.0), f"yarn_{name.replace('-', '_')}"
        if value < 0 and float(keys.get(f"rope.scaling.{key}", usual)) not in (usual, -1.0):
            raise InputError(
                f"{file}: llama.cpp reads rope.scaling.{key} in some architectures and ignores it "
                f"in most, so what it computes is not known here: say --yarn-{name} instead"
            )
        return usual if value < 0 else value

    base = numbers.get("--rope-freq-base") or float(keys.get("rope.freq_base", 10000.0))
    swa_base = float(keys.get("rope.freq_base_swa", keys.get("_swa_base", base)))
    factor = float(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0)
    factor = numbers.get("--rope-scale", factor)
    if "--rope-freq-scale" in numbers:
        factor = 1 / numbers["--rope-freq-scale"]
    factor = 1.0 if kind == "none" else factor
    context, asked = int(keys.get("context_length", 0)), int(numbers.get("--ctx-size", 0))
    original = float(keys.get("rope.scaling.original_context_length") or context)
    trained = numbers.get("--yarn-orig-ctx") or original
    fast, slow = yarn("beta-fast", 32.0), yarn("beta-slow", 1.0)
    mix = yarn("ext-factor", 1.0 if kind == "yarn" else 0.0)
    amplitude, gain = _amplitude(keys, factor, mix, yarn("attn-factor", 1.0))
    width = int(keys.get("rope.dimension_count", width))
    if base <= 1 or width < 2 or width % 2:
        raise InputError(
            f"{file}: llama.cpp would compute no frequencies of a base of {base:g} (above 1) and "
            f"{width} features (even)"
        )
    theta = rope_frequencies(width, base) / factor
    if mix and trained > 1:
        scaling = YaRN(factor=factor, beta_fast=fast, beta_slow=slow)
        theta = theta.lerp(scaling.inverse_frequencies(width, base, int(trained)), mix)
    theta = theta if divisors is None else theta / divisors.double()
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": base, "factor": factor}
    if kind == "none" or factor == 1:
        rope = {"rope_type": "default", "rope_theta": base}
    elif kind == "yarn":
        rope["original_max_position_embeddings"] = int(trained)
    return Served(
        full=(theta, amplitude),
        within=(rope_frequencies(width, swa_base), 1.0),
        score_gain=gain,
        longest=min(asked or context, context) if context else asked or None,
        ignored=tuple(_ignored(given, kind, mix, asked, context)),
        rope=rope,
    )


def _numbers(given: Mapping[str, str], file: str) -> dict[str, float]:
    """The flags that hold numbers; those of a scale must be above 0."""
    numbers = {}
    for name in given.keys() - {"--rope-scaling"}:
        try:
            value = float(given[name])
        except ValueError as error:
            raise InputError(f"{file}: {name} {given[name]!r} is no number") from error
        scale = name in ("--rope-scale", "--rope-freq-scale")
        if not math.isfinite(value) or (scale and value <= 0):
            raise InputError(f"{file}: {name} {given[name]!r} is no finite number above 0")
        numbers[name] = value
    return numbers


def _amplitude(
    keys: Mapping[str, Any], factor: float, mix: float, attention: float
) -> tuple[float, float]:
    """What cos and sin, and what DeepSeek's scores, are multiplied with."""
    stored = float(keys.get("rope.scaling.attn_factor", 1.0))
    if mix == 0:
        return attention * stored, 1.0
    deepseek = keys.get("general.architecture") == "deepseek2"
    weight = float(keys.get("rope.scaling.yarn_log_multiplier", 0.0)) / 0.1
    amplitude = _mscale(factor) * stored
    if weight != 0:
        top = weight if deepseek and weight != 1 else 1.0
        amplitude = _mscale(factor, top) / _mscale(factor, weight) * stored
    return amplitude, (amplitude * _mscale(factor, weight)) ** 2 if deepseek else 1.0


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def _ignored(
    given: Mapping[str, str], kind: str, mix: float, asked: int, context: int
) -> Iterator[str]:
    if kind == "none" and given.keys() & {"--rope-scale", "--rope-freq-scale"}:
        yield "--rope-scale is ignored: with --rope-scaling none llama.cpp sets it to 1"
    if mix and "--yarn-attn-factor" in given:
        yield (
            "--yarn-attn-factor is ignored: llama.cpp overwrites it where YaRN is on; say "
            "--override-kv ARCH.rope.scaling.attn_factor=float:…"
        )
    if context and asked > context:
        yield (
            f"--ctx-size {asked:,} is cut to the file's context_length, {context:,}: say "
            "--override-kv ARCH.context_length=int:…"
        )

"""GGUF files, and what llama.cpp computes of positions from their keys and the flags of a command.

Files are read, copied with other values, and refused where transformers would not read them.
ggml-org/llama.cpp: `llama_context` (src/llama-context.cpp) resolves flags and keys, `rope_yarn`
(ggml/src/ggml-cpu/ops.cpp) turns them into angles, tools/server/README.md lists flags and
environment variables, gguf-py/gguf/constants.py keys. Its YaRN is the paper's, with ⌊ ⌋ and ⌈ ⌉.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.hf.model_parts import kind_of
from normattn.hf.native import scaling_words
from normattn.io import open_file, write_with
from normattn.score.parts.rope_scaling import YaRN

_TENSOR_BYTES, _VALUE_BYTES = 24, 13
"""The least that the description of a tensor and of a value take in a file."""


class Gguf(NamedTuple):
    """The head of a file.

    `values` by key, without the architecture before it, and without lists. `divisors` are the
    tensors that scale its frequencies: those of Llama 3.1 (`rope_freqs`) and of LongRoPE.
    """

    architecture: str
    values: dict[str, Any]
    divisors: dict[str, list[float]]


def read_gguf(path: Path) -> Gguf:
    """The head of a GGUF file, no weight. Raises `InputError` for a damaged one.

    A file that has not changed is read once: its lists of tokens take seconds.
    """
    with open_file(path) as file:
        start, state = file.read(24), os.fstat(file.fileno())
    if start[:4] != b"GGUF" or len(start) < 24:
        raise InputError(f"{path} is not a GGUF file, or its header is incomplete")
    _, tensors, values = struct.unpack("<IQQ", start[4:])
    if tensors * _TENSOR_BYTES + values * _VALUE_BYTES > state.st_size:
        raise InputError(
            f"{path} is damaged: its header counts {tensors:,} tensors and {values:,} values, more "
            f"than its {state.st_size:,} bytes can hold"
        )
    return _read_head(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_head(path: Path, size: int, modified: int) -> Gguf:
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(str(path))
        fields = [x for x in reader.fields.values() if GGUFValueType.ARRAY not in x.types]
        values = {field.name: field.contents() for field in fields}
        divisors = {
            str(tensor.name): tensor.data.flatten().tolist()
            for tensor in reader.tensors
            if tensor.name.startswith(("rope_freqs.", "rope_factors_"))
        }
    except Exception as error:  # the reader fails as its arrays do, in many ways
        raise InputError(f"{path} is cut or damaged: {type(error).__name__}: {error}") from error
    architecture = str(values.get("general.architecture"))
    own = {name.removeprefix(f"{architecture}."): value for name, value in values.items()}
    return Gguf(architecture, own, divisors)


def architecture_of(model_type: str) -> str | None:
    """What a GGUF of a family of transformers calls its architecture; None if it is not known."""
    from gguf.constants import MODEL_ARCH_NAMES

    name = model_type.removesuffix("_text")
    converted = {"mistral": "llama", "mixtral": "llama"}.get(name, name)
    known = set(MODEL_ARCH_NAMES.values())
    names = (converted, name.replace("_", "-"), name.replace("_", ""))
    return next((candidate for candidate in names if candidate in known), None)


def refuse_scaled(path: Path) -> None:
    """Raise `InputError` for a file whose frequencies are scaled, by its keys or by a tensor.

    transformers (5.23) reads neither, and would compute with plain frequencies.
    """
    _, keys, divisors = read_gguf(path)
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    # llama.cpp reads a factor without a type as linear.
    kind = keys.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    for scaling in (*divisors, *([] if kind == "none" else [f"a {kind} scaling"])):
        raise InputError(
            f"{path} holds {scaling}, which scales its frequencies and which transformers does not "
            "read: give the original file, or the model as a folder"
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


_ORIGINAL = "original_max_position_embeddings"
_WORDS = {
    "rope_theta": ("rope.freq_base", "f32", "--rope-freq-base"),
    "rope_type": ("rope.scaling.type", "str", "--rope-scaling"),
    "factor": ("rope.scaling.factor", "f32", "--rope-scale"),
    _ORIGINAL: ("rope.scaling.original_context_length", "u32", "--yarn-orig-ctx"),
    "beta_fast": ("rope.scaling.yarn_beta_fast", "f32", "--yarn-beta-fast"),
    "beta_slow": ("rope.scaling.yarn_beta_slow", "f32", "--yarn-beta-slow"),
}
"""transformers' words, and the keys and flags of llama.cpp that say the same."""
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_SCALES = ("--rope-scale", "--rope-freq-scale")
FLAGS = frozenset(
    {"--ctx-size", "--rope-freq-scale", "--yarn-ext-factor", "--yarn-attn-factor"}
    | {flag for _, _, flag in _WORDS.values()}
)
ENVIRONMENT = {f"LLAMA_ARG_{name[2:].replace('-', '_').upper()}": name for name in FLAGS} | {
    "LLAMA_ARG_ROPE_SCALING_TYPE": "--rope-scaling"
}


def values(architecture: str, fields: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The keys of a GGUF file that say these fields, with the kind of each value.

    Raises `InputError` for a scaling that llama.cpp does not have.
    """
    given = fields["rope_parameters"]
    nested = {name: rope for name, rope in given.items() if isinstance(rope, Mapping)}
    rope: Any = nested.pop("full_attention", None) if nested else given
    if rope is None or any(kind_of(other) != "default" for other in nested.values()):
        raise InputError(
            "llama.cpp and GGUF hold one kind of scaling, for layers with full attention; this "
            "model scales other layers too"
        )
    if rope.get("truncate") is False:
        raise InputError("llama.cpp has YaRN with ⌊ ⌋ and ⌈ ⌉ only, not truncate=false")
    if kind_of(rope) not in ("default", "linear", "yarn"):
        raise InputError(
            f"llama.cpp reads {kind_of(rope)} frequencies from a tensor of the GGUF file that the "
            "converter writes; flags and keys cannot express them"
        )
    rope = {**rope, "rope_type": kind_of(rope).replace("default", "none")}
    casts: Any = {"f32": float, "u32": int, "str": str}
    keys: dict[str, tuple[str, Any]] = {
        "context_length": ("u32", int(fields["max_position_embeddings"]))
    }
    for word, (key, kind, _) in _WORDS.items():
        if rope.get(word) is not None:
            keys[key] = (kind, casts[kind](rope[word]))
    if "attention_factor" in rope:
        # llama.cpp multiplies with 1 + 0.1·ln s by itself.
        own = float(rope["attention_factor"]) / _mscale(float(rope["factor"]))
        keys["rope.scaling.attn_factor"] = ("f32", own)
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def flags(fields: Mapping[str, Any], architecture: str) -> list[str]:
    """The flags that say these fields. Raises as `values` does.

    The server caps a slot at the context_length of the file whatever --ctx-size asks for, and
    overwrites --yarn-attn-factor where YaRN is on (ggml-org/llama.cpp#17945), hence --override-kv.
    """
    flag_of = {f"{architecture}.{key}": flag for key, _, flag in _WORDS.values()}
    options, overrides = [], []
    for key, (kind, value) in values(architecture, fields).items():
        text = value if kind == "str" else re.sub(r"\.0$", "", f"{float(value):.10g}")
        if key not in flag_of:
            overrides.append(f"--override-kv {key}={'int' if kind == 'u32' else 'float'}:{text}")
        elif text != "none":
            options.append(f"{flag_of[key]} {text}")
    return [*options, *overrides]


def _mscale(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1


class Computed(NamedTuple):
    """What llama.cpp computes.

    `rope` are the rope parameters with which transformers computes the same, `longest` the longest
    text, `ignored` the settings without effect, a sentence each.
    """

    rope: dict[str, Any]
    longest: int | None
    ignored: list[str]


def computed(
    converted: Mapping[str, Any],
    keys: Mapping[str, Any],
    given: Mapping[str, str],
    file: str,
    divisors: Mapping[str, Sequence[float]] | None = None,
) -> Computed:
    """What llama.cpp makes of GGUF keys, without their architecture, and of flags.

    `converted` are rope parameters that the converter has written into the file, `divisors` its
    tensors that divide frequencies. Raises `InputError` for a value that llama.cpp would not read,
    and for what transformers has no words for.
    """
    numbers = _numbers(given, file)
    # The loaders of some architectures (grok, laguna) read these keys, that of llama does not: a
    # file of llama with 16 and 2 as its betas gave other probabilities than the flags.
    for name, usual in {"ext_factor": -1.0, "attn_factor": 1.0, **_BETAS}.items():
        flag, key = f"--yarn-{name.replace('_', '-')}", f"rope.scaling.yarn_{name}"
        if numbers.get(flag, -1.0) < 0 and float(keys.get(key, usual)) not in (usual, -1.0):
            raise InputError(
                f"{file}: llama.cpp reads {key} in some architectures and ignores it in most, so "
                f"what it computes is not known here: say {flag} instead"
            )
    rope = {**converted, **{word: keys[key] for word, (key, _, _) in _WORDS.items() if key in keys}}
    for word, (_, kind, flag) in _WORDS.items():
        value: Any = given.get(flag) if kind == "str" else numbers.get(flag)
        if value is not None and (value >= 0 if word in _BETAS else value != 0):
            rope[word] = value
    if "--rope-freq-scale" in numbers:
        rope["factor"] = 1 / numbers["--rope-freq-scale"]
    scaled = {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "--rope-scaling"}
    if kind_of(converted) != "llama3":
        rope = _resolved(rope, keys, numbers, file)
    elif {*keys, *given} & {*scaled, *_SCALES}:
        raise InputError(f"{file}: a scaling on top of llama3 has no words in transformers")
    yarn, context = rope["rope_type"] == "yarn", int(keys.get("context_length", 0))
    for name, factors in (divisors or {}).items():
        if name.startswith("rope_factors_"):
            raise InputError(f"the file holds {name}: LongRoPE of a GGUF is not compared here")
        if rope["rope_type"] != "default":
            raise InputError(f"{file}: rope_freqs.weight under another scaling has no words here")
        # In transformers' words: LongRoPE with two equal lists.
        rope |= {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        rope |= {_ORIGINAL: context, "short_factor": factors, "long_factor": factors}
    asked, ignored = int(numbers.get("--ctx-size", 0)), []
    if given.get("--rope-scaling") == "none" and given.keys() & {*_SCALES}:
        ignored.append("--rope-scale is ignored: with --rope-scaling none llama.cpp sets it to 1")
    if yarn and "--yarn-attn-factor" in given:
        ignored.append(
            "--yarn-attn-factor is ignored: llama.cpp overwrites it where YaRN is on; say "
            "--override-kv ARCH.rope.scaling.attn_factor=float:…"
        )
    if context and asked > context:
        ignored.append(
            f"--ctx-size {asked:,} is cut to the file's context_length, {context:,}: say "
            "--override-kv ARCH.context_length=int:…"
        )
    times = float(keys.get("rope.scaling.attn_factor", 1.0))
    times *= 1.0 if yarn else max(numbers.get("--yarn-attn-factor", 1.0), 0.0)
    if times != 1 and "attention_factor" not in rope:
        ignored.append(f"attention factor: cos and sin times {times:.5g} instead of 1")
    # The server caps a slot at the file's context_length.
    longest = min(asked or context, context) if context else asked or None
    return Computed(rope, longest, ignored)


def _numbers(given: Mapping[str, str], file: str) -> dict[str, float]:
    """The flags that hold numbers; those of a scale must be above 0."""
    numbers = {}
    for name in given.keys() - {"--rope-scaling"}:
        try:
            value = float(given[name])
        except ValueError as error:
            raise InputError(f"{file}: {name} {given[name]!r} is no number") from error
        if not math.isfinite(value) or (name in _SCALES and value <= 0):
            raise InputError(f"{file}: {name} {given[name]!r} is no finite number above 0")
        numbers[name] = value
    return numbers


def _resolved(
    rope: Mapping[str, Any], keys: Mapping[str, Any], numbers: Mapping[str, float], file: str
) -> dict[str, Any]:
    """The rope parameters with which transformers computes what llama.cpp computes of these."""
    kind = str(rope.get("rope_type", "linear")).replace("default", "none")
    known = ("none", "linear", "yarn", "longrope")
    if kind not in known:
        raise InputError(f"{file}: llama.cpp has no rope scaling {kind!r}: {', '.join(known)}")
    base, width = float(rope.get("rope_theta") or 10000.0), keys.get("rope.dimension_count", 2)
    if base <= 1 or width < 2 or width % 2:
        raise InputError(
            f"{file}: llama.cpp would compute no frequencies of a base of {base:g} (above 1) and "
            f"{width:g} features (even)"
        )
    factor = float(rope.get("factor") or keys.get("rope.scale_linear") or 1.0)
    mix = numbers.get("--yarn-ext-factor", -1.0)
    mix = float(kind == "yarn") if mix < 0 else mix
    if mix not in (0, 1):
        raise InputError(f"{file}: transformers has no words for --yarn-ext-factor {mix:g}")
    if mix:  # which checks its values
        fast, slow = (float(rope.get(name, usual)) for name, usual in _BETAS.items())
        yarn = YaRN(factor=factor, beta_fast=fast, beta_slow=slow)
    plain = {"rope_type": "default", "rope_theta": base}
    if kind == "none" or factor == 1:
        return plain
    if not mix:
        return {**plain, "rope_type": "linear", "factor": factor}
    original = int(rope.get(_ORIGINAL) or keys.get("context_length", 0))
    stored = float(keys.get("rope.scaling.attn_factor", 1.0))
    weight = float(keys.get("rope.scaling.yarn_log_multiplier", 0.0)) / 0.1
    more = {name: rope[name] for name in ("mscale", "mscale_all_dim") if name in rope}
    if weight:  # DeepSeek's, whose softmax scale grows instead
        more = {"mscale": weight, "mscale_all_dim": weight}
    elif stored != 1:
        more = {"attention_factor": _mscale(factor) * stored}
    return {**plain, **scaling_words(yarn, original), **more}

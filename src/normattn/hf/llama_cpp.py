"""GGUF files, and the positions that llama.cpp computes from their keys and its flags.

In ggml-org/llama.cpp, `llama_context` (src/llama-context.cpp) resolves flags and keys, and
`rope_yarn` (ggml/src/ggml-cpu/ops.cpp) computes angles. tools/server/README.md lists flags and
environment variables, gguf-py/gguf/constants.py keys. Its YaRN is the paper's, with ⌊ ⌋ and ⌈ ⌉.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.hf.model_parts import rope_type_of
from normattn.hf.native import scaling_fields
from normattn.io import write_with
from normattn.score.parts.rope_scaling import YaRN


class Gguf(NamedTuple):
    """The metadata of a file: its keys without the architecture's prefix and without lists."""

    architecture: str
    keys: dict[str, Any]
    divisors: dict[str, list[float]]  # tensors that divide frequencies: of Llama 3.1 and LongRoPE


def read_gguf(path: Path) -> Gguf:
    """The metadata of a GGUF file, cached until it changes; `InputError` for a damaged one."""
    try:
        state = path.stat()
        return _read_metadata(path, state.st_size, state.st_mtime_ns)
    except Exception as error:  # the reader raises whatever its arrays raise
        raise InputError(
            f"{path} is not a GGUF file, or cut or damaged: {type(error).__name__}: {error}"
        ) from error


@lru_cache(maxsize=4)
def _read_metadata(path: Path, size: int, modified: int) -> Gguf:
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(str(path))
    fields = [field for field in reader.fields.values() if GGUFValueType.ARRAY not in field.types]
    values = {field.name: field.contents() for field in fields}
    divisors = {
        str(tensor.name): tensor.data.flatten().tolist()
        for tensor in reader.tensors
        if tensor.name.startswith(("rope_freqs.", "rope_factors_"))
    }
    architecture = str(values.get("general.architecture"))
    keys = {name.removeprefix(f"{architecture}."): value for name, value in values.items()}
    return Gguf(architecture, keys, divisors)


def architecture_of(model_type: str) -> str | None:
    """The GGUF architecture of a transformers model_type; None if unknown."""
    from gguf.constants import MODEL_ARCH_NAMES

    name = model_type.removesuffix("_text")
    converted = {"mistral": "llama", "mixtral": "llama"}.get(name, name)
    known = set(MODEL_ARCH_NAMES.values())
    names = (converted, name.replace("_", "-"), name.replace("_", ""))
    return next((candidate for candidate in names if candidate in known), None)


def refuse_scaled(path: Path) -> None:
    """Raise `InputError` for a file with scaled frequencies, which transformers does not read."""
    _, keys, divisors = read_gguf(path)
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    # llama.cpp reads a factor without a type as linear.
    rope_type = keys.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    for scaling in (*divisors, *([] if rope_type == "none" else [f"a {rope_type} scaling"])):
        raise InputError(
            f"{path} holds {scaling}, which scales its frequencies and which transformers does not "
            "read: give the original file, or the model as a folder"
        )


def write_gguf(source: Path, target: Path, changed: Mapping[str, tuple[str, Any]]) -> None:
    """Copy a GGUF file with other values for some keys; atomic.

    Raises `InputError` where `target` exists or cannot be written.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    reader = GGUFReader(str(source))
    types = {"u32": "UINT32", "f32": "FLOAT32", "str": "STRING"}
    details = {
        name: MetadataDetails(GGUFValueType[types[kind]], value)
        for name, (kind, value) in changed.items()
    }

    def fill(temporary: Path) -> None:
        architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
        writer = GGUFWriter(temporary, architecture, endianess=reader.endianess)
        alignment = reader.fields.get(Keys.General.ALIGNMENT)
        if alignment is not None:
            writer.data_alignment = alignment.contents()
        copy_with_new_metadata(reader, writer, details, [])

    write_with(target, fill, new=True)


_ORIGINAL = "original_max_position_embeddings"
_FIELDS = {
    "rope_theta": ("rope.freq_base", "f32", "--rope-freq-base"),
    "rope_type": ("rope.scaling.type", "str", "--rope-scaling"),
    "factor": ("rope.scaling.factor", "f32", "--rope-scale"),
    _ORIGINAL: ("rope.scaling.original_context_length", "u32", "--yarn-orig-ctx"),
    "beta_fast": ("rope.scaling.yarn_beta_fast", "f32", "--yarn-beta-fast"),
    "beta_slow": ("rope.scaling.yarn_beta_slow", "f32", "--yarn-beta-slow"),
}
"""transformers' rope parameters, with the GGUF key, its type and the flag of llama.cpp."""
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_SCALE_FLAGS = ("--rope-scale", "--rope-freq-scale")
FLAGS = frozenset(
    {"--ctx-size", "--rope-freq-scale", "--yarn-ext-factor", "--yarn-attn-factor"}
    | {"--parallel", "--kv-unified"}
    | {flag for _, _, flag in _FIELDS.values()}
)
ENVIRONMENT = {f"LLAMA_ARG_{name[2:].replace('-', '_').upper()}": name for name in FLAGS} | {
    "LLAMA_ARG_ROPE_SCALING_TYPE": "--rope-scaling",
    "LLAMA_ARG_N_PARALLEL": "--parallel",
}


def gguf_keys(architecture: str, fields: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The GGUF keys of these fields, with their types; `InputError` for what llama.cpp lacks."""
    ropes = fields["rope_parameters"]
    nested = {name: rope for name, rope in ropes.items() if isinstance(rope, Mapping)}
    rope: Any = nested.pop("full_attention", None) if nested else ropes
    if rope is None or any(rope_type_of(other) != "default" for other in nested.values()):
        raise InputError(
            "llama.cpp and GGUF hold one kind of scaling, for layers with full attention; this "
            "model scales other layers too"
        )
    if rope.get("truncate") is False:
        raise InputError("llama.cpp has YaRN with ⌊ ⌋ and ⌈ ⌉ only, not truncate=false")
    if rope_type_of(rope) not in ("default", "linear", "yarn"):
        raise InputError(
            f"llama.cpp reads {rope_type_of(rope)} frequencies from a tensor of the GGUF file that "
            "the converter writes; flags and keys cannot express them"
        )
    rope = {**rope, "rope_type": rope_type_of(rope).replace("default", "none")}
    casts: Any = {"f32": float, "u32": int, "str": str}
    keys: dict[str, tuple[str, Any]] = {
        "context_length": ("u32", int(fields["max_position_embeddings"]))
    }
    for field, (key, kind, _) in _FIELDS.items():
        if rope.get(field) is not None:
            keys[key] = (kind, casts[kind](rope[field]))
    if "attention_factor" in rope:
        # llama.cpp multiplies this by 1 + 0.1·ln s.
        multiple = float(rope["attention_factor"]) / yarn_factor(float(rope["factor"]))
        keys["rope.scaling.attn_factor"] = ("f32", multiple)
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def command_flags(fields: Mapping[str, Any], architecture: str) -> list[str]:
    """The flags for these fields; raises as `gguf_keys` does.

    Some keys need --override-kv: the server caps --ctx-size at the file's context_length, and
    overwrites --yarn-attn-factor where YaRN is on (ggml-org/llama.cpp#17945).
    """
    flag_of = {f"{architecture}.{key}": flag for key, _, flag in _FIELDS.values()}
    options, overrides = [], []
    for key, (kind, value) in gguf_keys(architecture, fields).items():
        text = value if kind == "str" else re.sub(r"\.0$", "", f"{float(value):.10g}")
        if key not in flag_of:
            overrides.append(f"--override-kv {key}={'int' if kind == 'u32' else 'float'}:{text}")
        elif text != "none":
            options.append(f"{flag_of[key]} {text}")
    return [*options, *overrides]


def yarn_factor(factor: float) -> float:
    """YaRN's factor of cos and sin, 0.1·ln s + 1."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1


def resolve_rope(
    converted: Mapping[str, Any],
    keys: Mapping[str, Any],
    flags: Mapping[str, Any],
    file: str,
    divisors: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """The rope parameters with which transformers computes what llama.cpp does.

    `keys` are GGUF keys without their architecture, `flags` those of a command, `converted` the
    rope parameters that the converter wrote into the file, and `divisors` its tensors that divide
    frequencies. Raises `InputError` for a value that llama.cpp would not read, and for settings
    that transformers cannot express.
    """
    # Some architectures (grok, laguna) read these keys, llama does not: a llama file with betas 16
    # and 2 gave other probabilities than the same values as flags.
    for name, default in {"ext_factor": -1.0, "attn_factor": 1.0, **_BETAS}.items():
        flag, key = f"--yarn-{name.replace('_', '-')}", f"rope.scaling.yarn_{name}"
        if flags.get(flag, -1.0) < 0 and float(keys.get(key, default)) not in (default, -1.0):
            raise InputError(
                f"{file}: llama.cpp reads {key} in some architectures and ignores it in most, so "
                f"what it computes is not known here: say {flag} instead"
            )
    rope = {**converted, **{field: keys[x] for field, (x, _, _) in _FIELDS.items() if x in keys}}
    for field, (_, _, flag) in _FIELDS.items():
        value = flags.get(flag)
        if value is not None and (value >= 0 if field in _BETAS else value != 0):
            rope[field] = value
    if "--rope-freq-scale" in flags:
        rope["factor"] = 1 / flags["--rope-freq-scale"]
    scaled = {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "--rope-scaling"}
    if rope_type_of(converted) != "llama3":
        rope = _resolve_scaling(rope, keys, flags.get("--yarn-ext-factor", -1.0), file)
    elif {*keys, *flags} & {*scaled, *_SCALE_FLAGS}:
        raise InputError(f"{file}: a scaling on top of llama3 has no words in transformers")
    for name, factors in (divisors or {}).items():
        if name.startswith("rope_factors_"):
            raise InputError(f"the file holds {name}: LongRoPE of a GGUF is not compared here")
        if rope["rope_type"] != "default":
            raise InputError(f"{file}: rope_freqs.weight under another scaling has no words here")
        # transformers computes the same by LongRoPE with two equal lists.
        rope |= {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        rope |= {_ORIGINAL: int(keys.get("context_length", 0))}
        rope |= {"short_factor": factors, "long_factor": factors}
    return rope


def resolve_length(
    keys: Mapping[str, Any], flags: Mapping[str, Any], rope: Mapping[str, Any]
) -> tuple[int | None, int, list[str]]:
    """The longest text, the number of requests that share the context, and settings ignored.

    `rope` are the rope parameters of these keys and flags; each ignored setting is a sentence.
    """
    yarn, context = rope["rope_type"] == "yarn", int(keys.get("context_length", 0))
    # Each of the parallel requests has an equal part.
    unified = flags.get("--kv-unified", "0").lower() not in ("0", "false", "off", "disabled")
    slots = 1 if unified else max(1, int(flags.get("--parallel", 1)))
    ctx_size = (int(flags.get("--ctx-size", 0)) or context) // slots
    amplitude = float(keys.get("rope.scaling.attn_factor", 1.0))
    amplitude *= 1.0 if yarn else max(flags.get("--yarn-attn-factor", 1.0), 0.0)
    ignored, override = [], "say --override-kv ARCH"
    if flags.get("--rope-scaling") == "none" and flags.keys() & {*_SCALE_FLAGS}:
        ignored.append("--rope-scale is ignored: with --rope-scaling none llama.cpp sets it to 1")
    if yarn and "--yarn-attn-factor" in flags:
        ignored.append(
            "--yarn-attn-factor is ignored: llama.cpp overwrites it where YaRN is on; "
            f"{override}.rope.scaling.attn_factor=float:…"
        )
    if context and ctx_size > context:
        cut = f"--ctx-size is cut to the file's context_length, {context:,}"
        ignored.append(f"{cut}: {override}.context_length=int:…")
    if amplitude != 1 and "attention_factor" not in rope:
        ignored.append(f"attention factor: cos and sin times {amplitude:.5g} instead of 1")
    # The server caps a slot at the file's context_length.
    max_length = min(ctx_size, context) if context else ctx_size or None
    return max_length, slots, ignored


def _resolve_scaling(
    rope: Mapping[str, Any], keys: Mapping[str, Any], ext_factor: float, file: str
) -> dict[str, Any]:
    rope_type = str(rope.get("rope_type", "linear")).replace("default", "none")
    known = ("none", "linear", "yarn", "longrope")
    if rope_type not in known:
        raise InputError(f"{file}: llama.cpp has no rope scaling {rope_type!r}: {', '.join(known)}")
    base = float(rope.get("rope_theta") or 10000.0)
    factor = float(rope.get("factor") or keys.get("rope.scale_linear") or 1.0)
    ext_factor = float(rope_type == "yarn") if ext_factor < 0 else ext_factor
    if ext_factor not in (0, 1):
        raise InputError(f"{file}: transformers has no words for --yarn-ext-factor {ext_factor:g}")
    if ext_factor:  # YaRN raises an error for invalid betas, even where the factor is 1
        fast, slow = (float(rope.get(name, default)) for name, default in _BETAS.items())
        yarn = YaRN(factor=factor, beta_fast=fast, beta_slow=slow)
    unscaled = {"rope_type": "default", "rope_theta": base}
    if rope_type == "none" or factor == 1:
        return unscaled
    if not ext_factor:
        return {**unscaled, "rope_type": "linear", "factor": factor}
    original = int(rope.get(_ORIGINAL) or keys.get("context_length", 0))
    attn_factor = float(keys.get("rope.scaling.attn_factor", 1.0))
    mscale = float(keys.get("rope.scaling.yarn_log_multiplier", 0.0)) / 0.1
    amplitude = {name: rope[name] for name in ("mscale", "mscale_all_dim") if name in rope}
    if mscale:  # DeepSeek scales the softmax instead of cos and sin
        amplitude = {"mscale": mscale, "mscale_all_dim": mscale}
    elif attn_factor != 1:
        amplitude = {"attention_factor": yarn_factor(factor) * attn_factor}
    return {**unscaled, **scaling_fields(yarn, original), **amplitude}

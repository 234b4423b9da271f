"""A rotary scaling in llama.cpp's words: its flags, and the keys of a GGUF file.

ggml-org/llama.cpp: tools/server/README.md (flags), gguf-py/gguf/constants.py (keys). Its YaRN is
the paper's, with ⌊ ⌋ and ⌈ ⌉, and multiplies cos and sin by attn_factor·(1 + 0.1·ln factor)
(`ggml_rope_yarn_corr_dims`, `rope_yarn`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import open_file, write_with

_SAME = {"mistral": "llama", "mixtral": "llama"}
"""What the converter of llama.cpp writes as another architecture."""
_FACTORS = ("rope_freqs.", "rope_factors_")
"""How tensors begin that divide frequencies: those of Llama 3.1 and of LongRoPE."""


def flags(rope: Mapping[str, Any]) -> list[str]:
    """The flags that say these rope parameters. Raises `InputError` for what has none."""
    kind, base = _kind(rope), rope.get("rope_theta")
    options = [] if base is None else [f"--rope-freq-base {_number(base)}"]
    if kind == "default":
        return options
    options.append(f"--rope-scaling {kind} --rope-scale {_number(rope['factor'])}")
    if kind == "yarn":
        options.append(f"--yarn-orig-ctx {rope['original_max_position_embeddings']}")
        options += [
            f"--yarn-{name.replace('_', '-')} {_number(rope[name])}"
            for name in ("beta_fast", "beta_slow")
            if name in rope
        ]
        if "attention_factor" in rope:
            options.append(f"--yarn-attn-factor {_number(_beside_own(rope))}")
    return options


def values(architecture: str, fields: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The keys of a GGUF file that say these fields, with the kind of each value."""
    rope = fields["rope_parameters"]
    kind = _kind(rope)
    keys: dict[str, tuple[str, Any]] = {
        "context_length": ("u32", int(fields["max_position_embeddings"]))
    }
    if rope.get("rope_theta") is not None:
        keys["rope.freq_base"] = ("f32", float(rope["rope_theta"]))
    scaling: dict[str, tuple[str, Any]] = {"type": ("str", kind.replace("default", "none"))}
    if kind != "default":
        scaling["factor"] = ("f32", float(rope["factor"]))
    if kind == "yarn":
        length = int(rope["original_max_position_embeddings"])
        scaling["original_context_length"] = ("u32", length)
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                scaling[f"yarn_{name}"] = ("f32", float(rope[name]))
        if "attention_factor" in rope:
            scaling["attn_factor"] = ("f32", _beside_own(rope))
    keys |= {f"rope.scaling.{name}": value for name, value in scaling.items()}
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def architecture_of(model_type: str) -> str | None:
    """What a GGUF of a family of transformers calls its architecture; None if it is not known."""
    from gguf.constants import MODEL_ARCH_NAMES

    name = model_type.removesuffix("_text")
    names = (_SAME.get(name, name), name.replace("_", "-"), name.replace("_", ""))
    known = set(MODEL_ARCH_NAMES.values())
    return next((candidate for candidate in names if candidate in known), None)


def read_values(path: Path) -> dict[str, Any]:
    """The values of a GGUF file by key, lists left out. Raises `InputError` for a damaged file."""
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of a GGUF file, and the names of its tensors."""
    from gguf import GGUFReader, GGUFValueType

    with open_file(path):
        pass
    try:
        reader = GGUFReader(str(path))
        fields = reader.fields.values()
        single = [field for field in fields if GGUFValueType.ARRAY not in field.types]
        held = {field.name: field.contents() for field in single}
        return held, tuple(str(tensor.name) for tensor in reader.tensors)
    except Exception as error:  # the reader fails as its arrays do, in many ways
        raise InputError(f"{path} is cut or damaged: {type(error).__name__}: {error}") from error


def refuse_scaled(path: Path) -> None:
    """Raise `InputError` for a file whose frequencies are scaled, by its keys or by a tensor.

    transformers (5.23) reads neither, and would compute with plain frequencies.
    """
    held, tensors = _read(path)
    before = f"{held.get('general.architecture')}.rope."
    factor = held.get(f"{before}scaling.factor") or held.get(f"{before}scale_linear") or 1.0
    # As llama.cpp reads a factor without a type.
    kind = held.get(f"{before}scaling.type", "none" if factor == 1.0 else "linear")
    if kind != "none":
        raise InputError(
            f"{path} says a {kind} scaling already, which transformers does not read: give the "
            "file as it was before, or the model as a folder"
        )
    scaled = next((name for name in tensors if name.startswith(_FACTORS)), None)
    if scaled is not None:
        raise InputError(
            f"{path} holds {scaled}, which scales its frequencies and which transformers does not "
            "read: give the model as a folder"
        )


def write_gguf(source: Path, target: Path, changed: Mapping[str, tuple[str, Any]]) -> None:
    """A copy of a GGUF file with other values under some keys, whole or not at all.

    Raises `InputError` where `target` exists or cannot be written.
    """
    import gguf

    kinds = {
        "u32": gguf.GGUFValueType.UINT32,
        "f32": gguf.GGUFValueType.FLOAT32,
        "str": gguf.GGUFValueType.STRING,
    }
    reader = gguf.GGUFReader(str(source))
    own = {gguf.Keys.General.ARCHITECTURE}
    held = [
        field
        for field in reader.fields.values()
        if field.name not in own and not field.name.startswith("GGUF.")
    ]

    def fill(temporary: Path) -> None:
        architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
        writer = gguf.GGUFWriter(temporary, architecture, endianess=reader.endianess)
        alignment = reader.fields.get(gguf.Keys.General.ALIGNMENT)
        if alignment is not None:
            writer.data_alignment = alignment.contents()
        for field in held:
            if field.name not in changed:
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        for name, (kind, value) in changed.items():
            writer.add_key_value(name, value, kinds[kind])
        for tensor in reader.tensors:
            data = tensor.data
            writer.add_tensor_info(
                tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in reader.tensors:
            writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
        writer.close()

    write_with(target, fill, new=True)


def _kind(rope: Mapping[str, Any]) -> str:
    """none, linear or yarn."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise InputError(
            "llama.cpp and GGUF hold one kind of scaling for all layers, and this model has rotary "
            "frequencies of two kinds"
        )
    if rope.get("truncate") is False:
        raise InputError("llama.cpp has YaRN with ⌊ ⌋ and ⌈ ⌉ only, not truncate=false")
    return str(rope.get("rope_type", "default"))


def _beside_own(rope: Mapping[str, Any]) -> float:
    """The factor beside the 1 + 0.1·ln s that llama.cpp multiplies with by itself."""
    return float(rope["attention_factor"]) / (1 + 0.1 * math.log(rope["factor"]))


def _number(value: float) -> str:
    return re.sub(r"\.0$", "", f"{value:.10g}")

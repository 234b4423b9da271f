"""GGUF files: read their values, copy them with other values, refuse what is not read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import open_file, write_with

_SAME = {"mistral": "llama", "mixtral": "llama"}
"""What the converter of llama.cpp writes as another architecture."""
_FACTORS = ("rope_freqs.", "rope_factors_")
"""How tensors begin that divide frequencies: those of Llama 3.1 and of LongRoPE."""


def architecture_of(model_type: str) -> str | None:
    """What a GGUF of a family of transformers calls its architecture; None if it is not known."""
    from gguf.constants import MODEL_ARCH_NAMES

    name = model_type.removesuffix("_text")
    names = (_SAME.get(name, name), name.replace("_", "-"), name.replace("_", ""))
    known = set(MODEL_ARCH_NAMES.values())
    return next((candidate for candidate in names if candidate in known), None)


def read_divisors(path: Path) -> Any:
    """The numbers that divide the frequencies (`rope_freqs.weight`), or None.

    Raises `InputError` for a file whose numbers are LongRoPE's, which differ with the length.
    """
    from gguf import GGUFReader

    for tensor in GGUFReader(str(path)).tensors:
        if str(tensor.name).startswith("rope_factors_"):
            raise InputError(f"{path} holds {tensor.name}: LongRoPE of a GGUF is not compared here")
        if str(tensor.name).startswith("rope_freqs."):
            return tensor.data
    return None


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

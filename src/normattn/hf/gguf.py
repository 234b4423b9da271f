"""GGUF files: read their values, copy them with other values, refuse what is not read."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.io import open_file, write_with

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

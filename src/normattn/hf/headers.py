"""What a model's files say they hold, read from their headers: no weight is touched for it.

Every number that a configuration asks memory for is compared with this before anything is made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from normattn.errors import InputError
from normattn.files import open_file
from normattn.structured import read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_GGUF = b"GGUF"
# Up to which layer something holds: nothing is made for it.
_NO_COUNT = {"max_window_layers"}
# The least that a tensor's and a value's description take in a GGUF file.
_TENSOR_BYTES, _VALUE_BYTES = 24, 13


@dataclass(frozen=True)
class Tensor:
    """One stored tensor: whether its numbers are floating, and its shape."""

    floating: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """The tensors of a model by name; `file` is what messages name. `packed`: a GGUF's names."""

    file: Path
    tensors: Mapping[str, Tensor]
    packed: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers all tensors hold together."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())


def read_header(folder: Path, gguf: str | None = None) -> Header:
    """The header of the safetensors in a folder, of its shards, or of its GGUF file.

    Raises `InputError` for a file that is missing, cut, empty, no safetensors or GGUF, for pickled
    weights, and for an index that points outside the folder.
    """
    for entry in sorted(folder.iterdir()):
        # What transformers would open must not be a pipe or a device, whose reading never ends.
        if not entry.is_dir():
            with open_file(entry):
                pass
    if gguf is not None:
        return _read_gguf(folder / gguf)
    whole, index = folder / WEIGHTS, folder / INDEX
    if whole.exists():
        return Header(whole, dict(_tensors(whole)))
    if index.exists():
        return _read_shards(folder, index)
    pickled = sorted(path.name for path in folder.glob("*.bin")) or sorted(
        path.name for path in folder.glob("*.pt*")
    )
    if pickled:
        raise InputError(
            f"{folder / pickled[0]} holds pickled weights, which can run code when they are read: "
            f"save the model as safetensors ({WEIGHTS})"
        )
    raise InputError(f"{folder} holds no weights: expected {WEIGHTS} or {INDEX}")


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with open_file(path) as file:
        start = file.read(2)
    try:
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dictionary
                part = opened.get_slice(name)
                kind = str(part.get_dtype())
                floating = kind[0] == "F" or kind.startswith("BF")
                yield name, Tensor(floating, tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        pickled = start in (b"\x80\x02", b"PK", b"\x80\x04", b"\x80\x05")
        kind = "it is a pickle" if pickled else str(error)
        raise InputError(f"{path} is no whole safetensors file: {kind}") from error


def _read_shards(folder: Path, index: Path) -> Header:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{index} is damaged: it has no weight_map of tensors and their files")
    for name in places.values():
        # Following it would read any file of this machine as part of the model.
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise InputError(f"{index} points outside its folder: {str(name)[:200]!r}")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise InputError(f"{index} names the file {name}, which is not there")
        tensors.update(_tensors(folder / name))
    lacking = next((name for name in places if name not in tensors), None)
    if lacking is not None:
        raise InputError(f"{index} places {lacking[:200]} in {places[lacking]}, which lacks it")
    return Header(index, tensors)


def _read_gguf(path: Path) -> Header:
    """The tensors of a GGUF file; its counts are compared with its size before they are believed"""
    with open_file(path) as file:
        start = file.read(24)
        size = file.seek(0, 2)
    if start[:4] != _GGUF:
        raise InputError(f"{path} is not a GGUF file: it does not begin with {_GGUF.decode()}")
    if len(start) < 24:
        raise InputError(f"{path} is cut: it ends within its header")
    version, tensors, values = struct.unpack("<IQQ", start[4:])
    if version & 0xFFFF == 0:
        raise InputError(f"{path} is a GGUF file of another byte order than this machine's")
    if tensors * _TENSOR_BYTES + values * _VALUE_BYTES > size:
        raise InputError(
            f"{path} is damaged: its header counts {tensors:,} tensors and {values:,} values, more "
            f"than its {size:,} bytes can hold"
        )
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        by_name = {
            str(tensor.name): Tensor(True, tuple(int(n) for n in tensor.shape))
            for tensor in reader.tensors
        }
        blocks = {name: field.contents() for name, field in reader.fields.items() if _counts(name)}
    except Exception as error:  # the reader fails as its arrays do, in many ways
        raise InputError(f"{path} is cut or damaged: {type(error).__name__}: {error}") from error
    header = Header(path, by_name, packed=True)
    refuse_layers(blocks, header, path)
    return header


def _counts(name: str) -> bool:
    return name.endswith(".block_count")


def refuse_layers(values: Mapping[str, Any], header: Header, source: Path) -> None:
    """Raise `InputError` for a number of layers larger than that of the tensors there are.

    Whatever else is made for each layer is made without end otherwise. `values` may be nested.
    """
    level: list[Mapping[str, Any]] = [values]
    while level:
        for name, value in level.pop().items():
            if isinstance(value, Mapping):
                level.append(value)
            counts = ("layer" in name and name not in _NO_COUNT) or _counts(name)
            if counts and type(value) is int and value > max(len(header.tensors), 1):
                raise InputError(
                    f"{source}: {name} is {value:,}, but {header.file.name} holds "
                    f"{len(header.tensors):,} tensors in all"
                )

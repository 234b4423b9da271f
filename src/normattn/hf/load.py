"""A causal language model and its tokeniser from a folder, a GGUF file or a name on the hub.

Nothing is made, and no memory taken, for a model on this machine whose configuration asks for more
numbers than its files hold. No code of a model is run, and no pickle is read.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version as _version
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from normattn.errors import InputError, NormattnError
from normattn.hf.gguf import refuse_scaled
from normattn.io import expanded, open_file, read_object
from normattn.models.utils import on_meta

_WHERE = ("revision", "cache_dir", "token", "local_files_only", "subfolder")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_TENSOR_BYTES, _VALUE_BYTES = 24, 13
"""The least that the description of a tensor and of a value take in a GGUF file."""
_LAYER = re.compile(r"\.(\d+)\.")


def read_tokeniser(model: str | Path, gguf: str | None = None) -> Any:
    """The tokeniser alone, of what `load_model` takes. Raises `InputError` as that does."""
    source, gguf = _source(model, gguf)
    with _explained(gguf or source):
        from transformers import AutoTokenizer

        tokeniser = AutoTokenizer.from_pretrained(source, **_options(source, gguf))
    longest = tokeniser.model_max_length
    if not isinstance(longest, int | float) or isinstance(longest, bool):
        raise InputError(
            f"the tokeniser of {gguf or source}: model_max_length must be a number, not {longest!r}"
        )
    return tokeniser


def load_model(model: str | Path, gguf: str | None = None, **options: Any) -> Any:
    """The model alone; `options` are those of transformers' `from_pretrained`."""
    try:
        import transformers
    except ImportError:
        raise InputError("loading a model needs transformers: pip install normattn[hf]") from None
    auto: Any = transformers.AutoModelForCausalLM
    source, gguf = _source(model, gguf)
    given = {**_options(source, gguf), **options}
    if gguf is not None:
        given |= _unpacked()
    else:
        given["use_safetensors"] = True
    refuse_sizes(source, gguf)
    if gguf is not None and not Path(source).is_dir():
        _refuse_scaled_there(source, gguf, options)
    with _explained(gguf or source), _without_report():
        made, info = auto.from_pretrained(source, output_loading_info=True, **given)
    _refuse_differences(made, info, gguf or source)
    return made.eval()


@contextmanager
def _without_report() -> Iterator[None]:
    """Without the report that transformers prints of names in a file, escapes of theirs included.

    `_refuse_differences` says what matters of it.
    """
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _source(model: str | Path, gguf: str | None) -> tuple[str, str | None]:
    """The folder or name on the hub, and the GGUF file in it, if any."""
    path = expanded(model)
    if path.is_file():
        if gguf is not None:
            raise InputError(f"{path} is a file already, so gguf={gguf!r} has no meaning")
        path, gguf = path.parent, path.name
    elif path.suffix == ".gguf":
        raise InputError(f"there is no file {path}")
    elif path.exists() and not path.is_dir():
        raise InputError(f"{path} is neither a file nor a folder")
    if gguf is not None:
        _refuse_gguf(path, gguf)
    elif path.is_dir() and not (path / "config.json").exists():
        held = ", ".join(sorted(file.name for file in path.glob("*.gguf"))) or "no GGUF file either"
        raise InputError(f"{path} holds no config.json of transformers, and {held}")
    elif path.is_dir():
        refuse_kind(path / "config.json")
    elif path.is_absolute() or str(model).count("/") > 1:
        raise InputError(f"{model} does not exist, and is no name on the hub (OWNER/NAME)")
    return (str(path) if path.is_dir() else str(model)), gguf


def _options(source: str, gguf: str | None) -> dict[str, Any]:
    """No code of the model's own is run, nobody is asked, and a folder needs no network."""
    options: dict[str, Any] = {
        "trust_remote_code": False,
        "local_files_only": Path(source).is_dir(),
    }
    return options if gguf is None else {**options, "gguf_file": gguf}


def refuse_kind(file: Path) -> None:
    """Refuse a configuration of a kind that transformers has not."""
    from transformers import CONFIG_MAPPING

    kind = read_object(file).get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise InputError(
            f"{file}: model_type is {kind!r}, which is not known to transformers "
            f"{_version('transformers')}"
        )


@contextmanager
def _explained(subject: str) -> Iterator[None]:
    """Whatever transformers raises, the user gets a sentence."""
    try:
        yield
    except NormattnError:
        raise
    except Exception as error:
        whole = " ".join(str(error).split())
        sentence = re.split(r"(?<=[^.][.])\s+(?=[A-Z])", whole)[0][:300]
        if isinstance(error, KeyError) and " " not in sentence:
            sentence = f"it names {sentence}, which is not known there"
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(f"{subject} cannot be loaded by transformers: {kind}{sentence}") from error


def refuse_sizes(source: str, gguf: str | None, config: Any = None) -> None:
    """Refuse a local model whose configuration asks for more numbers than its files hold.

    Nothing is made for it, and no weight is read. `config` is its configuration where that has been
    read already.
    """
    import transformers

    folder = Path(source)
    if not folder.is_dir():
        return
    _refuse_unreadable(folder)
    if gguf is not None:
        tensors, numbers, named = _held_by_gguf(folder / gguf)
        refuse_scaled(folder / gguf)
    else:
        tensors, numbers = _held_by_safetensors(folder)
        named = read_object(folder / "config.json")
    for name, value in _layer_counts(named):
        if value > max(tensors, 1):
            raise InputError(
                f"{folder / (gguf or 'config.json')}: {name} is {value:,}, but the weights are "
                f"{tensors:,} tensors in all"
            )
    # On torch's meta device nothing takes memory, not even what a configuration checks itself by.
    with _explained(gguf or source), on_meta():
        if config is None:
            config = transformers.AutoConfig.from_pretrained(source, **_options(source, gguf))
        auto: Any = transformers.AutoModelForCausalLM
        shell = auto.from_config(config, trust_remote_code=False)
        shell.tie_weights()
    wanted = sum(parameter.numel() for parameter in shell.parameters())
    if wanted > numbers and not hasattr(config, "quantization_config"):
        raise InputError(
            f"the files of {gguf or source} hold {numbers:,} numbers, but its configuration "
            f"describes a model of {wanted:,}"
        )


def _refuse_unreadable(folder: Path) -> None:
    """Refuse a pipe or a device among what transformers would open: reading it never ends."""
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir():
            with open_file(entry):
                pass


def _layer_counts(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every number of layers in a configuration, which may be nested, or in a GGUF header."""
    for name, value in values.items():
        counts = name.endswith(".block_count") or ("layer" in name and name != "max_window_layers")
        if isinstance(value, Mapping):
            yield from _layer_counts(value)
        elif counts and type(value) is int:
            yield name, value


def _held_by_safetensors(folder: Path) -> tuple[int, int]:
    """How many tensors the safetensors of a folder hold, and how many floating numbers."""
    files, index = [folder / WEIGHTS], folder / INDEX
    if not files[0].exists() and index.exists():
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise InputError(f"{index} is damaged: it has no weight_map of tensors and their files")
        for name in places.values():
            # Following it would read any file of this machine as part of the model.
            if not isinstance(name, str) or Path(name).name != name or "\\" in name:
                raise InputError(f"{index} points outside its folder: {str(name)[:200]!r}")
        files = [folder / name for name in sorted(set(places.values()))]
    tensors = numbers = 0
    for file in files:
        if not file.is_file():
            raise InputError(
                f"{file} is not there: a model is read from safetensors, {WEIGHTS} or {INDEX}, and "
                "never from pickled weights, which can run code"
            )
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a dictionary
                    part = opened.get_slice(name)
                    tensors += 1
                    floating = str(part.get_dtype()).startswith(("F", "BF"))
                    numbers += prod(part.get_shape()) if floating else 0
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is no whole safetensors file: {error}") from error
    return tensors, numbers


def _held_by_gguf(path: Path) -> tuple[int, int, dict[str, Any]]:
    """How many tensors and numbers a GGUF file holds, and how many blocks its header says.

    Its counts are compared with its size before they are believed.
    """
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
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        shapes = [tuple(int(n) for n in tensor.shape) for tensor in reader.tensors]
        named = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name.endswith(".block_count")
        }
    except Exception as error:  # the reader fails as its arrays do, in many ways
        raise InputError(f"{path} is cut or damaged: {type(error).__name__}: {error}") from error
    return len(shapes), sum(map(prod, shapes)), named


def _refuse_scaled_there(source: str, gguf: str, options: Mapping[str, Any]) -> None:
    """`refuse_scaled` for a file on the hub, which loading it needs on this machine anyway."""
    from transformers.utils import hub

    where = {name: options[name] for name in _WHERE if name in options}
    with _explained(gguf):
        file = hub.cached_file(source, gguf, **where)
    refuse_scaled(Path(str(file)))


def _refuse_differences(model: Any, info: Any, source: str) -> None:
    """Refuse weights that were drawn at random for want of stored ones, and layers left out.

    And frequencies that are no numbers, which a base of 0 gives without a word.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not bool(torch.isfinite(buffer).all()):
            raise InputError(f"the configuration in {source} gives rotary frequencies without end")
    lacking = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
    if lacking:
        raise InputError(
            f"the weights in {source} are not those of its configuration: {lacking[0]} is missing "
            "or has another shape"
        )
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for name in sorted(map(str, info["unexpected_keys"])):
        number = _LAYER.search(name)
        if number is not None and isinstance(layers, int) and int(number[1]) >= layers:
            raise InputError(
                f"the weights in {source} are not those of its configuration: they hold {name}, "
                f"but num_hidden_layers is {layers}"
            )


def _unpacked() -> dict[str, Any]:
    """How transformers is told to widen a GGUF's weights; where it cannot be told, it always does.

    Packed ones compute by kernels and attention of their own, and cannot be saved.
    """
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _refuse_gguf(folder: Path, name: str) -> None:
    """Refuse what is missing, and a name that leads out of the folder."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"a GGUF file needs the package {package}: pip install normattn[hf]")
    if folder.is_dir() and not (folder / name).is_file():
        raise InputError(f"there is no file {folder / name}")

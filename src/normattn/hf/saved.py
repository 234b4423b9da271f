"""A saved model: as it was trained, or with the extension that its configuration tells of."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

import torch

from normattn.errors import InputError
from normattn.hf.extend import extend
from normattn.hf.load import WHERE, load_model, options_of, read_tokeniser, source_of
from normattn.hf.model_parts import explained
from normattn.hf.native import ADAPTER_FILE, FIELD, check_record, take_record
from normattn.io import read_object

_ADAPTER = "adapter_config.json"


def from_pretrained(path: str, **options: Any) -> Any:
    """A causal language model of transformers, extended as it was when it was saved.

    `model.save_pretrained(path)` of an extended model writes the method into config.json (the field
    `normattn`). A method that transformers has words for (PI, YaRN; NTK and ABF as another base)
    it writes in those too, so that plain `from_pretrained` and other engines apply it; any other
    they ignore, and load the model as trained. A PEFT model's method stands beside the adapter.

    Args:
        path: a folder, or a name on the hub.
        options: those of `AutoModelForCausalLM.from_pretrained`.

    `normattn.hf.extension_of(model).remove()` gives the model as trained. Raises `InputError` where
    the configuration tells of no extension, and as `normattn.hf.load` does.
    """
    record: dict[str, Any] | None
    if is_adapter(path):
        record = read_adapter_record(path)
        model = _with_adapter(path, options)
    else:
        model, record = as_trained(path, **options)
    if record is None:
        raise InputError(
            f"the configuration of {path} tells of no extension (no field {FIELD!r} with a method "
            "and a train_length): load it by transformers, and extend it"
        )
    extend(model, record["method"], train_length=record["train_length"])
    return model


def load(
    model: str | Path,
    gguf: str | None = None,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    device_map: Any = None,
) -> tuple[Any, Any]:
    """(model, tokeniser) of transformers, the model as it was trained and in evaluation mode.

    Also where the model was saved under a method, which `from_pretrained` switches on.

    Args:
        model: a folder, a GGUF file, or a name on the hub.
        gguf: the GGUF file of a folder or of a name on the hub.
        dtype: the type of the weights; "auto" is the one in which they were saved.
        device_map: where the weights lie, as transformers takes it, e.g. "auto".

    Raises `InputError` for a folder without a model, a file that is no GGUF, a GGUF of an
    architecture that transformers cannot read, files that are damaged or hold something else than
    the configuration says, and packages that are missing.
    """
    options: dict[str, Any] = {"dtype": dtype}
    if device_map is not None:
        if importlib.util.find_spec("accelerate") is None:
            raise InputError("device_map needs the package accelerate: pip install normattn[hf]")
        options["device_map"] = device_map
    made, _ = as_trained(model, gguf, **options)
    return made, read_tokeniser(model, gguf)


def as_trained(
    path: str | Path, gguf: str | None = None, **options: Any
) -> tuple[Any, dict[str, Any] | None]:
    """A model of transformers without the method that it was saved under, and what tells of that.

    See `record_of`. Also where transformers' own words tell of the method, and plain
    `from_pretrained` would apply it. `options` are those of transformers' `from_pretrained`.
    """
    from transformers import AutoConfig

    source, file = source_of(path, gguf)
    if file is not None:  # whose keys hold no such record
        return load_model(path, gguf, **options), None
    where = {name: options[name] for name in WHERE if name in options}
    with explained(source):
        config = AutoConfig.from_pretrained(source, **{**options_of(source, None), **where})
    record = take_record(config, path)
    if record is not None:
        options["config"] = config
    return load_model(path, gguf, **options), record


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (Path(path).expanduser() / _ADAPTER).is_file()


def read_adapter_record(path: str | Path) -> dict[str, Any]:
    """The method and train_length that were saved beside an adapter; `InputError` where none is."""
    file = Path(path).expanduser() / ADAPTER_FILE
    if not file.is_file():
        raise InputError(
            f"{file.parent} holds an adapter without a method (no {ADAPTER_FILE}): load it by "
            "PEFT, and extend it"
        )
    record = read_object(file)
    check_record(record, str(file))
    return record


def _with_adapter(path: str, options: dict[str, Any]) -> Any:
    """The model that an adapter was trained on, with the adapter."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{path} holds an adapter, which needs PEFT: pip install peft")
    from peft import PeftModel

    folder = Path(path).expanduser()
    name = read_object(folder / _ADAPTER).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{folder / _ADAPTER} names no base_model_name_or_path")
    return PeftModel.from_pretrained(as_trained(name, **options)[0], str(folder)).eval()

"""PEFT adapters of an extended model: the method is saved beside the adapter, or saving is refused.

An adapter's folder holds neither the model nor its configuration, so it says nothing of a method
that the adapter was trained under.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from normattn.errors import InputError
from normattn.io import read_object, write_json

ADAPTER, FILE = "adapter_config.json", "normattn.json"


def save_with_adapter(adapted: Any, record: Mapping[str, Any]) -> Callable[[], object]:
    """Let a PEFT model's `save_pretrained` write the method too; returns what undoes it."""
    own = adapted.save_pretrained

    def save_pretrained(save_directory: Any, *given: Any, **more: Any) -> Any:
        made = own(save_directory, *given, **more)
        write_json(Path(save_directory) / FILE, dict(record))
        return made

    adapted.__dict__["save_pretrained"] = save_pretrained
    return lambda: adapted.__dict__.pop("save_pretrained", None)


def refuse_lost_method(model: nn.Module, method: str) -> Any:
    """A hook that raises `InputError` when an adapter of this model is about to be saved alone.

    PEFT reads the state of the model that it saves. Here it was put on a model that is extended, so
    that its `save_pretrained` knows of no method.
    """

    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if any(_is_adapter(part) for part in module.modules()):
            raise InputError(
                f"the adapter of this model would be saved without the method {method} that it was "
                "trained under: extend the PEFT model itself, normattn.extend(get_peft_model(...), "
                "...), whose save_pretrained writes the method, or remove() the extension first"
            )

    return model.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]


def _is_adapter(module: nn.Module) -> bool:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (Path(path).expanduser() / ADAPTER).is_file()


def read_adapter_record(path: str | Path) -> dict[str, Any]:
    """The method and train_length that were saved beside an adapter; `InputError` where none is."""
    file = Path(path).expanduser() / FILE
    if not file.is_file():
        raise InputError(
            f"{file.parent} holds an adapter without a method (no {FILE}): load it by PEFT, and "
            "extend it"
        )
    record = read_object(file)
    if type(record.get("method")) is not str or type(record.get("train_length")) is not int:
        raise InputError(f"{file} must hold a method, a name, and a train_length, a whole number")
    return record


def adapted_model(base: Any, path: str | Path) -> Any:
    """The base model with the adapter of a folder."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, str(Path(path).expanduser())).eval()


def base_of(path: str | Path) -> str:
    """The folder or name of the model that an adapter was trained on."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{path} holds an adapter, which needs PEFT: pip install peft")
    name = read_object(Path(path).expanduser() / ADAPTER).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{Path(path) / ADAPTER} names no base_model_name_or_path")
    return name

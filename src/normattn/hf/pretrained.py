"""`from_pretrained`: a saved model with the extension that its configuration tells of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.hf.extension import FIELD, TRAINED, extend
from normattn.hf.loading import load_model
from normattn.hf.native import put_fields


def from_pretrained(path: str, **options: Any) -> Any:
    """A causal language model of transformers, extended as it was when it was saved.

    `model.save_pretrained(path)` of an extended model writes the method into config.json (the field
    `normattn`). A method that transformers has words for (PI, YaRN; NTK and ABF as another base)
    it writes in those too, so that plain `from_pretrained` and other engines apply it; any other
    they ignore, and load the model as trained.

    Args:
        path: a folder, or a name on the hub.
        options: those of `AutoModelForCausalLM.from_pretrained`.

    `normattn.hf.extension_of(model).remove()` gives the model as trained. Raises `InputError` where
    the configuration tells of no extension, and as `normattn.hf.load` does.
    """
    model, record = as_trained(path, **options)
    if record is None:
        raise InputError(
            f"the configuration of {path} tells of no extension (no field {FIELD!r} with a method "
            "and a train_length): load it by transformers, and extend it"
        )
    extend(model, record["method"], train_length=record["train_length"])
    return model


def as_trained(path: str, **options: Any) -> tuple[Any, dict[str, Any] | None]:
    """A model of transformers without the method that it was saved under, and what tells of that.

    See `record_of`. Also where transformers' own words tell of the method, and plain
    `from_pretrained` would apply it.
    """
    from transformers import AutoConfig

    model = load_model(path, **options)
    record = record_of(model.config, path)
    if record is None:
        return model, None
    if TRAINED in record:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        put_fields(config.get_text_config(), record[TRAINED])
        model = load_model(path, **{**options, "config": config})
    delattr(model.config, FIELD)
    return model, record


def record_of(config: Any, path: str | Path) -> dict[str, Any] | None:
    """The method that a configuration says its model was saved under; None where it says none.

    Keys: method, train_length, and `trained`, the fields as they were, where the configuration
    holds others. Raises `InputError` for a record that lacks something or has other types.
    """
    record = getattr(config, FIELD, None)
    if record is None:
        return None
    types = {"method": str, "train_length": int, TRAINED: dict}
    if (
        not isinstance(record, dict)
        or set(record) | {TRAINED} != set(types)
        or any(type(value) is not types[name] for name, value in record.items())
    ):
        raise InputError(
            f"the configuration of {path}: the field {FIELD!r} must hold a method, a name, and a "
            f"train_length, a whole number; {TRAINED!r} beside them holds fields"
        )
    return record

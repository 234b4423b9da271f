"""What a saved configuration tells of the method that its model was saved under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.hf.native import put_fields

FIELD, TRAINED = "normattn", "trained"


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


def take_record(config: Any, path: str | Path) -> dict[str, Any] | None:
    """Make a configuration that of the model as it was trained; what told of the method, or None.

    Raises as `record_of` does.
    """
    record = record_of(config, path)
    if record is not None:
        put_fields(config.get_text_config(), record.get(TRAINED, {}))
        delattr(config, FIELD)
    return record


def refuse_applied(config: Any) -> None:
    """Raise `InputError` where transformers has applied the method that a model was saved under.

    Its configuration then says longer texts and other frequencies than those of the training.
    """
    record = record_of(config, getattr(config, "name_or_path", "") or "this model")
    if record is not None and TRAINED in record:
        raise InputError(
            f"this model was saved under {record['method']}, and transformers has applied that: "
            "load it by normattn.from_pretrained, and remove() the extension first"
        )

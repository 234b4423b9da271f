"""`from_pretrained`: a saved model with the extension that its configuration tells of."""

from __future__ import annotations

from typing import Any

from normattn.errors import InputError
from normattn.hf.extension import FIELD, extend


def from_pretrained(path: str, **options: Any) -> Any:
    """A causal language model of transformers, extended as it was when it was saved.

    `model.save_pretrained(path)` of an extended model writes the method into config.json (the field
    `normattn`); transformers' own `from_pretrained` ignores it and loads the model as trained.

    Args:
        path: a folder, or a name on the hub.
        options: those of `AutoModelForCausalLM.from_pretrained`.

    `normattn.hf.extension_of(model).remove()` gives the model as trained. Raises `InputError` where
    the configuration tells of no extension.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise InputError("loading a model needs transformers: pip install normattn[hf]") from None
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    record = getattr(model.config, FIELD, None)
    if not isinstance(record, dict) or set(record) != {"method", "train_length"}:
        raise InputError(
            f"the configuration of {path} tells of no extension (no field {FIELD!r} with a method "
            "and a train_length): load it by transformers, and extend it"
        )
    delattr(model.config, FIELD)
    extend(model, record["method"], train_length=record["train_length"])
    return model

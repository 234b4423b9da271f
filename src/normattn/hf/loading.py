"""A causal language model and its tokeniser from a folder, a GGUF file or a name on the hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from normattn.errors import InputError

_GGUF = b"GGUF"


def load(
    model: str | Path, gguf: str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """(model, tokeniser) of transformers, the model in evaluation mode.

    Args:
        model: a folder, a GGUF file, or a name on the hub.
        gguf: the GGUF file of a folder or of a name on the hub.
        dtype: the type of the weights.

    Raises `InputError` for a folder without a model, a file that is no GGUF, a GGUF of an
    architecture that transformers cannot read, and packages that are missing.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise InputError("loading a model needs transformers: pip install normattn[hf]") from None
    place = Path(model)
    if place.is_file():
        if gguf is not None:
            raise InputError(f"{place} is a file already, so gguf={gguf!r} has no meaning")
        model, gguf = place.parent, place.name
    elif place.suffix == ".gguf":
        raise InputError(f"there is no file {place}")
    options: dict[str, Any] = {}
    unpacked: dict[str, Any] = {}
    if gguf is not None:
        _refuse_gguf(Path(model), gguf)
        options["gguf_file"] = gguf
        unpacked = _unpacked()
    elif place.is_dir() and not (place / "config.json").exists():
        held = (
            ", ".join(sorted(each.name for each in place.glob("*.gguf"))) or "no GGUF file either"
        )
        raise InputError(f"{place} holds no config.json of transformers, and {held}")
    try:
        tokeniser = AutoTokenizer.from_pretrained(str(model), **options)
        made: Any = AutoModelForCausalLM.from_pretrained(
            str(model), dtype=dtype, **options, **unpacked
        )
    except (OSError, ValueError, NotImplementedError) as error:
        sentence = " ".join(str(error).split())[:300]
        raise InputError(f"{gguf or model} cannot be loaded by transformers: {sentence}") from error
    return made.eval(), tokeniser


def _unpacked() -> dict[str, Any]:
    """How transformers is told to widen a GGUF's weights; where it cannot be told, it always does.

    Packed ones compute by kernels and attention of their own, and cannot be saved.
    """
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _refuse_gguf(folder: Path, name: str) -> None:
    """Refuse what is missing, and a local file that is of another kind."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"a GGUF file needs the package {package}: pip install normattn[hf]")
    if not folder.is_dir():
        return
    file = folder / name
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    with file.open("rb") as opened:
        if opened.read(len(_GGUF)) != _GGUF:
            raise InputError(f"{file} is not a GGUF file: it does not begin with {_GGUF.decode()}")

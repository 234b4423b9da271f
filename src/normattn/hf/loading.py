"""A causal language model and its tokeniser from a folder, a GGUF file or a name on the hub.

What is on this machine is compared with its own headers first: nothing is made, and no memory
taken, for a model whose files do not hold what its configuration asks for.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version as _version
from pathlib import Path
from typing import Any

import torch

from normattn.errors import InputError, NormattnError
from normattn.files import expanded
from normattn.hf.gguf_values import refuse_scaled
from normattn.hf.headers import Header, read_header, refuse_layers
from normattn.models.utils import on_meta
from normattn.structured import read_object

_WHERE = ("revision", "cache_dir", "token", "local_files_only", "subfolder")
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
    compare(source, gguf)
    if gguf is not None and not Path(source).is_dir():
        _refuse_scaled_there(source, gguf, options)
    with _explained(gguf or source):
        made, info = auto.from_pretrained(source, output_loading_info=True, **given)
    _refuse_differences(made, info, gguf or source)
    return made.eval()


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


def compare(source: str, gguf: str | None, config: Any = None) -> None:
    """Refuse a local model that asks for more, or for something else, than its files hold.

    `config` is its configuration where that has been read already.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    folder = Path(source)
    if not folder.is_dir():
        return
    header = read_header(folder, gguf)
    if gguf is not None:
        refuse_scaled(folder / gguf)
    else:
        refuse_layers(read_object(folder / "config.json"), header, folder / "config.json")
    # On torch's meta device nothing takes memory, not even what a configuration checks itself by.
    with _explained(gguf or source), on_meta():
        if config is None:
            config = transformers.AutoConfig.from_pretrained(source, **_options(source, gguf))
        shell = auto.from_config(config, trust_remote_code=False)
        shell.tie_weights()
    _refuse_sizes(shell, header, quantised=hasattr(config, "quantization_config"))


def _refuse_scaled_there(source: str, gguf: str, options: Mapping[str, Any]) -> None:
    """`refuse_scaled` for a file on the hub, which loading it needs on this machine anyway."""
    from transformers.utils import hub

    where = {name: options[name] for name in _WHERE if name in options}
    with _explained(gguf):
        file = hub.cached_file(source, gguf, **where)
    refuse_scaled(Path(str(file)))


def _refuse_sizes(shell: Any, header: Header, quantised: bool) -> None:
    """Compare the model that the configuration describes with the tensors that there are."""
    if quantised:
        # Several numbers are packed into one: transformers' own reading must judge them.
        return
    for name, wanted in shell.state_dict().items():
        stored = header.tensors.get(name)
        if stored is None:
            continue
        if stored.shape != tuple(wanted.shape):
            raise InputError(
                f"{header.file}: {name} is {stored.shape}, but its configuration asks for "
                f"{tuple(wanted.shape)}"
            )
        if wanted.is_floating_point() and not stored.floating:
            raise InputError(f"{header.file}: {name} holds whole numbers, which are no weights")
    _refuse_more_layers(shell, header)
    wanted_numbers = sum(parameter.numel() for parameter in shell.parameters())
    if wanted_numbers > header.numbers:
        raise InputError(
            f"{header.file} holds {header.numbers:,} numbers, but its configuration describes a "
            f"model of {wanted_numbers:,}"
        )


def _refuse_more_layers(shell: Any, header: Header) -> None:
    """Refuse tensors of layers behind the last one that the configuration describes.

    Layers that transformers leaves out by design (those that predict further tokens) may be there.
    """
    ignored = [re.compile(pattern) for pattern in shell._keys_to_ignore_on_load_unexpected or ()]
    last: dict[str, int] = {}
    for name in shell.state_dict():
        if (match := _LAYER.search(name)) is not None:
            before = name[: match.start()]
            last[before] = max(last.get(before, 0), int(match[1]))
    for name in sorted(header.tensors):
        match = _LAYER.search(name)
        most = None if match is None else last.get(name[: match.start()])
        if match is None or most is None or int(match[1]) <= most:
            continue
        if not any(pattern.search(name) for pattern in ignored):
            layers = f"{most + 1} layer{'s' * (most > 0)}"
            raise InputError(
                f"{header.file} holds {name}, but its configuration describes {layers}"
            )


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

"""Load a causal language model and its tokeniser from a folder, a GGUF file or a name on the hub.

A model's own code is never run, and no pickle is read.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from normattn.errors import InputError
from normattn.hf.extend import extend
from normattn.hf.llama_cpp import refuse_scaled
from normattn.hf.model_parts import explained
from normattn.hf.native import ADAPTER_FILE, FIELD, check_record, take_record
from normattn.io import expand_path, read_object
from normattn.models.utils import on_meta

_HUB_OPTIONS = ("revision", "cache_dir", "token", "local_files_only", "subfolder")
_ADAPTER_CONFIG = "adapter_config.json"


def load(
    model: str | Path,
    gguf: str | None = None,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    **options: Any,
) -> tuple[Any, Any]:
    """(model, tokeniser) of transformers, the model unmodified and in evaluation mode.

    A method that the model was saved with is not applied; `from_pretrained` applies it.

    Args:
        model: a folder, a GGUF file, or a name on the hub.
        gguf: the GGUF file in a folder or in a repository of the hub.
        dtype: the dtype of the weights; "auto" is the saved one.
        options: others of transformers' `from_pretrained`, e.g. device_map="auto".

    Raises `InputError` for a folder without a model, a file that is no GGUF, a GGUF of an
    architecture that transformers cannot read, files that are damaged or do not match the
    configuration, and missing packages.
    """
    model, options = _local_subfolder(model, options)
    loaded, _ = load_unmodified(model, gguf, dtype=dtype, **options)
    hub_options = {name: options[name] for name in options.keys() & {*_HUB_OPTIONS}}
    return loaded, read_tokeniser(model, gguf, **hub_options)


def from_pretrained(path: str | Path, **options: Any) -> Any:
    """A model of transformers, extended by the method that it was saved with.

    `model.save_pretrained(path)` of an extended model writes the method into config.json (the field
    `normattn`). If transformers has the method (PI, YaRN, Llama3; NTK and ABF as another base), it
    is also written in its format, so that plain `from_pretrained` and other engines apply it.
    They ignore any other method and load the unmodified model. A PEFT model's method is saved next
    to the adapter.

    Args:
        path: a folder, or a name on the hub.
        options: those of transformers' `from_pretrained`.

    The class is the one that was saved, e.g. a classifier. `extension_of(model).remove()` gives the
    model as trained. Raises `InputError` where the configuration names no extension, and as
    `normattn.hf.load` does.
    """
    path, options = _local_subfolder(path, options)
    record: dict[str, Any] | None
    if is_adapter(path):
        record = read_adapter_record(path)
        if importlib.util.find_spec("peft") is None:
            raise InputError(f"{path} holds an adapter, which needs PEFT: pip install peft")
        from peft import PeftModel

        folder = Path(path).expanduser()
        adapter = read_object(folder / _ADAPTER_CONFIG)
        if (task := adapter.get("task_type")) not in (None, "CAUSAL_LM"):
            raise InputError(
                f"{path} holds an adapter for {task}, but only CAUSAL_LM is loaded: load it with "
                f"PEFT and extend it by {record['method']}"
            )
        base = str(adapter.get("base_model_name_or_path"))
        model = PeftModel.from_pretrained(load_unmodified(base, **options)[0], str(folder)).eval()
    else:
        model, record = load_unmodified(path, as_saved=True, **options)
    if record is None:
        raise InputError(
            f"the configuration of {path} names no extension (no field {FIELD!r} with a method "
            "and a train_length): load it with transformers and extend it"
        )
    extend(model, record["method"], train_length=record["train_length"])
    return model


def _local_subfolder(path: str | Path, options: dict[str, Any]) -> tuple[str | Path, Any]:
    """Both with `subfolder` moved to the path of a folder; that of a repository stays an option."""
    if not (options.get("subfolder") and expand_path(path).is_dir()):
        return path, options
    rest = {name: value for name, value in options.items() if name != "subfolder"}
    return expand_path(path).absolute() / options["subfolder"], rest


def load_unmodified(
    path: str | Path, gguf: str | None = None, as_saved: bool = False, **options: Any
) -> tuple[Any, dict[str, Any] | None]:
    """A model of transformers without its saved method, and the record of that method, if any.

    It is a causal language model, with `as_saved` one of the class that the configuration names.
    """
    source, gguf = source_of(path, gguf)
    options = {**_loading_options(source, gguf), **options}
    hub_options = {name: options[name] for name in _HUB_OPTIONS if name in options}
    config = read_configuration(source, gguf, **hub_options)
    import transformers

    record = take_record(config, path)
    if record is not None:
        options["config"] = config
    if gguf is None:
        options["use_safetensors"] = True
    elif hasattr(transformers, "GgufConfig"):
        # Packed weights need special kernels and attention, and cannot be saved.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    auto: Any = transformers.AutoModelForCausalLM
    if as_saved and config.architectures:
        named = getattr(transformers, str(config.architectures[0]), None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            auto = named
    if Path(source).is_dir():
        _refuse_larger(Path(source), gguf, config, auto)
    elif options["local_files_only"]:
        # transformers would ask the hub for an adapter next to the weights.
        options.setdefault("adapter_kwargs", {"local_files_only": True})
    verbosity = transformers.logging.get_verbosity()
    # transformers' report would print escape sequences in a file's names; `_check_loaded` reports.
    transformers.logging.set_verbosity(logging.ERROR)
    # Weights of another shape are left out, and `_check_loaded` reports them too.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with explained(gguf or source):
            loaded, info = auto.from_pretrained(source, **options)
    finally:
        transformers.logging.set_verbosity(verbosity)
    _check_loaded(loaded, info, gguf or source)
    return loaded.eval(), record


def read_tokeniser(model: str | Path, gguf: str | None = None, **hub_options: Any) -> Any:
    """The tokeniser of a model that `load` takes, or of a folder with only a tokeniser."""
    folder = expand_path(model)
    has_file = gguf is None and (folder / "tokenizer.json").is_file()
    source, gguf = (str(folder), None) if has_file else source_of(model, gguf)
    with explained(gguf or source):
        from transformers import AutoTokenizer

        options = {**_loading_options(source, gguf), **hub_options}
        return AutoTokenizer.from_pretrained(source, **options)


def read_configuration(model: str | Path, gguf: str | None = None, **hub_options: Any) -> Any:
    """The configuration of a folder, a GGUF file, a config.json or a name on the hub.

    Raises `InputError` where transformers cannot read it, and for a GGUF with scaled frequencies.
    """
    try:
        from transformers import AutoConfig, utils
    except ImportError:
        raise InputError("reading a model needs transformers: pip install normattn[hf]") from None
    path = expand_path(model)
    if path.is_file() and path.suffix == ".json":
        with explained(str(path)):
            return AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    source, gguf = source_of(model, gguf)
    options = {**_loading_options(source, gguf), **hub_options}
    with explained(gguf or source):
        if gguf is None:
            return AutoConfig.from_pretrained(source, **options)
        refuse_scaled(Path(str(utils.hub.cached_file(source, gguf, **hub_options))))
        with on_meta():  # the checks of an untrusted configuration take no memory there
            return AutoConfig.from_pretrained(source, **options)


def source_of(model: str | Path, gguf: str | None = None) -> tuple[str, str | None]:
    """A model's folder or name on the hub, and the GGUF file in it, if any."""
    path = expand_path(model)
    if path.is_file():
        if gguf is not None:
            raise InputError(f"{path} is a file already, so gguf={gguf!r} has no meaning")
        path, gguf = path.parent, path.name
    elif path.suffix == ".gguf":
        raise InputError(f"there is no file {path}")
    if gguf is not None:
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise InputError(
                    f"a GGUF file needs the package {package}: pip install normattn[hf]"
                )
        if path.is_dir() and not (path / gguf).is_file():
            raise InputError(f"there is no file {path / gguf}")
    elif path.is_dir() and not (path / "config.json").exists():
        files = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
        files = files or "no GGUF file either"
        raise InputError(f"{path} holds no config.json of transformers, and {files}")
    elif not path.exists() and (str(model).startswith((".", "/")) or str(model).count("/") > 1):
        raise InputError(f"{model} does not exist, and is not a name on the hub (OWNER/NAME)")
    return (str(path) if path.is_dir() else str(model)), gguf


def _loading_options(source: str, gguf: str | None) -> dict[str, Any]:
    """Options that run no code of the model, and use the network only if the hub is reachable."""
    local = Path(source).is_dir()
    if not local:
        from huggingface_hub import constants, get_session

        try:  # transformers tries each file of an unreachable hub for many seconds
            get_session().head(constants.ENDPOINT, timeout=5)
        except Exception:  # errors of the HTTP library differ between versions
            local = True
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
    return options if gguf is None else {**options, "gguf_file": gguf}


def _refuse_larger(folder: Path, gguf: str | None, config: Any, auto: Any) -> None:
    """Raise `InputError` for more weights than the files, without pickled ones, have bits."""
    source = gguf or str(folder)
    files = list(folder.glob("*.safetensors")) if gguf is None else [folder / gguf]
    bits = 8 * sum(file.stat().st_size for file in files)
    with explained(source), on_meta():
        needed = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if not isinstance(needed, int) or needed <= bits:
            described = copy.deepcopy(config)
            build = getattr(auto, "from_config", None)
            model = build(described, trust_remote_code=False) if build else auto(described)
            model.tie_weights()
            needed = sum(parameter.numel() for parameter in model.parameters())
    if needed > bits:
        raise InputError(
            f"{source} holds {bits // 8:,} bytes of {'safetensors' if gguf is None else 'weights'},"
            " too few for the numbers that its configuration describes"
        )


def missing_weight(info: Mapping[str, Any]) -> str | None:
    """A clause on a weight that transformers' loading info reports as missing or misshapen."""
    for name, found, expected in sorted(info["mismatched_keys"]):
        return f"{name} has the shape {tuple(found)}, not {tuple(expected)}"
    missing = sorted(map(str, info["missing_keys"]))
    return f"{missing[0]} is missing" if missing else None


def refuse_infinite_frequencies(model: Any, source: str) -> None:
    """Raise `InputError` for infinite frequencies, which a base of 0 gives."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not bool(torch.isfinite(buffer).all()):
            raise InputError(f"the configuration of {source} gives rotary frequencies without end")


def _check_loaded(model: Any, info: Any, source: str) -> None:
    """Raise `InputError` for missing weights, which are random, and for layers left out."""
    refuse_infinite_frequencies(model, source)
    problem = missing_weight(info)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    for name in sorted(map(str, info["unexpected_keys"])):
        number = re.search(r"\.(\d+)\.", name)
        if number is not None and isinstance(layers, int) and 0 < layers <= int(number[1]):
            problem = problem or f"they hold {name}, but num_hidden_layers is {layers}"
    if problem is not None:
        raise InputError(f"the weights in {source} are not those of its configuration: {problem}")


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (Path(path).expanduser() / _ADAPTER_CONFIG).is_file()


def read_adapter_record(path: str | Path) -> dict[str, Any]:
    """The method and train_length saved next to an adapter; `InputError` if there are none."""
    file = Path(path).expanduser() / ADAPTER_FILE
    if not file.is_file():
        raise InputError(
            f"{file.parent} holds an adapter without a method (no {ADAPTER_FILE}): load it with "
            "PEFT and extend it"
        )
    record = read_object(file)
    check_record(record, str(file))
    return record

"""Read an engine's position settings: convert any usual format to a transformers configuration.

The formats are a configuration, an override of some fields, a command line, a compose file, a YAML
of options, GGUF keys and a GGUF file.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.hf.llama_cpp import ENVIRONMENT, FLAGS, read_gguf, resolve_length, resolve_rope
from normattn.hf.model_parts import explained, leaf_mappings
from normattn.io import expand_path, parse_json, read_bytes, read_object

ENGINE_NAMES = {"hf": "transformers", "vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
"""Engines by name; `hf` where the settings do not say which engine they are for."""
SCALING_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "alpha", "short_factor", "long_factor"),
}
"""Rope parameters that set a scaling or the base."""
_ALLOW_LONG = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
"""Environment variables that let an engine serve more than the length it derives."""
_OVERRIDES = ("--hf-overrides", "--json-model-override-args")
_LENGTHS = {"vllm": "--max-model-len", "sglang": "--context-length", "llama.cpp": "--ctx-size"}
_SHORT_FLAGS = {"-c": "--ctx-size", "-np": "--parallel", "-kvu": "--kv-unified"}
_PROGRAMS = {"llama-": "llama.cpp", "vllm": "vllm", "sglang": "sglang"}
_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class EngineSettings:
    """A configuration with the engine's position settings in it."""

    raw: dict[str, Any]  # the configuration as config.json holds it
    file: str  # that the settings were read from
    ropes: tuple[Mapping[str, Any], ...] = ()  # rope parameters in them, for each type of layer
    max_length: int | None = None  # the engine's longest context in tokens, if given
    engine: str = "hf"  # one of `ENGINE_NAMES`
    complete: bool = False  # a whole configuration, not an override of another
    ignored: tuple[str, ...] = ()  # what the engine ignores or refuses, a sentence each
    rotary_dim: int | None = None  # how many features rotate, where a GGUF file gives that
    allows_long: bool = False  # an environment variable allows more than the derived length
    slots: int = 1  # parallel requests of llama.cpp that share the context

    @property
    def config(self) -> Any:
        """The configuration as a transformers object."""
        from transformers import CONFIG_MAPPING

        with explained(self.file):
            config_class: Any = CONFIG_MAPPING[self.raw["model_type"]]
            # JSON has no infinity; some configurations encode it in a string.
            decode = getattr(config_class, "_decode_special_floats", copy.deepcopy)
            return config_class.from_dict(copy.deepcopy(decode(self.raw)))


def config_dict(config: Any) -> dict[str, Any]:
    """A transformers configuration as the object that its config.json would hold."""
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return raw


def decoder_fields(raw: Mapping[str, Any]) -> Any:
    """The part of a configuration that describes the text decoder."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, Mapping) else raw


def rope_parameter_sets(raw: Mapping[str, Any]) -> list[Any]:
    """Every set of rope parameters of a configuration's decoder."""
    decoder = decoder_fields(raw)
    return list(leaf_mappings(decoder.get("rope_parameters") or decoder.get("rope_scaling")))


def read_engine_settings(against: str | Path, base: Mapping[str, Any]) -> EngineSettings:
    """Read the settings in `against`, on top of the model's configuration `base` if partial."""
    path = expand_path(against)
    path = path / "config.json" if path.is_dir() else path
    file = str(path)
    if path.suffix == ".gguf":
        _, keys, divisors = read_gguf(path)
        return _from_llama_cpp(keys, {}, base, file, divisors)
    if path.suffix == ".json":
        return _from_fields(read_object(path), base, file)
    text = read_bytes(path, _MAX_BYTES).decode()
    if text.lstrip().startswith("{"):
        return _from_fields(parse_json(text, file), base, file)
    if "rope.scaling" in text and "--" not in text:  # as `--emit gguf` prints them
        keys = dict(_parse_gguf_key(line, f"{file}: {line!r}") for line in text.split())
        return _from_llama_cpp(keys, {}, base, file)
    return _from_command(text, base, file)


def _from_llama_cpp(
    keys: Mapping[str, Any],
    flags: Mapping[str, str],
    base: Mapping[str, Any],
    file: str,
    divisors: Mapping[str, list[float]] | None = None,
) -> EngineSettings:
    """Settings from GGUF keys and flags of llama.cpp; `divisors` come from a GGUF file."""
    raw = copy.deepcopy(dict(base))
    decoder: Any = decoder_fields(raw)
    model_ropes: Any = decoder.get("rope_parameters") or {}
    converted: Any = {}
    if divisors is None:  # keys and flags modify the output of llama.cpp's converter
        converted = model_ropes.get("full_attention", model_ropes)
        keys = {"context_length": decoder.get("max_position_embeddings") or 0, **keys}
    words = ("--rope-scaling", "--kv-unified")
    values = {name: flag if name in words else float(flag) for name, flag in flags.items()}
    rope = resolve_rope(converted, keys, values, file, divisors)
    max_length, slots, ignored = resolve_length(keys, values, rope)
    model_rope: Any = next(iter(rope_parameter_sets(raw)), {})
    ropes = {name: model_rope[name] for name in model_rope.keys() - SCALING_FIELDS} | rope
    layer_types = decoder.get("layer_types") or ["sliding_attention"]
    windowed = decoder.get("sliding_window") and "sliding_attention" in layer_types
    if "sliding_attention" in model_ropes:
        default = 10000.0 if "gemma3" in str(decoder.get("model_type")) else rope["rope_theta"]
        sliding = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", default)}
        ropes = {"full_attention": ropes, "sliding_attention": sliding}
    elif windowed and rope["rope_type"] != "default":
        raise InputError(
            f"{file}: what llama.cpp scales in the layers of a {decoder.get('model_type')} model "
            "within a window is not known here"
        )
    decoder["rope_parameters"] = ropes
    if windowed and "attention.sliding_window" in keys:
        decoder["sliding_window"] = int(keys["attention.sliding_window"])
    return EngineSettings(
        raw,
        file,
        (rope,) if divisors is None else (),
        max_length,
        "llama.cpp",
        ignored=tuple(ignored),
        rotary_dim=keys.get("rope.dimension_count"),
        slots=slots,
    )


def _from_fields(
    fields: Mapping[str, Any],
    base: Mapping[str, Any],
    file: str,
    engine: str = "hf",
    max_length: int | None = None,
) -> EngineSettings:
    """Settings from a whole configuration, or from fields that override the model's."""
    complete = "model_type" in fields
    raw = copy.deepcopy(dict(fields)) if complete else _override(base, fields)
    configured = decoder_fields(fields).get("max_position_embeddings")
    if max_length is None and engine == "hf" and type(configured) is int:
        max_length = configured
    ropes: dict[str, Mapping[str, Any]] = {}
    for part in (fields, decoder_fields(fields)):  # those outside of a text_config too
        rope = part.get("rope_parameters") or part.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise InputError(f"{file}: rope parameters are a JSON object, not {rope!r}")
        by_type = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
        ropes |= by_type or ({"": rope} if rope else {})
    return EngineSettings(raw, file, tuple(ropes.values()), max_length, engine, complete)


def _override(base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with these fields; rope_scaling replaces rope_parameters."""
    raw = copy.deepcopy(dict(base))
    for name, value in fields.items():
        if name == "rope_scaling":
            raw.pop("rope_parameters", None)
        nested = isinstance(value, Mapping) and isinstance(raw.get(name), Mapping)
        merged = nested and "rope" not in name
        raw[name] = _override(raw[name], value) if merged else copy.deepcopy(value)
    return raw


def _from_command(text: str, base: Mapping[str, Any], file: str) -> EngineSettings:
    """Settings from a command line, or from a YAML file that holds one or an engine's options."""
    words = _words(text)
    overrides, keys, flags = _parse_command(words, file)
    if not (overrides or keys or flags.keys() & {*FLAGS, *_LENGTHS.values()}):
        known = ", ".join((*_OVERRIDES, *_LENGTHS.values(), "--rope-scaling"))
        raise InputError(
            f"{file} has no position settings: expected the JSON of a configuration, a GGUF "
            f"file, or flags such as {known}"
        )
    names = [Path(word).name for word in words]
    programs = [_PROGRAMS[x] for name in names for x in _PROGRAMS if name.startswith(x)]
    if "--json-model-override-args" in "".join(words) or "--context-length" in flags:
        programs = ["sglang"]
    default = "vllm" if overrides or "--max-model-len" in flags else "llama.cpp"
    engine = next(iter(programs), default)
    if engine == "llama.cpp":
        flags = {name: flags[name] for name in FLAGS & flags.keys()}
        return _from_llama_cpp(keys, flags, base, file)
    length = flags.get(_LENGTHS[engine], "auto")
    max_length = None
    if length not in ("-1", "auto"):  # as vLLM reads it: 128k is 128,000 and 128K is 131,072
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmMgG]?)", length.strip())
        max_length = int(float(match[1]) * _UNITS.get(match[2], 1)) if match else 0
        if max_length < 1:
            raise InputError(
                f"{file}: {length!r} is no finite number above 0, such as 131072 or 128k"
            )
    values = dict(word.partition("=")[::2] for word in words)
    allowed = any(values.get(x, "").strip().lower() in ("1", "true") for x in _ALLOW_LONG)
    fields = _from_fields(overrides, base, file, engine, max_length)
    return replace(fields, allows_long=allowed)


def _parse_command(
    words: Sequence[str], file: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """(configuration overrides, GGUF keys, other flags)."""
    overrides, keys, flags = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for word, following in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name in ENVIRONMENT:
            flags.setdefault(ENVIRONMENT[name], value)  # a flag takes precedence
        if not re.match(r"--?[A-Za-z]", name):
            continue
        flag, _, path = name.partition(".")
        flag = _SHORT_FLAGS.get(flag, flag.replace("_", "-"))  # vLLM and llama.cpp accept both
        if not equals and following is None and flag != "--kv-unified":
            continue
        value = value if equals else str(following)
        if flag in _OVERRIDES and path:
            *outer, last = path.split(".")
            inner: Any = overrides
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = _parse_scalar(value)
        elif flag in _OVERRIDES or (flag == "--rope-scaling" and value.startswith("{")):
            fields = parse_json(value, f"{flag} in {file}")
            if not isinstance(fields, Mapping):
                raise InputError(f"{flag} in {file} must be a JSON object")
            overrides |= {"rope_scaling": fields} if flag == "--rope-scaling" else fields
        elif flag == "--rope-theta":
            overrides["rope_theta"] = _parse_scalar(value)
        elif flag == "--override-kv":
            where = f"{file}: --override-kv"
            keys |= dict(_parse_gguf_key(key, f"{where} {key!r}") for key in value.split(","))
        else:
            flags[flag] = value
    return overrides, keys, flags


def _words(text: str) -> list[str]:
    """The words of a command, or of the commands, options and variables in a YAML file."""
    import yaml

    content = None
    if re.search(r"^\s*(-\s|[\w-]+:(\s|$))", text, re.MULTILINE):
        with suppress(yaml.YAMLError):
            content = yaml.safe_load(text)
    if isinstance(content, Mapping | list):
        return list(_unquoted(_yaml_words(content)))
    return list(_unquoted(shlex.split(text.replace("\\\n", " "), comments=True)))


def _unquoted(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments, with those of a quoted command (`sh -c "vllm serve …"`) in its place."""
    shell = False
    for argument in arguments:
        if " --" in argument:
            yield from _unquoted(shlex.split(argument))
        elif not (shell and argument.startswith("-")):
            yield argument
        shell = Path(argument).name in ("sh", "bash")


def _yaml_words(content: Any) -> Iterator[str]:
    """The words of commands, `--name value` of options and NAME=value of an environment."""
    if isinstance(content, list):
        for item in content:
            yield from _yaml_words(item) if isinstance(item, Mapping | list) else [str(item)]
        return
    if content.keys() == {"name", "value"}:  # a variable of a Kubernetes container
        content = {content["name"]: content["value"]}
    for key, value in content.items():
        name = str(key)
        if name in ENVIRONMENT or name in _ALLOW_LONG:
            yield f"{name}={value}"
        elif name in ("command", "entrypoint", "args") and isinstance(value, str):
            yield from shlex.split(value.replace("\\\n", " "))
        elif isinstance(value, Mapping) and ("rope" in name or "override" in name):
            yield from (f"--{name.lstrip('-')}", json.dumps(value, default=str))
        elif isinstance(value, Mapping | list):
            yield from _yaml_words(value)
        elif not isinstance(value, bool) and value is not None:
            yield from (f"--{name.lstrip('-')}", str(value))


def _parse_scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_gguf_key(text: str, where: str) -> tuple[str, Any]:
    """Parse llama.cpp's `ARCH.key=type:value` into the key without its architecture, and value."""
    name, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    if not (equals and colon):
        raise InputError(f"{where} is no key=type:value")
    key = name if name.startswith("general.") else name.partition(".")[2]
    if kind in ("str", "bool"):
        return key, value if kind == "str" else value == "true"
    return key, float(value)

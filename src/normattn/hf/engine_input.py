"""Read an engine's settings of a model's positions, in the usual forms.

A configuration, an override of some fields, a command line, a compose file, a YAML of options, GGUF
keys or a GGUF file. All of them become a configuration in transformers' words.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.hf.llama_cpp import ENVIRONMENT, FLAGS, computed, read_gguf
from normattn.hf.model_parts import explained, innermost
from normattn.io import expand_path, parse_json, read_bytes, read_object

NAMES = {"hf": "transformers", "vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
"""How engines are called; `hf` where the settings do not say which one they are for."""
SCALING = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "alpha", "short_factor", "long_factor"),
}
"""Rope parameters that are a scaling's or the base."""
_OVERRIDES = ("--hf-overrides", "--json-model-override-args")
_LENGTHS = {"vllm": "--max-model-len", "sglang": "--context-length", "llama.cpp": "--ctx-size"}
_PROGRAMS = {"llama-": "llama.cpp", "vllm": "vllm", "sglang": "sglang"}
_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class EngineSettings:
    """A configuration with the engine's settings of positions in it.

    Attributes:
        raw: the whole of it, in transformers' words.
        file: the file that holds it.
        ropes: the given rope parameters, one for each type of layer.
        longest: the engine's longest context in tokens; None if it is not given.
        engine: one of `NAMES`.
        whole: whether it is a whole configuration, and no override of another.
        ignored: settings that the engine ignores, a sentence each.
        width: how many features rotate where a GGUF says it.
    """

    raw: dict[str, Any]
    file: str
    ropes: tuple[Mapping[str, Any], ...] = ()
    longest: int | None = None
    engine: str = "hf"
    whole: bool = False
    ignored: tuple[str, ...] = ()
    width: int | None = None

    @property
    def config(self) -> Any:
        """The configuration as transformers makes it."""
        from transformers import CONFIG_MAPPING

        kind = self.raw.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise InputError(f"{self.file}: model_type {kind!r} is not known to transformers")
        made: Any = CONFIG_MAPPING[kind]
        # How a config.json holds infinity, which JSON has not.
        decode = getattr(made, "_decode_special_floats", copy.deepcopy)
        with explained(self.file):
            return made.from_dict(copy.deepcopy(decode(self.raw)))


def raw_of(config: Any) -> dict[str, Any]:
    """A configuration of transformers as the object that its config.json would hold."""
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return raw


def decoder_of(raw: Mapping[str, Any]) -> Any:
    """The part of a configuration that speaks of the text decoder."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, Mapping) else raw


def ropes_of(raw: Mapping[str, Any]) -> list[Any]:
    """Every set of rope parameters of a configuration's decoder."""
    decoder = decoder_of(raw)
    return list(innermost(decoder.get("rope_parameters") or decoder.get("rope_scaling")))


def read_engine_settings(against: str | Path, base: Mapping[str, Any]) -> EngineSettings:
    """The settings in `against`, on top of the model's configuration if they are partial.

    Raises `InputError` for what is no configuration and holds no settings of positions.
    """
    path = expand_path(against)
    path = path / "config.json" if path.is_dir() else path
    file = str(path)
    if path.suffix == ".gguf":
        return gguf_settings(path, base)
    if path.suffix == ".json":
        return _of_fields(read_object(path), base, file)
    try:
        text = read_bytes(path, _MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is no configuration: it is neither JSON nor GGUF nor text"
        ) from error
    if text.lstrip().startswith("{"):
        return _of_fields(parse_json(text, file), base, file)
    if "rope.scaling" in text and "--" not in text:  # as `--emit gguf` prints them
        keys = dict(_typed_key(line, f"{file}: {line!r}") for line in text.split())
        return _of_llama_cpp(keys, {}, base, file)
    return _of_command(text, base, file)


def gguf_settings(path: Path, base: Mapping[str, Any]) -> EngineSettings:
    """What llama.cpp computes of a GGUF file of the model."""
    _, keys, divisors = read_gguf(path)
    return _of_llama_cpp(keys, {}, base, str(path), divisors)


def _of_llama_cpp(
    keys: Mapping[str, Any],
    flags: Mapping[str, str],
    base: Mapping[str, Any],
    file: str,
    divisors: Mapping[str, list[float]] | None = None,
) -> EngineSettings:
    """The configuration of a model whose positions llama.cpp computes so.

    `divisors` are those of a GGUF file; without one, keys and flags change what the converter of
    llama.cpp writes for the model.
    """
    raw = copy.deepcopy(dict(base))
    decoder: Any = decoder_of(raw)
    given: Any = decoder.get("rope_parameters") or {}
    converted: Any = {}
    if divisors is None:
        converted = given.get("full_attention", given)
        keys = {"context_length": decoder.get("max_position_embeddings") or 0, **keys}
    rope, longest, ignored = computed(converted, keys, flags, file, divisors)
    own: Any = next(iter(ropes_of(raw)), {})
    whole: dict[str, Any] = {name: own[name] for name in own.keys() - SCALING} | rope
    types = decoder.get("layer_types") or ["sliding_attention"]
    windowed = decoder.get("sliding_window") and "sliding_attention" in types
    if "sliding_attention" in given:
        usual = 10000.0 if "gemma3" in str(decoder.get("model_type")) else rope["rope_theta"]
        within = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", usual)}
        whole = {"full_attention": whole, "sliding_attention": within}
    elif windowed and rope["rope_type"] != "default":
        raise InputError(
            f"{file}: what llama.cpp scales in the layers of a {decoder.get('model_type')} model "
            "within a window is not known here"
        )
    decoder["rope_parameters"] = whole
    if windowed and "attention.sliding_window" in keys:
        decoder["sliding_window"] = int(keys["attention.sliding_window"])
    ropes, width = (rope,) if divisors is None else (), keys.get("rope.dimension_count")
    return EngineSettings(
        raw, file, ropes, longest, "llama.cpp", ignored=tuple(ignored), width=width
    )


def _of_fields(
    fields: Mapping[str, Any],
    base: Mapping[str, Any],
    file: str,
    engine: str = "hf",
    longest: int | None = None,
) -> EngineSettings:
    """A whole configuration, or fields that replace those of the model's."""
    whole = "model_type" in fields
    raw = copy.deepcopy(dict(fields)) if whole else _replaced(base, fields)
    named = decoder_of(fields).get("max_position_embeddings")
    if longest is None and engine == "hf" and type(named) is int:
        longest = named
    ropes: dict[str, Mapping[str, Any]] = {}
    for part in (fields, decoder_of(fields)):  # those outside of a text_config too
        rope = part.get("rope_parameters") or part.get("rope_scaling") or {}
        nested = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
        ropes |= nested or ({"": rope} if rope else {})
    return EngineSettings(raw, file, tuple(ropes.values()), longest, engine, whole)


def _replaced(base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with these fields; rope_scaling replaces rope_parameters, as everywhere."""
    raw = copy.deepcopy(dict(base))
    for name, value in fields.items():
        if name == "rope_scaling":
            raw.pop("rope_parameters", None)
        inner = isinstance(value, Mapping) and isinstance(raw.get(name), Mapping)
        merged = inner and "rope" not in name
        raw[name] = _replaced(raw[name], value) if merged else copy.deepcopy(value)
    return raw


def _of_command(text: str, base: Mapping[str, Any], file: str) -> EngineSettings:
    """A command line, or a YAML that holds one or an engine's options."""
    words = list(_words(text, file))
    overrides: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    given: dict[str, str] = {}
    for word, following in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name in ENVIRONMENT:
            given.setdefault(ENVIRONMENT[name], value)  # a flag comes before it
        if not re.match(r"--?[A-Za-z]", name) or not (equals or following is not None):
            continue
        value = value if equals else str(following)
        flag, _, path = name.partition(".")
        flag = flag.replace("_", "-")  # as vLLM and llama.cpp take it
        if flag in _OVERRIDES and path:
            *outer, last = path.split(".")
            inner: Any = overrides
            for part in outer:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise InputError(f"{file}: {name} is inside {part}, which is {inner!r}")
            inner[last] = _scalar(value)
        elif flag in _OVERRIDES or (flag == "--rope-scaling" and value.startswith("{")):
            fields = parse_json(value, f"{flag} in {file}")
            if not isinstance(fields, Mapping):
                raise InputError(f"{flag} in {file} must be a JSON object")
            overrides |= {"rope_scaling": fields} if flag == "--rope-scaling" else fields
        elif flag == "--rope-theta":
            overrides["rope_theta"] = _scalar(value)
        elif flag == "--override-kv":
            where = f"{file}: --override-kv"
            keys |= dict(_typed_key(part, f"{where} {part!r}") for part in value.split(","))
        else:
            given["--ctx-size" if flag == "-c" else flag] = value
    if not (overrides or keys or given.keys() & {*FLAGS, *_LENGTHS.values()}):
        known = ", ".join((*_OVERRIDES, *_LENGTHS.values(), "--rope-scaling"))
        raise InputError(
            f"{file} has no position settings: expected the JSON of a configuration, a GGUF "
            f"file, or flags such as {known}"
        )
    engine = _engine(words, given, bool(overrides))
    if engine == "llama.cpp":
        return _of_llama_cpp(keys, {name: given[name] for name in FLAGS & given.keys()}, base, file)
    length = given.get(_LENGTHS[engine], "auto")
    longest = None if length in ("-1", "auto") else _length(length, file)
    return _of_fields(overrides, base, file, engine, longest)


def _words(text: str, file: str) -> Iterator[str]:
    """The words of a command, or of the commands, options and settings of a YAML."""
    import yaml

    if re.search(r"^\s*(-\s|[\w-]+:(\s|$))", text, re.MULTILINE):
        try:
            held = yaml.safe_load(text)
        except yaml.YAMLError:
            held = None
        if isinstance(held, Mapping | list):
            try:
                yield from list(_of_yaml(held))
            except RecursionError:
                raise InputError(f"{file} is YAML that contains itself") from None
            return
    try:
        yield from shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"{file} is no command line: {error}") from error


def _of_yaml(held: Any) -> Iterator[str]:
    """The words of commands, `--name value` of options and NAME=value of an environment."""
    if isinstance(held, list):
        for item in held:
            yield from _of_yaml(item) if isinstance(item, Mapping | list) else [str(item)]
        return
    for name, value in held.items():
        if name in ENVIRONMENT:
            yield f"{name}={value}"
        elif name in ("command", "entrypoint", "args") and isinstance(value, str):
            yield from shlex.split(value.replace("\\\n", " "))
        elif isinstance(value, Mapping) and ("rope" in name or "override" in name):
            yield from (f"--{str(name).lstrip('-')}", json.dumps(value))
        elif isinstance(value, Mapping | list):
            yield from _of_yaml(value)
        elif not isinstance(value, bool) and value is not None:
            yield from (f"--{str(name).lstrip('-')}", str(value))


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _typed_key(text: str, where: str) -> tuple[str, Any]:
    """`ARCH.key=type:value`, as llama.cpp takes it, without the architecture."""
    name, equals, value = text.partition("=")
    kind, colon, value = value.partition(":")
    if not (equals and colon):
        raise InputError(f"{where} is no key=type:value")
    own = name if name.startswith("general.") else name.partition(".")[2]
    if kind == "str":
        return own, value
    try:
        number = float(value)
    except ValueError as error:
        raise InputError(f"{where}: {value!r} is no number") from error
    if not math.isfinite(number):
        raise InputError(f"{where}: {value!r} is no finite number")
    return own, number


def _engine(words: Sequence[str], given: Mapping[str, str], overridden: bool) -> str:
    """Whose command this is: by the program, else by flags that one engine alone has."""
    if "--json-model-override-args" in "".join(words) or "--context-length" in given:
        return "sglang"
    programs = (Path(word).name for word in words)
    named = (_PROGRAMS[x] for word in programs for x in _PROGRAMS if word.startswith(x))
    other = "vllm" if overridden or "--max-model-len" in given else "llama.cpp"
    return next(named, other)


def _length(text: str, file: str) -> int:
    """A number of tokens: 128k is 128,000 and 128K is 131,072, as vLLM reads it."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmMgG]?)", text.strip())
    count = float(match[1]) * _UNITS.get(match[2], 1) if match else 0
    if count < 1:
        raise InputError(f"{file}: {text!r} is no finite number above 0, such as 131072 or 128k")
    return int(count)

"""What an engine was told of a model's positions: a configuration, an override, flags, a GGUF file.

All are brought into the words of transformers' config.json; `Told.rope` is what stood there, as it
was typed.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.hf.config_values import refuse_odd_rope
from normattn.hf.gguf import read_values
from normattn.hf.load import _explained
from normattn.io import expanded, parse_json, read_bytes, read_object

_OVERRIDES = ("--hf-overrides", "--json-model-override-args")
_LENGTHS = ("--max-model-len", "--context-length", "--ctx-size", "-c")
_LLAMA = ("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--ctx-size")
_MOST = 1 << 20


@dataclass(frozen=True)
class Told:
    """A configuration with what was told of positions in it.

    Attributes:
        raw: the whole of it, in transformers' words.
        rope: the rope parameters as they were told, by type of layer ("" where all have the same).
        longest: the tokens that the engine will read; None where it was not told.
        file: where it stands.
    """

    raw: dict[str, Any]
    rope: dict[str, dict[str, Any]]
    longest: int | None
    file: str

    @property
    def config(self) -> Any:
        """The configuration as transformers makes it."""
        from transformers import CONFIG_MAPPING

        kind = self.raw.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise InputError(f"{self.file}: model_type {kind!r} is not known to transformers")
        with _explained(self.file):
            return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(self.raw))


def told(against: str | Path, base: Mapping[str, Any]) -> Told:
    """What stands in `against`, on top of the model's own configuration where it is no whole one.

    `against` is a folder, a config.json, a JSON of some of its fields, a GGUF file, or a text with
    an engine's flags. Raises `InputError` for what is none of these.
    """
    path = expanded(against)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".gguf":
        return _gguf(path, base)
    if path.suffix == ".json":
        return _fields(read_object(path), base, str(path))
    text = _text(path)
    if text.lstrip().startswith("{"):
        fields = parse_json(text, str(path))
        return _fields(fields, base, str(path))
    if "rope.scaling" in text and "--" not in text:
        return _keys(dict(_printed_keys(text, path)), base, str(path))
    return _flags(text, base, str(path))


def _text(path: Path) -> str:
    content = read_bytes(path, _MOST)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no configuration: not JSON, not GGUF, not text") from error


def _fields(fields: Mapping[str, Any], base: Mapping[str, Any], file: str) -> Told:
    """A whole configuration, or fields that replace those of the model's."""
    whole = "model_type" in fields
    raw = copy.deepcopy(dict(fields)) if whole else _over(base, fields)
    longest = _decoder(fields).get("max_position_embeddings")
    return Told(
        raw, _ropes(_decoder(fields), file), longest if type(longest) is int else None, file
    )


def _over(base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with these fields; rope_scaling replaces rope_parameters, as everywhere."""
    raw = copy.deepcopy(dict(base))
    for name, value in fields.items():
        if name == "rope_scaling":
            raw.pop("rope_parameters", None)
        if isinstance(value, Mapping) and isinstance(raw.get(name), Mapping) and "rope" not in name:
            raw[name] = _over(raw[name], value)
        else:
            raw[name] = copy.deepcopy(value)
    return raw


def _decoder(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that speaks of the text decoder."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, Mapping) else raw


def _ropes(decoder: Mapping[str, Any], file: str) -> dict[str, dict[str, Any]]:
    rope = decoder.get("rope_parameters") or decoder.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise InputError(f"{file}: rope_parameters must be an object, not {rope!r}")
    nested = {name: dict(value) for name, value in rope.items() if isinstance(value, Mapping)}
    ropes = nested or {"": dict(rope)}
    for parameters in ropes.values():
        refuse_odd_rope(parameters, file)
    return ropes


def _flags(text: str, base: Mapping[str, Any], file: str) -> Told:
    """The flags of vLLM, SGLang or llama.cpp."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"{file} is no command line: {error}") from error
    given = dict(_pairs(words))
    for name in _OVERRIDES:
        if name in given:
            fields = parse_json(given[name], f"{name} in {file}")
            if not isinstance(fields, Mapping):
                raise InputError(f"{name} in {file} must be a JSON object")
            reading = _fields(fields, base, file)
            return Told(reading.raw, reading.rope, _longest(given, file) or reading.longest, file)
    if given.keys() & set(_LLAMA):
        return _llama_cpp(given, base, file)
    raise InputError(
        f"{file} tells of no positions: expected a JSON of a configuration, a GGUF file, or flags "
        f"such as {_OVERRIDES[0]}, {_OVERRIDES[1]} or {_LLAMA[0]}"
    )


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("-") and equals:
            yield name, value
        elif name.startswith("-") and number + 1 < len(words):
            yield name, words[number + 1]


def _longest(given: Mapping[str, str], file: str) -> int | None:
    length = next((given[name] for name in _LENGTHS if name in given), None)
    # llama.cpp reads 0 as "what the model says".
    return None if length in (None, "0") else int(_number(length, file))


def _number(text: Any, file: str) -> float:
    """A finite number above 0, as all are that engines are told of positions."""
    try:
        number = float(text)
    except (TypeError, ValueError) as error:
        raise InputError(f"{file}: {text!r} is no number") from error
    if not 0 < number < math.inf:
        raise InputError(f"{file}: {text!r} is no finite number above 0")
    return number


def _llama_cpp(given: Mapping[str, str], base: Mapping[str, Any], file: str) -> Told:
    """llama-server's flags as rope parameters; a length that it is not told is the file's own."""
    kind = given.get("--rope-scaling", "none")
    scale = _number(given.get("--rope-scale", 1), file)
    if "--rope-freq-scale" in given:
        scale = 1 / _number(given["--rope-freq-scale"], file)
    kind = "linear" if kind == "none" and scale != 1 else kind
    keys = {"type": kind, "factor": scale}
    names = {"original_context_length": "--yarn-orig-ctx", "attn_factor": "--yarn-attn-factor"}
    names |= {f"yarn_{name}": f"--yarn-{name.replace('_', '-')}" for name in _BETAS}
    keys |= {n: _number(given[flag], file) for n, flag in names.items() if flag in given}
    values = {f"rope.scaling.{name}": value for name, value in keys.items()}
    if "--rope-freq-base" in given:
        values["rope.freq_base"] = _number(given["--rope-freq-base"], file)
    over = given.get("--override-kv", "")
    if ".context_length=int:" in over:
        values["context_length"] = _number(over.rpartition(":")[2], file)
    reading = _keys(values, base, file)
    return Told(reading.raw, reading.rope, _longest(given, file) or reading.longest, file)


_BETAS = ("beta_fast", "beta_slow")


def _gguf(path: Path, base: Mapping[str, Any]) -> Told:
    held = read_values(path)
    prefix = f"{held.get('general.architecture')}."
    own = {name.removeprefix(prefix): value for name, value in held.items()}
    return _keys(own, base, str(path))


def _printed_keys(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Lines of key=type:value, as `--emit gguf` prints them."""
    for line in text.split():
        name, _, value = line.partition("=")
        kind, colon, value = value.partition(":")
        if not colon:
            raise InputError(f"{path}: {line!r} is no key=type:value")
        yield name.partition(".")[2], value if kind == "str" else _number(value, str(path))


def _keys(held: Mapping[str, Any], base: Mapping[str, Any], file: str) -> Told:
    """GGUF keys without their architecture, as rope parameters."""
    own = dict(_decoder(base).get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in own.values()):
        raise InputError(
            f"{file}: llama.cpp and GGUF hold one kind of scaling, and this model has rotary "
            "frequencies of two kinds"
        )
    base_theta = own.get("rope_theta", _decoder(base).get("rope_theta"))
    theta = held.get("rope.freq_base", base_theta)
    kind = str(held.get("rope.scaling.type", "none"))
    rope: dict[str, Any] = {"rope_type": {"none": "default"}.get(kind, kind)}
    if kind != "none":
        rope["factor"] = _number(held.get("rope.scaling.factor", 1.0), file)
    if kind == "yarn":
        names = {"rope.scaling.original_context_length": "original_max_position_embeddings"}
        names |= {f"rope.scaling.yarn_{name}": name for name in _BETAS}
        rope |= {theirs: held[name] for name, theirs in names.items() if name in held}
        own_factor = held.get("rope.scaling.attn_factor", 1.0)
        if own_factor != 1.0:
            usual = 1 + 0.1 * math.log(max(rope["factor"], 1.0))
            rope["attention_factor"] = _number(own_factor, file) * usual
    told_rope = dict(rope)
    if theta is not None:
        rope["rope_theta"] = told_rope["rope_theta"] = _number(theta, file)
    if "partial_rotary_factor" in own:
        rope["partial_rotary_factor"] = own["partial_rotary_factor"]
    fields: dict[str, Any] = {"rope_parameters": rope}
    longest = held.get("context_length")
    if longest is not None:
        fields["max_position_embeddings"] = int(longest)
    if isinstance(base.get("text_config"), Mapping):
        fields = {"text_config": fields}
    length = None if longest is None else int(longest)
    return Told(_over(base, fields), {"": told_rope}, length, file)


def raw_of(config: Any) -> dict[str, Any]:
    """A configuration of transformers as the object that its config.json would hold."""
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return raw

"""What an engine was told of a model's positions, as people have it.

A configuration, an override of some fields, a command line, a compose file, a YAML of options, GGUF
keys or a GGUF file. All but llama.cpp's become a configuration in transformers' words; `Told.rope`
is what stood there, as it was typed.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.hf.config_values import refuse_odd_rope
from normattn.hf.gguf import read_divisors, read_values
from normattn.hf.llama_cpp import ENVIRONMENT, FLAGS
from normattn.hf.load import _explained
from normattn.io import expanded, parse_json, read_bytes, read_object

_OVERRIDES = ("--hf-overrides", "--json-model-override-args")
_LENGTHS = {"--max-model-len": "vllm", "--context-length": "sglang", "--ctx-size": "llama.cpp"}
_SHORT = {"-c": "--ctx-size", "--config-format": "", "-m": "--model"}
_PROGRAMS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llama-server": "llama.cpp",
    "llama-cli": "llama.cpp",
}
_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}
_LENGTH = re.compile(r"(?P<count>[0-9]+(?:\.[0-9]+)?)(?P<unit>[kKmMgG]?)")
_MOST = 1 << 20


@dataclass(frozen=True)
class Told:
    """A configuration with what was told of positions in it.

    Attributes:
        raw: the whole of it, in transformers' words.
        rope: the rope parameters as they were told, by type of layer ("" where all have the same).
        longest: the tokens that the engine was told to read; None where it was not told.
        file: where it stands.
        engine: vllm, sglang, llama.cpp, or hf where the text does not tell.
        whole: whether it is a whole configuration, and no override of another.
        keys, flags: llama.cpp's GGUF keys, without their architecture, and flags.
        divisors: those of a GGUF's `rope_freqs.weight`.
    """

    raw: dict[str, Any]
    rope: dict[str, dict[str, Any]]
    longest: int | None
    file: str
    engine: str = "hf"
    whole: bool = False
    keys: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    divisors: Any = None

    @property
    def config(self) -> Any:
        """The configuration as transformers makes it."""
        from transformers import CONFIG_MAPPING

        kind = self.raw.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise InputError(f"{self.file}: model_type {kind!r} is not known to transformers")
        with _explained(self.file):
            return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(self.raw))


def told(against: str | Path, base: Mapping[str, Any], own_keys: Mapping[str, Any]) -> Told:
    """What stands in `against`, on top of the model's own configuration where it is no whole one.

    `own_keys` are the keys of the model's GGUF, without their architecture. Raises `InputError` for
    what is neither a configuration nor tells of positions.
    """
    path = expanded(against)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".gguf":
        held = read_values(path)
        prefix = f"{held.get('general.architecture')}."
        keys = {name.removeprefix(prefix): value for name, value in held.items()}
        return _llama_cpp(keys, {}, base, str(path), read_divisors(path))
    if path.suffix == ".json":
        return _fields(read_object(path), base, str(path))
    text = _text(path)
    if text.lstrip().startswith("{"):
        return _fields(parse_json(text, str(path)), base, str(path))
    if "rope.scaling" in text and "--" not in text:
        return _llama_cpp(dict(_printed_keys(text, path)), {}, base, str(path))
    return _command(text, base, own_keys, str(path))


def _text(path: Path) -> str:
    content = read_bytes(path, _MOST)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no configuration: not JSON, not GGUF, not text") from error


def _fields(
    fields: Mapping[str, Any],
    base: Mapping[str, Any],
    file: str,
    engine: str = "hf",
    longest: int | None = None,
) -> Told:
    """A whole configuration, or fields that replace those of the model's."""
    whole = "model_type" in fields
    raw = copy.deepcopy(dict(fields)) if whole else _over(base, fields)
    own = _decoder(fields).get("max_position_embeddings")
    if longest is None and engine == "hf" and type(own) is int:
        longest = own
    return Told(raw, _ropes(fields, file), longest, file, engine, whole)


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


def _ropes(fields: Mapping[str, Any], file: str) -> dict[str, dict[str, Any]]:
    """The rope parameters that were told, those beside a text_config too."""
    found: dict[str, dict[str, Any]] = {}
    for part in (fields, _decoder(fields)):
        rope = part.get("rope_parameters") or part.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise InputError(f"{file}: rope_parameters must be an object, not {rope!r}")
        nested = {name: dict(value) for name, value in rope.items() if isinstance(value, Mapping)}
        found |= nested or ({"": dict(rope)} if rope else {})
    for parameters in found.values():
        refuse_odd_rope(parameters, file)
    return found or {"": {}}


def _command(text: str, base: Mapping[str, Any], own_keys: Mapping[str, Any], file: str) -> Told:
    """A command line, or a YAML that holds one or an engine's options."""
    words, environment = _words(text, file)
    given, overrides, keys = _options(words, file)
    for name, value in environment.items():
        if name in ENVIRONMENT:
            given.setdefault(ENVIRONMENT[name], value)
    engine = _engine(words, given, overrides, keys)
    if engine is None:
        raise InputError(
            f"{file} tells of no positions: expected a JSON of a configuration, a GGUF file, or "
            f"flags such as {', '.join((*_OVERRIDES, *_LENGTHS, '--rope-scaling'))}"
        )
    if engine == "llama.cpp":
        flags = {name: given[name] for name in FLAGS & given.keys()}
        architecture = str(own_keys.get("general.architecture", ""))
        own = {name.removeprefix(f"{architecture}."): value for name, value in own_keys.items()}
        return _llama_cpp({**own, **keys}, flags, base, file)
    flag = next(name for name, of in _LENGTHS.items() if of == engine)
    length = given.get(flag)
    longest = None if length in (None, "-1", "auto") else _length(str(length), file)
    return _fields(overrides, base, file, engine, longest)


def _words(text: str, file: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command, and the environment that was set for it."""
    import yaml

    held = None
    if re.search(r"^\s*(-\s|[\w-]+:(\s|$))", text, re.MULTILINE):
        try:
            held = yaml.safe_load(text)
        except yaml.YAMLError:
            held = None
    environment: dict[str, str] = {}
    if isinstance(held, Mapping | list):
        return list(_of_yaml(held, environment)), environment
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"{file} is no command line: {error}") from error
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in ENVIRONMENT:
            environment[name] = value
    return words, environment


def _of_yaml(held: Any, environment: dict[str, str]) -> Iterator[str]:
    """The words of commands and options anywhere in a YAML; its environment is put aside."""
    if isinstance(held, list):
        if all(isinstance(item, str | int | float) for item in held):
            yield from map(str, held)
        for item in held:
            if isinstance(item, Mapping):
                yield from _of_yaml(item, environment)
        return
    for name, value in held.items():
        if name in ("environment", "env"):
            environment.update(_environment(value))
        elif name in ("command", "entrypoint", "args") and isinstance(value, str):
            yield from shlex.split(value.replace("\\\n", " "))
        elif (
            isinstance(value, Mapping) and "rope" not in name and "override" not in name
        ) or isinstance(value, list):
            yield from _of_yaml(value, environment)
        elif not isinstance(value, bool) and value is not None:
            flag = name if str(name).startswith("-") else f"--{name}"
            yield from (flag, json.dumps(value) if isinstance(value, Mapping) else str(value))


def _is_override(name: str) -> bool:
    return "rope" in name or "override" in name


def _environment(value: Any) -> Iterator[tuple[str, str]]:
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    for pair in pairs:
        if isinstance(pair, str):
            name, _, setting = pair.partition("=")
            yield name, setting
        elif isinstance(pair, Mapping):
            yield str(pair.get("name")), str(pair.get("value"))
        else:
            yield str(pair[0]), str(pair[1])


def _options(
    words: Sequence[str], file: str
) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """Flags, overrides of the configuration, and GGUF keys that `--override-kv` sets."""
    given: dict[str, str] = {}
    overrides: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for name, value in _pairs(words):
        flag, _, path = name.partition(".")
        if flag in _OVERRIDES and path:
            _put(overrides, path.split("."), _scalar(value))
        elif flag in _OVERRIDES or (name == "--rope-scaling" and value.startswith("{")):
            fields = parse_json(value, f"{name} in {file}")
            if not isinstance(fields, Mapping):
                raise InputError(f"{name} in {file} must be a JSON object")
            overrides |= {"rope_scaling": fields} if name == "--rope-scaling" else fields
        elif name == "--rope-theta":
            overrides["rope_theta"] = _scalar(value)
        elif name == "--override-kv":
            keys |= dict(_overridden(part, file) for part in value.split(","))
        else:
            given[name] = value
    return given, overrides, keys


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values; `_` in a name is `-`, as vLLM and llama.cpp take it."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not re.match(r"--?[A-Za-z]", name):
            continue
        flag, dot, path = name.partition(".")
        name = flag.replace("_", "-") + dot + path
        name = _SHORT.get(name, name)
        if equals:
            yield name, value
        elif number + 1 < len(words):
            yield name, words[number + 1]


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        target = target.setdefault(name, {})
    target[path[-1]] = value


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _overridden(part: str, file: str) -> tuple[str, Any]:
    """`ARCH.key=type:value`, as llama.cpp takes it, without the architecture."""
    name, equals, value = part.partition("=")
    kind, colon, value = value.partition(":")
    if not (equals and colon):
        raise InputError(f"{file}: --override-kv {part!r} is no key=type:value")
    own = name.partition(".")[2] if not name.startswith("general.") else name
    return own, value if kind == "str" else _number(value, file)


def _engine(
    words: Sequence[str], given: Mapping[str, str], overrides: Mapping[str, Any], keys: Any
) -> str | None:
    """Whose command this is."""
    if "--json-model-override-args" in "".join(words) or "--context-length" in given:
        return "sglang"
    for word in words:
        for program, engine in _PROGRAMS.items():
            if program in Path(word).name or word.startswith(f"{program}."):
                told_any = given.keys() & {*FLAGS, *_LENGTHS} or overrides or keys
                return engine if told_any else None
    if overrides or "--max-model-len" in given:
        return "vllm"
    return "llama.cpp" if given.keys() & FLAGS or keys else None


def _length(text: str, file: str) -> int:
    """A number of tokens: 128k is 128,000 and 128K is 131,072, as vLLM reads it."""
    match = _LENGTH.fullmatch(text.strip())
    count = float(match["count"]) * _UNITS.get(match["unit"], 1) if match else 0
    if count < 1:
        raise InputError(f"{file}: {text!r} is no finite number above 0, such as 131072 or 128k")
    return int(count)


def _number(text: Any, file: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError) as error:
        raise InputError(f"{file}: {text!r} is no number") from error


def _printed_keys(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Lines of key=type:value, as `--emit gguf` prints them."""
    for line in text.split():
        name, _, value = line.partition("=")
        kind, colon, value = value.partition(":")
        if not colon:
            raise InputError(f"{path}: {line!r} is no key=type:value")
        yield name.partition(".")[2], value if kind == "str" else _number(value, str(path))


def _llama_cpp(
    keys: Mapping[str, Any],
    flags: Mapping[str, str],
    base: Mapping[str, Any],
    file: str,
    divisors: Any = None,
) -> Told:
    return Told(
        dict(base), {"": {}}, None, file, "llama.cpp", False, dict(keys), dict(flags), divisors
    )


def raw_of(config: Any) -> dict[str, Any]:
    """A configuration of transformers as the object that its config.json would hold."""
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return raw

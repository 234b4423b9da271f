"""`--emit`: a method in an engine's format: JSON fields, a command with flags, or GGUF keys.

An engine applies a method by its frequencies and its attention factor. The fields are first
checked against the model's own rotary module (`native`). A method that the engine does not have
raises an error. `ENGINES` names the version of each engine that was checked.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from normattn.errors import InputError
from normattn.hf.llama_cpp import architecture_of, command_flags, gguf_keys
from normattn.hf.model_parts import leaf_mappings, rope_type_of
from normattn.hf.native import merged_rope_parameters, native_fields
from normattn.hf.plan import Plan, replaces_attention
from normattn.score.parts.rope_scaling import NTKMixed

NEEDS_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")
"""Rope types whose frequencies depend on the trained length."""
_LENGTH_NOT_SCALED = {
    "default",
    "su",
    *NEEDS_ORIGINAL_LENGTH,
    "deepseek_yarn",
    "deepseek_llama_scaling",
}
"""Rope types whose factor does not multiply max_position_embeddings in vLLM."""
_REFUSED = {
    "ollama": "its Modelfile has no parameter for rotary scaling: make a GGUF by --emit gguf",
    "tgi": "text-generation-inference takes a factor alone and computes the rest by its version",
    "exllama": "its rule has not been checked here: convert the model with the fields of --emit hf",
    "exllamav2": "its rule has not been checked here: convert the model with those of --emit hf",
    "lmdeploy": "its rule has not been checked here: it reads config.json, see --emit hf",
}


@dataclass(frozen=True)
class Deployment:
    """A model to be served under a method, for texts of up to `max_length` tokens.

    `model` is its name for the engine: a folder, a file or a name on the hub. `architecture` is its
    name in a GGUF, None if unknown. `text_config_name` is the field of a nested text configuration.
    `version` is the engine's, None for the one that was checked.
    """

    model: str
    plan: Plan
    max_length: int
    architecture: str | None = None
    text_config_name: str | None = None
    version: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the text configuration, in transformers' format."""
        return native_fields(self.plan.parts, self.plan.layers, self.plan.spec, self.max_length)

    def as_json(self, fields: dict[str, Any], indent: int | None = None) -> str:
        """The fields as JSON, nested where the configuration nests its text configuration."""
        if self.text_config_name is not None:
            fields = {self.text_config_name: fields}
        return json.dumps(fields, indent=indent)

    @property
    def gguf_architecture(self) -> str:
        """The architecture's name in a GGUF; `InputError` if unknown."""
        model_type = self.plan.parts.config.model_type
        name = self.architecture or architecture_of(model_type)
        if name is None:
            raise InputError(
                f"what a GGUF of {model_type} calls its architecture is not known here: give the "
                "GGUF file itself"
            )
        return name


def emit(deployment: Deployment, engine: str) -> str:
    """The method as text in the format of `engine`, one of `ENGINES`.

    Raises `InputError` for an unknown engine or version, a method that the engine does not have,
    and a model whose configuration cannot express the method.
    """
    spec, version = deployment.plan.spec, deployment.version
    if engine in _REFUSED:
        raise InputError(f"--emit cannot write it for {engine}: {_REFUSED[engine]}")
    if engine not in ENGINES:
        raise InputError(f"--emit knows {', '.join(ENGINES)}, not {engine!r}")
    reason = None
    if replaces_attention(spec):
        reason = (
            "engines apply a method by its frequencies and a factor, and this changes attention"
        )
    elif isinstance(spec.rope_scaling, NTKMixed) and engine != "vllm":
        reason = "only vLLM has a base for each frequency"
    if reason is not None:
        raise InputError(
            f"{engine} has no {spec.method_text}: {reason}; normattn.extend applies it"
        )
    checked = ENGINES[engine]
    if version is not None and _parse_version(version) < checked.oldest:
        raise InputError(
            f"--engine-version {version}: {engine} was checked with {checked.version}; older "
            "versions use other names and rules, which were not checked"
        )
    return checked.write(deployment)


def _parse_version(version: str) -> tuple[int, int]:
    """Major and minor of `"0.33.0"`, (0, 33); `InputError` for another format."""
    major, _, rest = version.removeprefix("v").partition(".")
    minor = rest.partition(".")[0] or "0"
    if not (major.isdigit() and minor.isdigit()):
        raise InputError(f"--engine-version {version!r} is not a version such as 0.33.0")
    return int(major), int(minor)


def _config_json(deployment: Deployment) -> str:
    """Fields for config.json (`modeling_rope_utils.py`); transformers 4 has other names."""
    old = deployment.version is not None and _parse_version(deployment.version) < (5, 0)
    fields = _to_version_4(deployment.fields) if old else deployment.fields
    return deployment.as_json(fields, indent=2) + "\n"


def _mlx(deployment: Deployment) -> str:
    """Fields for config.json as mlx-lm reads them (`initialize_rope`, rope_utils.py)."""
    fields = _to_version_4(deployment.fields)
    if "truncate" in (fields.get("rope_scaling") or {}):
        raise InputError("mlx-lm has YaRN with ⌊ ⌋ and ⌈ ⌉ only, not truncate=false")
    return deployment.as_json(fields, indent=2) + "\n"


def _to_version_4(fields: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta next to rope_scaling, as transformers had them before version 5."""
    rope = dict(fields["rope_parameters"])
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise InputError(
            "one rope_scaling, as in transformers before version 5, cannot hold two kinds of "
            "frequencies"
        )
    outside = {
        name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") & rope.keys()
    }
    scaling = None if rope_type_of(rope) == "default" else rope
    length = {"max_position_embeddings": fields["max_position_embeddings"]}
    return {**length, **outside, "rope_scaling": scaling}


def _vllm(deployment: Deployment) -> str:
    """`--hf-overrides` and `--max-model-len`.

    An override of rope_parameters replaces all of them, so rope_theta is repeated. NTK-mixed is
    `ntk` with mixed_b (ntk_scaling_rope.py).
    """
    parts, layers, spec = deployment.plan.parts, deployment.plan.layers, deployment.plan.spec
    if isinstance(spec.rope_scaling, NTKMixed):
        mixed = {"mixed_b": spec.rope_scaling.b, "factor": spec.rope_scaling.stretch}
        rope = merged_rope_parameters(parts, layers, spec, {"rope_type": "ntk", **mixed})
        fields = {"max_position_embeddings": deployment.max_length, "rope_parameters": rope}
    else:
        fields = deployment.fields
    fields = _drop_scaled_length(deployment, fields, "vllm")
    return _command(
        f"vllm serve {shlex.quote(deployment.model)}",
        f"--hf-overrides {shlex.quote(deployment.as_json(fields))}",
        f"--max-model-len {deployment.max_length}",
    )


def _sglang(deployment: Deployment) -> str:
    """`--json-model-override-args` and `--context-length`.

    get_rope in sglang/srt/layers/rotary_embedding/factory.py reads attn_factor, a multiple of
    0.1·ln s + 1, and no attention_factor. All rope_parameters are given, because an override of
    rope_scaling alone has dropped the rotary base (sgl-project/sglang issue 41227).
    """
    fields = _drop_scaled_length(deployment, deployment.fields, "sglang")
    ropes: Any = leaf_mappings(fields["rope_parameters"])
    for rope in ropes:
        if "attention_factor" in rope:
            default = 0.1 * math.log(rope["factor"]) + 1
            rope["attn_factor"] = rope.pop("attention_factor") / default
    return _command(
        f"python -m sglang.launch_server --model-path {shlex.quote(deployment.model)}",
        f"--json-model-override-args {shlex.quote(deployment.as_json(fields))}",
        f"--context-length {deployment.max_length}",
    )


def _drop_scaled_length(
    deployment: Deployment, fields: dict[str, Any], engine: str
) -> dict[str, Any]:
    """The fields without the length, where the engine multiplies the trained length itself."""
    decoder = {"model_type": deployment.plan.parts.config.model_type, **fields}
    if derived_length(decoder, engine) == fields["max_position_embeddings"]:
        return fields
    return {"rope_parameters": fields["rope_parameters"]}


def derived_length(decoder: Mapping[str, Any], engine: str) -> int | None:
    """The longest text that vLLM or SGLang derives from a decoder's configuration.

    The rules are `_get_and_verify_max_len` of vLLM and `get_context_length` of SGLang.
    """
    length, factor = decoder.get("max_position_embeddings"), 1.0
    for rope in leaf_mappings(decoder.get("rope_parameters") or decoder.get("rope_scaling")):
        if engine == "vllm":
            gemma = "gemma3" in str(decoder.get("model_type"))
            multiplied = not gemma and rope_type_of(rope) not in _LENGTH_NOT_SCALED
        else:
            original = "original_max_position_embeddings" in rope
            multiplied = not original and rope_type_of(rope) != "llama3"
        factor = float(rope.get("factor") or factor) if multiplied else factor
    return int(length * factor) if isinstance(length, int) else None


def _llama_cpp(deployment: Deployment) -> str:
    """Flags of llama-server (tools/server/README.md of ggml-org/llama.cpp)."""
    file = deployment.model if deployment.model.endswith(".gguf") else f"{deployment.model}.gguf"
    options = command_flags(deployment.fields, deployment.gguf_architecture)
    return _command(
        f"llama-server -m {shlex.quote(file)}", f"--ctx-size {deployment.max_length}", *options
    )


def checked_gguf_keys(deployment: Deployment) -> dict[str, tuple[str, Any]]:
    """The keys of a GGUF file that set the method, with the type of each value."""
    keys = gguf_keys(deployment.gguf_architecture, deployment.fields)
    if any(".yarn_beta_" in name for name in keys):
        raise InputError(
            "llama.cpp reads a file's beta_fast and beta_slow only in some architectures: use "
            "--emit llama.cpp, whose flags work in all"
        )
    return keys


def _gguf(deployment: Deployment) -> str:
    keys = checked_gguf_keys(deployment)
    return "".join(f"{name}={kind}:{value}\n" for name, (kind, value) in keys.items())


def _command(*lines: str) -> str:
    return " \\\n  ".join(lines) + "\n"


@dataclass(frozen=True)
class Engine:
    """How a method is written for one engine.

    `version` says which version `write` was checked with, and how. `oldest` is the oldest major and
    minor version that it is valid for; by default `--engine-version` is refused.
    """

    write: Callable[[Deployment], str]
    version: str
    oldest: tuple[int, int] = (9999, 0)


_XLLAMACPP = "llama.cpp in xllamacpp 2026.10.11549 (YaRN by running it, the rest in its source)"
ENGINES = {
    "hf": Engine(_config_json, "transformers 5.23.0 (by running it)", (4, 0)),
    "vllm": Engine(_vllm, "vLLM 0.33.0 (by running its get_rope and length rule)", (0, 33)),
    "sglang": Engine(_sglang, "SGLang at commit 108c36c (get_rope, in its source)"),
    "llama.cpp": Engine(_llama_cpp, _XLLAMACPP),
    "gguf": Engine(_gguf, _XLLAMACPP),
    "mlx": Engine(_mlx, "mlx-lm at commit 060aa43 (rope_utils.py, in its source)"),
}
"""By the names that `--emit` takes."""

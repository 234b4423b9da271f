"""`--emit`: a method in an engine's format: JSON fields, a command with flags, or GGUF keys.

An engine applies a method by its frequencies and its attention factor. The fields are first
checked against the model's own rotary module (`native`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.hf.llama_cpp import architecture_of, command_flags, gguf_keys, yarn_factor
from normattn.hf.model_parts import leaf_mappings, rope_type_of
from normattn.hf.native import merged_rope_parameters, native_fields
from normattn.hf.plan import Plan, replaces_attention
from normattn.score.parts.rope_scaling import NTKMixed

NEEDS_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")
"""Rope types whose frequencies depend on the trained length."""
_LENGTH_NOT_SCALED = {
    *("default", "su", *NEEDS_ORIGINAL_LENGTH, "deepseek_yarn", "deepseek_llama_scaling")
}
"""Rope types whose factor does not multiply max_position_embeddings in vLLM."""
_REFUSED = {
    "ollama": "its Modelfile has no parameter for rotary scaling: make a GGUF by --emit gguf",
    "tgi": "text-generation-inference takes a factor alone and computes the rest by its version",
    "exllama": "its rule has not been checked here: convert the model with the fields of --emit hf",
    "exllamav2": "its rule has not been checked here: convert the model with those of --emit hf",
    "lmdeploy": "its rule has not been checked here: it reads config.json, see --emit hf",
}
_COMMANDS = {
    "vllm": ("vllm serve", "--hf-overrides", "--max-model-len"),
    "sglang": (
        *("python -m sglang.launch_server --model-path", "--json-model-override-args"),
        "--context-length",
    ),
}
"""The program of an engine, and its flags for fields of the configuration and for the length."""


@dataclass(frozen=True)
class Deployment:
    """A model to be served under a method, for texts of up to `max_length` tokens."""

    model: str  # its name for the engine: a folder, a file or a name on the hub
    plan: Plan
    max_length: int
    architecture: str | None = None  # its name in a GGUF, if known
    text_config_name: str | None = None  # the field of a nested text configuration
    version: str | None = None  # the engine's, None for the one that was checked

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the text configuration, in transformers' format."""
        return native_fields(self.plan.parts, self.plan.layers, self.plan.spec, self.max_length)

    def as_json(self, fields: dict[str, Any], indent: int | None = None) -> str:
        """The fields as JSON, nested where the configuration nests its text configuration."""
        nested = fields if self.text_config_name is None else {self.text_config_name: fields}
        return json.dumps(nested, indent=indent)

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
        reason = "engines apply frequencies and a factor, and this changes attention"
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
    return checked.write(deployment, engine)


def _parse_version(version: str) -> tuple[int, int]:
    """Major and minor of `"0.33.0"`, (0, 33); `InputError` for another format."""
    major, _, rest = version.removeprefix("v").partition(".")
    minor = rest.partition(".")[0] or "0"
    if not (major.isdigit() and minor.isdigit()):
        raise InputError(f"--engine-version {version!r} is not a version such as 0.33.0")
    return int(major), int(minor)


def _config_json(deployment: Deployment, engine: str) -> str:
    """Fields for config.json, as transformers (`modeling_rope_utils.py`) and mlx-lm read them.

    mlx-lm (`initialize_rope`) and transformers before version 5 have rope_theta next to
    rope_scaling.
    """
    fields, version = deployment.fields, deployment.version
    if engine == "mlx" or (version is not None and _parse_version(version) < (5, 0)):
        rope = dict(fields["rope_parameters"])
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise InputError(
                "one rope_scaling, as in transformers before version 5, cannot hold two kinds of "
                "frequencies"
            )
        if engine == "mlx" and "truncate" in rope:
            raise InputError("mlx-lm has YaRN with ⌊ ⌋ and ⌈ ⌉ only, not truncate=false")
        outside = [name for name in ("rope_theta", "partial_rotary_factor") if name in rope]
        fields = {
            "max_position_embeddings": fields["max_position_embeddings"],
            **{name: rope.pop(name) for name in outside},
            "rope_scaling": None if rope_type_of(rope) == "default" else rope,
        }
    return deployment.as_json(fields, indent=2) + "\n"


def _serve(deployment: Deployment, engine: str) -> str:
    """The command of vLLM or SGLang, with overridden fields and the length.

    All rope_parameters are given, because an override replaces them. vLLM has NTK-mixed as `ntk`
    with mixed_b (ntk_scaling_rope.py). SGLang's get_rope (sglang/srt/layers/rotary_embedding/
    factory.py) reads attn_factor, a multiple of 0.1·ln s + 1, and no attention_factor; an override
    of rope_scaling alone has dropped its rotary base (sgl-project/sglang issue 41227).
    """
    parts, layers, spec = deployment.plan.parts, deployment.plan.layers, deployment.plan.spec
    if isinstance(spec.rope_scaling, NTKMixed):
        mixed = {"mixed_b": spec.rope_scaling.b, "factor": spec.rope_scaling.stretch}
        rope = merged_rope_parameters(parts, layers, spec, {"rope_type": "ntk", **mixed})
        fields = {"max_position_embeddings": deployment.max_length, "rope_parameters": rope}
    else:
        fields = deployment.fields
    decoder = {"model_type": parts.config.model_type, **fields}
    if derived_length(decoder, engine) != fields["max_position_embeddings"]:
        # The engine multiplies the trained length itself.
        fields = {"rope_parameters": fields["rope_parameters"]}
    ropes: Any = leaf_mappings(fields["rope_parameters"])
    for rope in ropes:
        if engine == "sglang" and "attention_factor" in rope:
            rope["attn_factor"] = rope.pop("attention_factor") / yarn_factor(rope["factor"])
    program, override, length = _COMMANDS[engine]
    return _command(
        f"{program} {shlex.quote(deployment.model)}",
        f"{override} {shlex.quote(deployment.as_json(fields))}",
        f"{length} {deployment.max_length}",
    )


def derived_length(decoder: Mapping[str, Any], engine: str) -> int | None:
    """What vLLM's `_get_and_verify_max_len` and SGLang's `get_context_length` derive."""
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


def _llama_cpp(deployment: Deployment, engine: str) -> str:
    """Flags of llama-server (tools/server/README.md of ggml-org/llama.cpp), or a GGUF's keys."""
    if engine == "gguf":
        keys = checked_gguf_keys(deployment)
        return "".join(f"{name}={kind}:{value}\n" for name, (kind, value) in keys.items())
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


def _command(*lines: str) -> str:
    return " \\\n  ".join(lines) + "\n"


class Engine(NamedTuple):
    """How a method is written for one engine."""

    write: Callable[[Deployment, str], str]
    version: str  # that `write` was checked with, and how
    oldest: tuple[int, int] = (9999, 0)  # valid version; by default --engine-version is refused


_XLLAMACPP = "llama.cpp in xllamacpp 2026.10.11549 (YaRN by running it, the rest in its source)"
ENGINES = {
    "hf": Engine(_config_json, "transformers 5.23.0 (by running it)", (4, 0)),
    "vllm": Engine(_serve, "vLLM 0.33.0 (by running its get_rope and length rule)", (0, 33)),
    "sglang": Engine(_serve, "SGLang at commit 108c36c (get_rope, in its source)"),
    "llama.cpp": Engine(_llama_cpp, _XLLAMACPP),
    "gguf": Engine(_llama_cpp, _XLLAMACPP),
    "mlx": Engine(_config_json, "mlx-lm at commit 060aa43 (rope_utils.py, in its source)"),
}
"""By the names that `--emit` takes."""

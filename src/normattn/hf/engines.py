"""What an engine needs to serve a model under a method: a JSON to paste, flags, or GGUF keys.

Engines apply a method by its frequencies and its factor alone. What is printed is checked
against the model's own rotary module first (`native`), and a method that an engine
does not have is refused. `ENGINES` names the version of each engine whose code gave the rule.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from normattn.errors import InputError
from normattn.hf.llama_cpp import architecture_of, flags, values
from normattn.hf.model_parts import innermost, kind_of
from normattn.hf.native import native_fields, rope_with
from normattn.hf.plan import Plan, replaces_attention
from normattn.score.parts.rope_scaling import NTKMixed

COUNTED = ("yarn", "llama3", "longrope")
"""Kinds whose frequencies depend on the trained length."""
_UNMULTIPLIED = {"default", "su", *COUNTED, "deepseek_yarn", "deepseek_llama_scaling"}
"""Kinds whose factor vLLM does not multiply max_position_embeddings with."""
_REFUSED = {
    "ollama": "its Modelfile has no parameter for rotary scaling: make a GGUF by --emit gguf",
    "tgi": "text-generation-inference takes a factor alone and computes the rest by its version",
    "exllama": "its rule has not been checked here: convert the model with the fields of --emit hf",
    "exllamav2": "its rule has not been checked here: convert the model with those of --emit hf",
    "lmdeploy": "its rule has not been checked here: it reads config.json, see --emit hf",
}


@dataclass(frozen=True)
class Wanted:
    """A method with all its values for one model, to be written in an engine's words.

    Attributes:
        model: how the engine names the model: a folder, a file, a name on the hub.
        plan: the method for this model.
        longest: tokens that the engine shall read.
        architecture: what a GGUF of the model calls its architecture; None where that is not known.
        inside: the name of the text configuration in a configuration of several, if it is one.
        version: the engine's version; None for the one that was checked.
    """

    model: str
    plan: Plan
    longest: int
    architecture: str | None = None
    inside: str | None = None
    version: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the text configuration in transformers' words."""
        return native_fields(self.plan.parts, self.plan.layers, self.plan.spec, self.longest)

    def as_json(self, fields: dict[str, Any], indent: int | None = None) -> str:
        """The fields where the whole configuration has them."""
        return json.dumps(fields if self.inside is None else {self.inside: fields}, indent=indent)

    @property
    def gguf(self) -> str:
        """The architecture; `InputError` where it is not known."""
        kind = self.plan.parts.config.model_type
        name = self.architecture or architecture_of(kind)
        if name is None:
            raise InputError(
                f"what a GGUF of {kind} calls its architecture is not known here: give the GGUF "
                "file itself"
            )
        return name


def emit(wanted: Wanted, engine: str) -> str:
    """What `engine` needs, as text: one of `ENGINES`.

    Raises `InputError` for an engine or a version that is not known, a method that the engine does
    not have, and a model whose configuration cannot express the method.
    """
    spec, version = wanted.plan.spec, wanted.version
    if engine in _REFUSED:
        raise InputError(f"--emit cannot write it for {engine}: {_REFUSED[engine]}")
    if engine not in ENGINES:
        raise InputError(f"--emit knows {', '.join(ENGINES)}, not {engine!r}")
    lacks = None
    if replaces_attention(spec):
        lacks = "engines apply a method by its frequencies and a factor, and this changes attention"
    elif isinstance(spec.rope_scaling, NTKMixed) and engine != "vllm":
        lacks = "only vLLM has a base for each frequency"
    if lacks is not None:
        raise InputError(f"{engine} has no {spec.method_text}: {lacks}; normattn.extend applies it")
    rule = ENGINES[engine]
    if version is not None and _release(version) < rule.oldest:
        raise InputError(
            f"--engine-version {version}: {engine} was checked with {rule.checked}; older "
            "versions use other names and rules, which were not checked"
        )
    return rule.write(wanted)


def _release(version: str) -> tuple[int, int]:
    """Major and minor of `"0.33.0"`: (0, 33). `InputError` for what is no version."""
    major, _, rest = version.removeprefix("v").partition(".")
    minor = rest.partition(".")[0] or "0"
    if not (major.isdigit() and minor.isdigit()):
        raise InputError(f"--engine-version {version!r} is not a version such as 0.33.0")
    return int(major), int(minor)


def _config_json(wanted: Wanted) -> str:
    """Fields for config.json (`modeling_rope_utils.py`); version 4 has other names for them."""
    old = wanted.version is not None and _release(wanted.version) < (5, 0)
    fields = _as_version_4(wanted.fields) if old else wanted.fields
    return wanted.as_json(fields, indent=2) + "\n"


def _mlx(wanted: Wanted) -> str:
    """Fields for config.json in the words that mlx-lm reads (`initialize_rope`, rope_utils.py)."""
    fields = _as_version_4(wanted.fields)
    if "truncate" in (fields.get("rope_scaling") or {}):
        raise InputError("mlx-lm has YaRN with ⌊ ⌋ and ⌈ ⌉ only, not truncate=false")
    return wanted.as_json(fields, indent=2) + "\n"


def _as_version_4(fields: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta next to rope_scaling, as transformers had them before version 5."""
    rope = dict(fields["rope_parameters"])
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise InputError(
            "one rope_scaling, as in transformers before version 5, cannot hold two kinds of "
            "frequencies"
        )
    beside = {
        name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") & rope.keys()
    }
    scaling = None if kind_of(rope) == "default" else rope
    length = {"max_position_embeddings": fields["max_position_embeddings"]}
    return {**length, **beside, "rope_scaling": scaling}


def _vllm(wanted: Wanted) -> str:
    """`--hf-overrides` and `--max-model-len`.

    rope_parameters replace the whole, so that rope_theta is given again; `ntk` with mixed_b is
    NTK-mixed (ntk_scaling_rope.py).
    """
    parts, layers, spec = wanted.plan.parts, wanted.plan.layers, wanted.plan.spec
    if isinstance(spec.rope_scaling, NTKMixed):
        mixed = {"mixed_b": spec.rope_scaling.b, "factor": spec.rope_scaling.stretch}
        rope = rope_with(parts, layers, spec, {"rope_type": "ntk", **mixed})
        fields = {"max_position_embeddings": wanted.longest, "rope_parameters": rope}
    else:
        fields = wanted.fields
    fields = _without_multiplied_length(wanted, fields, "vllm")
    return _command(
        f"vllm serve {shlex.quote(wanted.model)}",
        f"--hf-overrides {shlex.quote(wanted.as_json(fields))}",
        f"--max-model-len {wanted.longest}",
    )


def _sglang(wanted: Wanted) -> str:
    """`--json-model-override-args` and `--context-length`.

    get_rope in sglang/srt/layers/rotary_embedding/factory.py reads attn_factor, a multiple of
    0.1·ln s + 1, and no attention_factor; rope_parameters whole, for an override of rope_scaling
    alone has dropped the rotary base (sgl-project/sglang issue 41227).
    """
    fields = _without_multiplied_length(wanted, wanted.fields, "sglang")
    ropes: Any = innermost(fields["rope_parameters"])
    for rope in ropes:
        if "attention_factor" in rope:
            usual = 0.1 * math.log(rope["factor"]) + 1
            rope["attn_factor"] = rope.pop("attention_factor") / usual
    return _command(
        f"python -m sglang.launch_server --model-path {shlex.quote(wanted.model)}",
        f"--json-model-override-args {shlex.quote(wanted.as_json(fields))}",
        f"--context-length {wanted.longest}",
    )


def _without_multiplied_length(
    wanted: Wanted, fields: dict[str, Any], engine: str
) -> dict[str, Any]:
    """The fields without the length, where the engine multiplies the trained one by itself."""
    whole = {"model_type": wanted.plan.parts.config.model_type, **fields}
    if derived_length(whole, engine) == fields["max_position_embeddings"]:
        return fields
    return {"rope_parameters": fields["rope_parameters"]}


def derived_length(decoder: Mapping[str, Any], engine: str) -> int | None:
    """The longest text that vLLM or SGLang finds in a decoder's configuration by its own rule.

    `_get_and_verify_max_len` of vLLM, `get_context_length` of SGLang.
    """
    length, factor = decoder.get("max_position_embeddings"), 1.0
    for rope in innermost(decoder.get("rope_parameters") or decoder.get("rope_scaling")):
        if engine == "vllm":
            gemma = "gemma3" in str(decoder.get("model_type"))
            multiplied = not gemma and kind_of(rope) not in _UNMULTIPLIED
        else:
            original = "original_max_position_embeddings" in rope
            multiplied = not original and kind_of(rope) != "llama3"
        factor = float(rope.get("factor") or factor) if multiplied else factor
    return int(length * factor) if isinstance(length, int) else None


def _llama_cpp(wanted: Wanted) -> str:
    """Flags of llama-server and its like (tools/server/README.md of ggml-org/llama.cpp)."""
    file = wanted.model if wanted.model.endswith(".gguf") else f"{wanted.model}.gguf"
    options = flags(wanted.fields, wanted.gguf)
    return _command(
        f"llama-server -m {shlex.quote(file)}", f"--ctx-size {wanted.longest}", *options
    )


def gguf_values(wanted: Wanted) -> dict[str, tuple[str, Any]]:
    """The keys of a GGUF file that say the method, with the kind of each value."""
    keys = values(wanted.gguf, wanted.fields)
    if any(".yarn_beta_" in name for name in keys):
        raise InputError(
            "llama.cpp reads a file's beta_fast and beta_slow only in some architectures: use "
            "--emit llama.cpp, whose flags work in all"
        )
    return keys


def _gguf(wanted: Wanted) -> str:
    """Keys of a GGUF file, as key=type:value."""
    keys = gguf_values(wanted)
    return "".join(f"{name}={kind}:{value}\n" for name, (kind, value) in keys.items())


def _command(*lines: str) -> str:
    return " \\\n  ".join(lines) + "\n"


@dataclass(frozen=True)
class Engine:
    """How a method is written for one engine.

    Attributes:
        write: the text that says it.
        checked: the version that its settings were checked with, and how.
        oldest: the oldest version, major and minor, that is written for.
    """

    write: Callable[[Wanted], str]
    checked: str
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

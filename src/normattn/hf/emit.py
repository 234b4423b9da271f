"""What an engine needs to serve a model under a method: a JSON to paste, flags, or GGUF keys.

Engines apply a method by its frequencies and its factor alone. What they are told is checked
against the model's own rotary module before it is printed (`native`), and a method that an engine
has not is refused.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normattn.errors import InputError
from normattn.hf.gguf import flags, values
from normattn.hf.native import native_fields, said
from normattn.hf.plan import Plan
from normattn.score.parts import RopeScaling
from normattn.score.parts.rope_scaling import NTKMixed


@dataclass(frozen=True)
class Wanted:
    """A method with all its values for one model, to be said in an engine's words.

    Attributes:
        model: how the engine is told of the model: a folder, a file, a name on the hub.
        plan: the method for this model.
        longest: tokens that the engine shall read.
        architecture: what a GGUF of the model calls its architecture; None where that is not known.
        inside: the name of the text configuration in a configuration of several, if it is one.
    """

    model: str
    plan: Plan
    longest: int
    architecture: str | None = None
    inside: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the text configuration in transformers' words."""
        return native_fields(self.plan.parts, self.plan.layers, self.plan.spec, self.longest)

    def nested(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields where the whole configuration has them."""
        return fields if self.inside is None else {self.inside: fields}


def emit(wanted: Wanted, engine: str) -> str:
    """What `engine` needs, as text: one of `ENGINES`.

    Raises `InputError` for an engine that is not known, a method that it has not, and a model whose
    configuration cannot say the method.
    """
    if engine not in ENGINES:
        raise InputError(f"no engine {engine!r} is known, of: {', '.join(ENGINES)}")
    lacks = _lacks(wanted.plan.spec.rope_scaling, engine)
    if wanted.plan.spec.chunk_remapping is not None:
        lacks = "its dual chunk attention, if it has one, holds far queries one position further"
    elif wanted.plan.spec.remapping is not None:
        lacks = "it attends in one regime of positions, by rotated keys"
    elif wanted.plan.spec.logn is not None:
        lacks = "it has no factor that grows with the logarithm of the position"
    if lacks is not None:
        raise InputError(
            f"{engine} has no {wanted.plan.spec.method_text}: {lacks}; normattn.extend applies it"
        )
    return ENGINES[engine](wanted)


def _lacks(spectrum: RopeScaling | None, engine: str) -> str | None:
    if spectrum is not None and spectrum.blockwise:
        return (
            "what is called dynamic NTK there gives one base to a whole text, by its length or for "
            "all lengths alike, and not to each position its own"
        )
    if isinstance(spectrum, NTKMixed) and engine != "vllm":
        return "only vLLM has a base for each frequency"
    return None


def _hf(wanted: Wanted) -> str:
    """Fields for config.json (transformers ≥ 5, `modeling_rope_utils.py`)."""
    return json.dumps(wanted.nested(wanted.fields), indent=2) + "\n"


def _vllm(wanted: Wanted) -> str:
    """`--hf-overrides` and `--max-model-len`.

    docs.vllm.ai/en/stable/features/context_extension (`--rope-scaling` is gone; rope_parameters
    replace the whole, so that rope_theta is said again), and get_rope in
    vllm/model_executor/layers/rotary_embedding: `linear` and `yarn` make their tables for factor
    times the trained length by themselves; the others for max_position_embeddings. `ntk` with
    mixed_b is NTK-mixed (ntk_scaling_rope.py).
    """
    spectrum = wanted.plan.spec.rope_scaling
    if isinstance(spectrum, NTKMixed):
        more = {"rope_type": "ntk", "factor": spectrum.stretch, "mixed_b": spectrum.b}
        rope = said(wanted.plan.parts, wanted.plan.layers, wanted.plan.spec, more)
        fields = {"rope_parameters": rope, "max_position_embeddings": wanted.longest}
    else:
        fields = _of_trained_length(wanted, ("linear", "yarn"))
    return _command(
        f"vllm serve {shlex.quote(wanted.model)}",
        f"--hf-overrides {shlex.quote(json.dumps(wanted.nested(fields)))}",
        f"--max-model-len {wanted.longest}",
    )


def _sglang(wanted: Wanted) -> str:
    """`--json-model-override-args` and `--context-length`.

    get_rope in sglang/srt/layers/rotary_embedding/factory.py; rope_parameters whole, for an
    override of rope_scaling alone has dropped the rotary base (sgl-project/sglang issue 41227).
    get_context_length multiplies max_position_embeddings by the factor, but for yarn.
    """
    fields = _of_trained_length(wanted, ("linear",))
    return _command(
        f"python -m sglang.launch_server --model-path {shlex.quote(wanted.model)}",
        f"--json-model-override-args {shlex.quote(json.dumps(wanted.nested(fields)))}",
        f"--context-length {wanted.longest}",
    )


def _of_trained_length(wanted: Wanted, multiplied: tuple[str, ...]) -> dict[str, Any]:
    """The fields without the length where the engine itself multiplies the trained one."""
    fields = copy.deepcopy(wanted.fields)
    rope = fields["rope_parameters"]
    kinds = {rope.get("rope_type")} | {
        nested.get("rope_type") for nested in rope.values() if isinstance(nested, dict)
    }
    if kinds & set(multiplied):
        del fields["max_position_embeddings"]
    return fields


def _llama_cpp(wanted: Wanted) -> str:
    """Flags of llama-server and its like (tools/server/README.md of ggml-org/llama.cpp).

    The server caps a slot at the context_length of the file whatever --ctx-size asks for, hence
    --override-kv.
    """
    file = wanted.model if wanted.model.endswith(".gguf") else f"{wanted.model}.gguf"
    name = f"{_architecture(wanted)}.context_length"
    return _command(
        f"llama-server -m {shlex.quote(file)}",
        f"--ctx-size {wanted.longest}",
        *flags(wanted.fields["rope_parameters"]),
        f"--override-kv {name}=int:{wanted.longest}",
    )


def _gguf(wanted: Wanted) -> str:
    """Keys of a GGUF file, as key=type:value."""
    keys = gguf_values(wanted)
    return "".join(f"{name}={kind}:{value}\n" for name, (kind, value) in keys.items())


def gguf_values(wanted: Wanted) -> dict[str, tuple[str, Any]]:
    """The keys of a GGUF file that say the method, with the kind of each value."""
    return values(_architecture(wanted), wanted.fields)


def _architecture(wanted: Wanted) -> str:
    if wanted.architecture is None:
        kind = wanted.plan.parts.config.model_type
        raise InputError(
            f"what a GGUF of {kind} calls its architecture is not known here: give the GGUF file "
            "itself"
        )
    return wanted.architecture


def _command(*lines: str) -> str:
    return " \\\n  ".join(lines) + "\n"


ENGINES: dict[str, Callable[[Wanted], str]] = {
    "hf": _hf,
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "gguf": _gguf,
}
"""By the names that `--emit` takes."""

"""What llama.cpp computes of positions, from the keys of a GGUF file and the flags of a command.

ggml-org/llama.cpp: `llama_context` (src/llama-context.cpp) resolves flags and keys, `rope_yarn`
(ggml/src/ggml-cpu/ops.cpp) turns them into angles, tools/server/README.md lists flags and
environment variables, gguf-py/gguf/constants.py keys. Its YaRN is the paper's, with ⌊ ⌋ and ⌈ ⌉.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError

ENVIRONMENT = {
    "LLAMA_ARG_CTX_SIZE": "--ctx-size",
    "LLAMA_ARG_ROPE_SCALING_TYPE": "--rope-scaling",
    "LLAMA_ARG_ROPE_SCALE": "--rope-scale",
    "LLAMA_ARG_ROPE_FREQ_BASE": "--rope-freq-base",
    "LLAMA_ARG_ROPE_FREQ_SCALE": "--rope-freq-scale",
    "LLAMA_ARG_YARN_ORIG_CTX": "--yarn-orig-ctx",
    "LLAMA_ARG_YARN_EXT_FACTOR": "--yarn-ext-factor",
    "LLAMA_ARG_YARN_ATTN_FACTOR": "--yarn-attn-factor",
    "LLAMA_ARG_YARN_BETA_FAST": "--yarn-beta-fast",
    "LLAMA_ARG_YARN_BETA_SLOW": "--yarn-beta-slow",
}
FLAGS = frozenset(ENVIRONMENT.values())
_KINDS = ("none", "linear", "yarn", "longrope")
_DEFAULT_BASE = 10000.0
_OF_ARCHITECTURE = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": 1.0,
}
"""Keys that only the loaders of some architectures read, and what the others take instead."""
Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """What llama.cpp computes: of layers that see everything, and of those within a window.

    Attributes:
        full, within: frequencies and amplitude.
        score_gain: what DeepSeek's YaRN multiplies the softmax scale with.
        longest: the tokens of a slot, which the server caps at the file's context_length.
        ignored: flags without effect, a sentence each.
        rope: the scaling in transformers' words.
    """

    full: tuple[Tensor, float]
    within: tuple[Tensor, float]
    score_gain: float
    longest: int | None
    ignored: tuple[str, ...]
    rope: dict[str, Any]


def flags(rope: Mapping[str, Any], architecture: str) -> list[str]:
    """The flags that say these rope parameters. Raises `InputError` for what has none."""
    own = _one_scaling(rope)
    kind, base = str(own.get("rope_type", "default")), own.get("rope_theta")
    options = [] if base is None else [f"--rope-freq-base {short(base)}"]
    if kind == "default":
        return options
    options.append(f"--rope-scaling {kind} --rope-scale {short(own['factor'])}")
    if kind == "yarn":
        options.append(f"--yarn-orig-ctx {own['original_max_position_embeddings']}")
        options += [
            f"--yarn-{name.replace('_', '-')} {short(own[name])}"
            for name in ("beta_fast", "beta_slow")
            if name in own
        ]
        if "attention_factor" in own:
            # --yarn-attn-factor is overwritten where YaRN is on (ggml-org/llama.cpp#17945).
            key = f"{architecture}.rope.scaling.attn_factor"
            options.append(f"--override-kv {key}=float:{short(_beside_own(own))}")
    return options


def values(architecture: str, fields: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The keys of a GGUF file that say these fields, with the kind of each value."""
    rope = _one_scaling(fields["rope_parameters"])
    kind = str(rope.get("rope_type", "default"))
    keys: dict[str, tuple[str, Any]] = {
        "context_length": ("u32", int(fields["max_position_embeddings"]))
    }
    if rope.get("rope_theta") is not None:
        keys["rope.freq_base"] = ("f32", float(rope["rope_theta"]))
    scaling: dict[str, tuple[str, Any]] = {"type": ("str", kind.replace("default", "none"))}
    if kind != "default":
        scaling["factor"] = ("f32", float(rope["factor"]))
    if kind == "yarn":
        length = int(rope["original_max_position_embeddings"])
        scaling["original_context_length"] = ("u32", length)
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                scaling[f"yarn_{name}"] = ("f32", float(rope[name]))
        if "attention_factor" in rope:
            scaling["attn_factor"] = ("f32", _beside_own(rope))
    keys |= {f"rope.scaling.{name}": value for name, value in scaling.items()}
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def _one_scaling(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of the layers that see everything: llama.cpp scales no others."""
    nested = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    own = nested.get("full_attention", rope) if nested else rope
    others = [value for name, value in nested.items() if name != "full_attention"]
    if nested and (own is rope or any(_kind(other) != "default" for other in others)):
        raise InputError(
            "llama.cpp and GGUF hold one kind of scaling, for the layers that see everything; this "
            "model scales others too"
        )
    if own.get("truncate") is False:
        raise InputError("llama.cpp has YaRN with ⌊ ⌋ and ⌈ ⌉ only, not truncate=false")
    kind = _kind(own)
    if kind not in ("default", "linear", "yarn"):
        raise InputError(
            f"llama.cpp reads {kind} frequencies from a tensor of the GGUF file that the converter "
            "writes; flags and keys cannot say them"
        )
    return own


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def serve(
    keys: Keys,
    given: Mapping[str, str],
    file: str,
    width: int,
    divisors: Tensor | None = None,
) -> Served:
    """What llama.cpp makes of GGUF keys (without their architecture) and of flags.

    `width` is the number of rotated features where no key says it; `divisors` are those of
    `rope_freqs.weight`. Raises `InputError` for a value that it would not read.
    """
    number = _Numbers(given, file)
    width = int(keys.get("rope.dimension_count", width))
    base = number.flag("--rope-freq-base") or float(keys.get("rope.freq_base", _DEFAULT_BASE))
    swa_base = float(keys.get("rope.freq_base_swa", keys.get("_swa_base", base)))
    stored = float(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 0.0)
    kind = given.get("--rope-scaling") or str(keys.get("rope.scaling.type", "linear"))
    if kind not in _KINDS:
        raise InputError(f"{file}: llama.cpp has no rope scaling {kind!r}: {', '.join(_KINDS)}")
    scale = number.positive("--rope-scale") if "--rope-scale" in given else 0.0
    if "--rope-freq-scale" in given:
        scale = 1 / number.positive("--rope-freq-scale")
    factor = 1.0 if kind == "none" else (scale or stored or 1.0)
    mix = number.flag("--yarn-ext-factor", -1.0)
    mix = (1.0 if kind == "yarn" else 0.0) if mix < 0 else mix
    context = int(keys.get("context_length", 0))
    trained = number.flag("--yarn-orig-ctx") or float(
        keys.get("rope.scaling.original_context_length") or context
    )
    _refuse_keys_of_architectures(keys, kind, number, file)
    fast = number.at_least_0("--yarn-beta-fast", _OF_ARCHITECTURE["yarn_beta_fast"])
    slow = number.at_least_0("--yarn-beta-slow", _OF_ARCHITECTURE["yarn_beta_slow"])
    log_multiplier = float(keys.get("rope.scaling.yarn_log_multiplier", 0.0)) / 0.1
    amplitude, gain = _amplitude(keys, number, factor, mix, log_multiplier)
    angles = _angles(width, base, divisors)
    scaled = _mixed(angles, factor, mix, _ramp(width, base, trained, fast, slow))
    asked = number.flag("--ctx-size")
    longest = min(int(asked) or context, context) if context else (int(asked) or None)
    return Served(
        (scaled, amplitude),
        (_angles(width, swa_base, None), 1.0),
        gain,
        longest,
        tuple(_ignored(given, kind, mix, asked, context)),
        _in_words(kind, base, factor, trained),
    )


def _refuse_keys_of_architectures(keys: Keys, kind: str, number: _Numbers, file: str) -> None:
    """Raise `InputError` for a key that llama.cpp reads or ignores, by the architecture.

    The loaders of grok and laguna read them; that of llama does not: a file of llama with 16 and 2
    as its betas gave other probabilities than the flags. A flag wins over the key.
    """
    for name, default in _OF_ARCHITECTURE.items():
        key, flag = f"rope.scaling.{name}", f"--{name.replace('_', '-')}"
        usual = {default, 1.0 if kind == "yarn" else 0.0} if "ext" in name else {default}
        if float(keys.get(key, default)) not in usual and number.flag(flag, -1.0) < 0:
            raise InputError(
                f"{file}: llama.cpp reads {key} in some architectures and ignores it in most, so "
                f"what it computes is not known here: say {flag} instead"
            )


def _in_words(kind: str, base: float, factor: float, trained: float) -> dict[str, Any]:
    if kind == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": base}
    words = {"rope_type": kind, "rope_theta": base, "factor": factor}
    return words | ({"original_max_position_embeddings": int(trained)} if kind == "yarn" else {})


def _amplitude(
    keys: Keys, number: _Numbers, factor: float, mix: float, log_multiplier: float
) -> tuple[float, float]:
    """What cos and sin, and what DeepSeek's scores, are multiplied with."""
    stored = float(keys.get("rope.scaling.attn_factor", 1.0))
    if mix == 0:
        return number.at_least_0("--yarn-attn-factor", 1.0) * stored, 1.0
    deepseek = keys.get("general.architecture") == "deepseek2"
    if log_multiplier == 0:
        amplitude = _mscale(factor, 1.0) * stored
    else:
        top = log_multiplier if deepseek and log_multiplier != 1 else 1.0
        amplitude = _mscale(factor, top) / _mscale(factor, log_multiplier) * stored
    gain = (amplitude * (1 + 0.1 * log_multiplier * math.log(factor))) ** 2 if deepseek else 1.0
    return amplitude, gain


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def _angles(width: int, base: float, divisors: Tensor | None) -> Tensor:
    theta = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    return theta if divisors is None else theta / divisors.double()


def _mixed(theta: Tensor, factor: float, mix: float, ramp: Tensor) -> Tensor:
    share = ramp * mix
    return theta / factor * (1 - share) + theta * share


def _ramp(width: int, base: float, length: float, fast: float, slow: float) -> Tensor:
    """1 where a pair keeps its frequency, 0 where the factor divides it."""
    if length <= 0:
        return torch.zeros(width // 2, dtype=torch.float64)
    low, high = (
        width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float64)
    return 1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)


def _ignored(
    given: Mapping[str, str], kind: str, mix: float, asked: float, context: int
) -> list[str]:
    sentences = []
    if kind == "none" and given.keys() & {"--rope-scale", "--rope-freq-scale"}:
        sentences.append("--rope-scale is ignored: with --rope-scaling none llama.cpp sets it to 1")
    if mix and "--yarn-attn-factor" in given:
        sentences.append(
            "--yarn-attn-factor is ignored: llama.cpp overwrites it where YaRN is on; say "
            "--override-kv ARCH.rope.scaling.attn_factor=float:…"
        )
    if context and asked > context:
        sentences.append(
            f"--ctx-size {int(asked):,} is cut to the file's context_length, {context:,}: say "
            "--override-kv ARCH.context_length=int:…"
        )
    return sentences


class _Numbers:
    """The flags' numbers."""

    def __init__(self, given: Mapping[str, str], file: str) -> None:
        self._given, self._file = given, file

    def flag(self, name: str, default: float = 0.0) -> float:
        """The number of a flag; `InputError` where it is none."""
        text = self._given.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError as error:
            raise InputError(f"{self._file}: {name} {text!r} is no number") from error
        if not math.isfinite(value):
            raise InputError(f"{self._file}: {name} {text!r} is no finite number above 0")
        return value

    def at_least_0(self, name: str, default: float) -> float:
        """The number of a flag; the default where it is below 0, which llama.cpp takes as unset."""
        value = self.flag(name, -1.0)
        return default if value < 0 else value

    def positive(self, name: str) -> float:
        """The number of a flag that must be above 0."""
        value = self.flag(name)
        if value <= 0:
            raise InputError(f"{self._file}: {name} {value:g} is no finite number above 0")
        return value


def _beside_own(rope: Mapping[str, Any]) -> float:
    """The factor beside the 1 + 0.1·ln s that llama.cpp multiplies with by itself."""
    return float(rope["attention_factor"]) / (1 + 0.1 * math.log(rope["factor"]))


def short(value: float) -> str:
    """A number without a needless fraction."""
    return re.sub(r"\.0$", "", f"{float(value):.10g}")

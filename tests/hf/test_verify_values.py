"""What `verify` compares: values that engines have been told wrongly in public, and right ones."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

import normattn
from normattn.hf.gguf import write_gguf

from .test_gguf import _write

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 32,
    "vocab_size": 64,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DEEPSEEK = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 4 * n for n in range(8)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
LONG = {"max_position_embeddings": 131072}


def _rope(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("deepseek_v3", {"rope_parameters": DEEPSEEK, "num_hidden_layers": 1}),
    "InternLM3": (
        "internlm3",
        {**SIZES, **HEADS, **_rope(rope_type="dynamic", rope_theta=5e7, factor=6.0)}
        | {"max_position_embeddings": 32768},
    ),
    "Phi-3.5": (
        "phi3",
        {**SIZES, "num_attention_heads": 4, "original_max_position_embeddings": 4096}
        | {"rope_parameters": LONGROPE, "pad_token_id": 0, **LONG},
    ),
    "HunYuan": (
        "hunyuan_v1_dense",
        {**SIZES, **HEADS, **_rope(rope_type="dynamic", alpha=1000.0, factor=1.0), **LONG},
    ),
    "Ministral 3": ("ministral3", {**SIZES, **HEADS, "rope_parameters": MINISTRAL}),
    "Gemma 3": ("gemma3_text", {**SIZES, **HEADS, "num_hidden_layers": 6, "sliding_window": 128}),
    "Phi-MoE": ("phimoe", {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}),
}


def _saved(model: str, folder: Path) -> dict[str, Any]:
    kind, fields = MODELS[model]
    make: Any = transformers.CONFIG_MAPPING[kind]
    make(**copy.deepcopy(fields)).save_pretrained(folder)
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


def _verdict(folder: Path, told: Any, method: str | None = None, **more: Any) -> Any:
    place = folder / ("told" if isinstance(told, str) else "told.json")
    place.write_text(told if isinstance(told, str) else json.dumps(told))
    return normattn.verify(folder, place, method, **more)


@pytest.mark.parametrize("model", MODELS)
def test_an_unchanged_configuration_is_as_meant(model: str, tmp_path: Path) -> None:
    raw = _saved(model, tmp_path)
    verdict = _verdict(tmp_path, raw)
    assert (verdict.differences, verdict.mistakes) == ((), ())


# The softmax scale of DeepSeek-V3 is (0.1·ln 40 + 1)²/√192; of llama 4's temperature the growth at
# the end of the text counts.
SCALE = 192**-0.5
CHANGED: list[tuple[str, dict[str, Any], str, tuple[float, float] | None]] = [
    ("DeepSeek-V3", {"mscale_all_dim": None}, "softmax scale", (SCALE, 1.8739 * SCALE)),
    ("DeepSeek-V3", {"mscale_all_dim": 0.707}, "softmax scale", (1.5896 * SCALE, 1.8739 * SCALE)),
    ("InternLM3", {"factor": 2.0}, "inverse frequencies", None),
    ("Phi-3.5", {"long_factor": [1.0] * 8}, "inverse frequencies", None),
    ("HunYuan", {"alpha": 1.0}, "inverse frequencies", None),
    ("Ministral 3", {"llama_4_scaling_beta": 0.5}, "softmax scale", None),
]


@pytest.mark.parametrize(("model", "changed", "kind", "values"), CHANGED)
def test_a_changed_rope_parameter_is_seen(
    model: str,
    changed: dict[str, Any],
    kind: str,
    values: tuple[float, float] | None,
    tmp_path: Path,
) -> None:
    raw = _saved(model, tmp_path)
    rope = {**raw["rope_parameters"], **changed}
    raw["rope_parameters"] = {name: value for name, value in rope.items() if value is not None}
    verdict = _verdict(tmp_path, raw)
    found = [sentence for sentence in verdict.differences if sentence.startswith(kind)]
    assert found, verdict
    if values is not None:
        numbers = re.findall(r"([0-9.e+-]+) instead of ([0-9.e+-]+)", found[0])[0]
        assert [float(number) for number in numbers] == pytest.approx(values, rel=1e-3)


def test_a_window_of_one_token_less_is_seen(tmp_path: Path) -> None:
    raw = _saved("Gemma 3", tmp_path)
    verdict = _verdict(tmp_path, {**raw, "sliding_window": 127})
    assert any("window: 127 instead of 128" in sentence for sentence in verdict.differences)


def test_an_override_that_drops_a_part_of_the_head_says_so(tmp_path: Path) -> None:
    rope = _rope(partial_rotary_factor=0.5)
    transformers.GlmConfig(**SIZES, **HEADS, **rope).save_pretrained(tmp_path)
    told = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert not _verdict(tmp_path, told).equal


LENGTH = 32768
OVERRIDES = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
        "rope_theta": 10000.0,
    },
    "max_position_embeddings": 4 * LENGTH,
}
JSON, ROPE = json.dumps(OVERRIDES), json.dumps(OVERRIDES["rope_parameters"])
YARN = f"--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx {LENGTH}"
CONTEXT = f"--override-kv llama.context_length=int:{4 * LENGTH}"
COMMANDS: dict[str, tuple[str, bool]] = {
    "vLLM": (f"vllm serve m --hf-overrides '{JSON}' --max-model-len 128K", True),
    "vLLM, underscores": (f"vllm serve m --hf_overrides='{JSON}' --max_model_len 131072", True),
    "vLLM, YAML": (f"model: m\nhf-overrides: {JSON}\nmax-model-len: 131072\n", True),
    "vLLM, beyond": (f"vllm serve m --hf-overrides '{JSON}' --max-model-len 1000000", False),
    "vLLM, length not raised": (
        f"vllm serve m --rope-scaling '{ROPE}' --max-model-len 128K",
        False,
    ),
    "compose": (f"services:\n  a:\n    command: >\n      -c 131072 {YARN} {CONTEXT}\n", True),
    "llama.cpp": (f"llama-server -m m -c 131072 {YARN} {CONTEXT}", True),
    "llama.cpp, no length": (f"llama-server -m m -c 131072 {YARN}", False),
    "llama.cpp, no YaRN": (f"llama-server {YARN} {CONTEXT} --yarn-ext-factor 0", False),
    "llama.cpp, none": (f"llama-server {CONTEXT} --rope-scaling none --rope-scale 4", False),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands_as_people_have_them(case: str, tmp_path: Path) -> None:
    rope = _rope()
    config = transformers.LlamaConfig(**SIZES, **HEADS, **rope, max_position_embeddings=LENGTH)
    config.save_pretrained(tmp_path)
    command, equal = COMMANDS[case]
    verdict = _verdict(tmp_path, command, "YaRN(factor=4)")
    assert verdict.equal == equal, verdict


def test_a_file_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    """A factor without a type is linear, and a flag that YaRN overwrites is said to be ignored."""
    pytest.importorskip("gguf")
    plain, scaled = tmp_path / "plain.gguf", tmp_path / "scaled.gguf"
    _write(plain, [*map(chr, range(33, 97)), '!"'])
    keys = {"llama.rope.scaling.factor": ("f32", 4.0), "llama.context_length": ("u32", 64)}
    write_gguf(plain, scaled, keys)
    assert normattn.verify(plain, scaled, "PI(factor=4)").equal
    command = tmp_path / "told"
    length = "-c 64 --override-kv llama.context_length=int:64 --yarn-orig-ctx 16"
    command.write_text(
        f"llama-server {length} --rope-scaling yarn --rope-scale 4 --yarn-attn-factor 2"
    )
    verdict = normattn.verify(plain, command, "YaRN(factor=4)")
    assert any(said.startswith("--yarn-attn-factor is ignored") for said in verdict.differences)

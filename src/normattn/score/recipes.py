"""The scores of well-known models, by the models' names: `ScoreSpec.parse("gpt-oss")`.

Tests compare the components with transformers' attention layers. The numbers are meant to match the
named release, but only those of Command R7B and DeepSeek-V3 were checked against its configuration.
Read the configuration with `normattn score` before relying on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RECIPES: Mapping[str, str] = MappingProxyType(
    {
        # CohereLabs/c4ai-command-r7b-12-2024
        "Command-R7B": (
            "Baseline-RoPE(base=50000,layout=interleaved)-SlidingWindow(window=4096)"
            "-NoPEEvery(every=4)"
        ),
        # deepseek-ai/DeepSeek-V3: the last 64 of the 192 features of a query or key rotate
        "DeepSeek-V3": (
            "Baseline-PartialRoPE(layout=interleaved,fraction=0.3334,side=last)-YaRN(factor=40)"
            "@4096"
        ),
        # google/gemma-2-9b
        "Gemma-2": "Baseline-SoftCap(cap=50)-FullEvery(window=4096)",
        # google/gemma-3-4b and -12b; the 27b also has scale=168^(-1/2)
        "Gemma-3": "QKRMSNorm-FullEvery(every=6,window=1024,base=1000000,stretch=8)",
        # openai/gpt-oss-20b and -120b
        "gpt-oss": (
            "Baseline-RoPE(base=150000)-YaRN(factor=32,truncate=false)-Sink"
            "-FullEvery(window=128,stretched=true)@4096"
        ),
        # meta-llama/Llama-3.1-8B
        "Llama-3.1": "Baseline-RoPE(base=500000)-Llama3(factor=8)@8192",
        # transformers' llama4 as configured by default
        "Llama-4": (
            "QKRMSNorm(gain=false,eps=1e-5)-RotateFirst-RoPE(base=500000,layout=interleaved)"
            "-Chunked(size=8192)-IRoPE"
        ),
        # transformers' ministral3 as configured by default
        "Ministral-3": (
            "Baseline-Temperature(length=16384)-RoPE(base=1000000)-YaRN(factor=16,sharpness=0)"
            "@16384"
        ),
        # allenai/OLMo-2-1124-7B
        "OLMo-2": "QKRMSNorm(across=all)-RoPE(base=500000)",
        # Qwen/Qwen2.5-7B
        "Qwen2.5": "Baseline-RoPE(base=1000000)",
        # Qwen/Qwen3-8B
        "Qwen3": "QKRMSNorm-RoPE(base=1000000)",
        # Qwen/Qwen3-Next-80B-A3B: its attention layers, every fourth
        "Qwen3-Next": "QKRMSNorm-PartialRoPE(base=10000000,fraction=0.25)-Gate",
        # HuggingFaceTB/SmolLM3-3B
        "SmolLM3": "Baseline-RoPE(base=5000000)-NoPEEvery(every=4)",
    }
)

_LOWERED = {name.lower(): text for name, text in RECIPES.items()}


def recipe(name: str) -> str | None:
    """The score of the model `name`, in any case; None if it is unknown."""
    return _LOWERED.get(name.lower())

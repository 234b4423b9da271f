"""`normattn score`: what it prints of a model, and of what is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from cli.conftest import Command

from . import tiny
from .families import configuration

_BY_LAYER = ("intermediate_size", "activation_sparsity_pattern")


def test_the_command_names_layers(tmp_path: Path, command: Command) -> None:
    configuration("Qwen3").save_pretrained(tmp_path)
    out = command("score", tmp_path, "--tokens", 16).out
    assert "qwen3, 2 attention layers" in out
    assert "layer 0-1: QKRMSNorm (verified on 16 tokens" in out
    record = json.loads(command("score", tmp_path / "config.json", "--json", "--tokens", 16).out)
    assert record["verified"]
    assert [each["score"] for each in record["layers"]] == ["QKRMSNorm"] * 2
    tiny.configuration("bitnet").save_pretrained(tmp_path)
    said = command("score", tmp_path, "--tokens", 16)
    assert said.code == 1
    assert "its output is changed before the last projection" in said.out


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        ("deepseek_v3", "Baseline-PartialRoPE(layout=interleaved,fraction=0.3334,side=last)"),
        ("doge", "QKRMSNorm"),
        ("gemma3n_text", "QKRMSNorm(scale=1)-SlidingWindow(window=512)"),
    ],
)
def test_the_command_reads_sizes_as_released(
    kind: str, score: str, tmp_path: Path, command: Command
) -> None:
    """Groups of experts, sizes by layer, ratios of widths and ranks survive in the small model."""
    make: Any = transformers.CONFIG_MAPPING[kind]
    few: dict[str, Any] = {"num_hidden_layers": 2}
    if kind == "gemma3n_text":
        few |= {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
        few |= {name: getattr(make(), name)[:2] for name in _BY_LAYER}
    make(**few).save_pretrained(tmp_path)
    said = command("score", tmp_path, "--tokens", 16)
    assert f": {score} (verified on 16 tokens" in said.out


def _strange_positions(folder: Path) -> None:
    configuration("Qwen3").save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    strange = {"rope_type": "spiral", "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps({**raw, "rope_parameters": strange}))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda folder: None, "holds no config.json of transformers"),
    "unknown kind": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "no_such_kind"}'),
        "has model type `no_such_kind` but Transformers does not recognize this architecture",
    ),
    "no attention": (
        lambda folder: transformers.MambaConfig(num_hidden_layers=1).save_pretrained(folder),
        "of a mamba model names no number of attention heads (num_attention_heads is None)",
    ),
    "unknown positions": (_strange_positions, "KeyError: 'spiral'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path, command: Command) -> None:
    make, why = BAD[case]
    make(tmp_path)
    said = command("score", tmp_path, "--tokens", 16)
    assert (said.code, said.out) == (2, "")
    assert why in said.err.splitlines()[-1]
    assert "Traceback" not in said.err

"""`normattn score`: what it prints of a model, and of what is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from normattn.cli.app import app, main

from .families import configuration

_BY_LAYER = ("intermediate_size", "activation_sparsity_pattern")


def test_the_command_names_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configuration("Qwen3").save_pretrained(tmp_path)
    app(args=["score", str(tmp_path), "--tokens", "16"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "qwen3, 2 attention layers" in out
    assert "layer 0-1: QKRMSNorm (verified on 16 tokens" in out
    words = ["score", str(tmp_path / "config.json"), "--json", "--tokens", "16"]
    app(args=words, standalone_mode=False)
    record = json.loads(capsys.readouterr().out)
    assert record["verified"]
    assert [each["score"] for each in record["layers"]] == ["QKRMSNorm"] * 2


@pytest.mark.parametrize(
    ("kind", "more", "score"),
    [
        ("deepseek_v3", {}, "Baseline-PartialRoPE(layout=interleaved,fraction=0.3334,side=last)"),
        ("doge", {}, "QKRMSNorm"),
        ("gemma3n_text", {}, "QKRMSNorm(scale=1)-SlidingWindow(window=512)"),
    ],
)
def test_the_command_reads_sizes_as_released(
    kind: str, more: dict[str, Any], score: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups of experts, sizes by layer, ratios of widths and ranks survive in the small model."""
    make: Any = transformers.CONFIG_MAPPING[kind]
    config = make(**more)
    layers = ["sliding_attention", "full_attention"]
    count: dict[str, Any] = {} if more else {"num_hidden_layers": 2}
    if kind.startswith("gemma"):
        count |= {"layer_types": layers, "num_kv_shared_layers": 0}
    if kind == "gemma3n_text":
        count |= {name: getattr(config, name)[:2] for name in _BY_LAYER}
    make(**count, **more).save_pretrained(tmp_path)
    app(args=["score", str(tmp_path), "--tokens", "16"], standalone_mode=False)
    assert f": {score} (verified on 16 tokens" in capsys.readouterr().out


def _said(capfd: pytest.CaptureFixture[str], model: Path) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["score", str(model), "--tokens", "16"])
    said = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


def test_a_layer_that_computes_something_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundredth more comes out of the second layer than of the attention that it names."""
    from transformers.models.qwen3 import modeling_qwen3

    own = modeling_qwen3.eager_attention_forward

    def more(module: Any, *given: Any, **named: Any) -> Any:
        out, weights = own(module, *given, **named)
        return (out * 1.01 if module.layer_idx == 1 else out), weights

    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", more)
    configuration("Qwen3").save_pretrained(tmp_path)
    code, out, _ = _said(capfd, tmp_path)
    assert code == 1
    assert "layer 0: QKRMSNorm (verified" in out
    why = "layer 1 (Qwen3Attention): its attention differs from that of QKRMSNorm by 9.9e-03"
    assert f"layer 1: QKRMSNorm ({why} of its largest output)" in out


def _strange_positions(folder: Path) -> None:
    configuration("Qwen3").save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    strange = {"rope_type": "spiral", "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps({**raw, "rope_parameters": strange}))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda folder: None, "holds no config.json of transformers"),
    "unknown kind": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "no_such_kind"}'),
        "config.json: model_type is 'no_such_kind', which is not known to transformers 5",
    ),
    "no attention": (
        lambda folder: transformers.MambaConfig(num_hidden_layers=1).save_pretrained(folder),
        "of a mamba model names no number of attention heads (num_attention_heads is None)",
    ),
    "unknown positions": (_strange_positions, "KeyError: it names 'spiral', which is not known"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, why = BAD[case]
    make(tmp_path)
    code, out, error = _said(capfd, tmp_path)
    assert (code, out) == (2, "")
    assert error.startswith("normattn: ")
    assert why in error.splitlines()[-1]
    assert "Traceback" not in error

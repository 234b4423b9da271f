"""What is seen of a transformers model's attention, held against matrices made by brute force."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import normattn
from cli.conftest import Command
from hostile.foreign import write_model
from kernels.memory import largest
from normattn import InputError
from normattn.cli.inspect import observing
from normattn.lab.stats import measurements

from . import tiny
from .matrix import COUNT, logits, tokens

ORACLE: dict[str, list[dict[str, Tensor]]] = {}


def _oracle(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention by whole matrices in float64; what it did is kept."""
    repeat = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    score = q @ k.repeat_interleave(repeat, 1).mT * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    seen = attention_mask[..., : k.shape[2]] == 0
    score = score.masked_fill(~seen, -torch.inf)
    every = score
    if s_aux is not None:
        rest = s_aux.double()[None, :, None, None].expand(*score.shape[:3], 1)
        every = torch.cat((score, rest), -1)
    weight = every.softmax(-1)
    number = (weight > 0).sum(-1).expand(weight.shape[:3])
    entropy = torch.special.entr(weight).sum(-1)
    found = {
        "entropy": entropy.mean((0, 2)),
        "largest": score.amax((0, 2, 3)),
        "first_mass": weight[..., 0].mean((0, 2)),
        "q_norm": q.norm(dim=-1).mean((0, 2)),
        "k_norm": k.norm(dim=-1).mean((0, 2)),
    }
    several = number > 1
    share = torch.where(several, entropy / number.clamp(min=2).log(), 0.0)
    found["entropy_share"] = share.sum((0, 2)) / several.sum((0, 2))
    if s_aux is not None:
        found["sink_mass"] = weight[..., -1].mean((0, 2))
    ORACLE.setdefault(type(module).__name__, []).append(found)
    own = weight[..., : k.shape[2]]
    out = own @ v.repeat_interleave(repeat, 1)
    return out.transpose(1, 2).to(query.dtype), None


AttentionInterface.register("brute_force", _oracle)
AttentionMaskInterface.register("brute_force", eager_mask)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("sdpa", {}),
    "qwen3": ("eager", {}),  # normalised queries and keys
    "gemma2": ("eager", {}),  # capped logits, windows
    "gpt_oss": ("eager", {}),  # a learned sink
    "deepseek_v3": ("sdpa", {}),  # values of another size
    "gemma3_text": ("sdpa", {}),  # windows
    "nanochat": ("eager", {}),
}


def _matrices(model: Any, ids: Tensor) -> list[dict[str, Tensor]]:
    ORACLE.clear()
    before = model.config._attn_implementation
    model.set_attn_implementation("brute_force")
    logits(model, ids)
    model.set_attn_implementation(before)
    (found,) = ORACLE.values()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_what_matrices_say(family: str) -> None:
    attention, more = FAMILIES[family]
    model, ids = tiny.build(family, **more), tokens()
    model.set_attn_implementation(attention)
    plain = logits(model, ids)
    with observing(model) as seen:
        watched = logits(model, ids)
    assert torch.equal(watched, plain)
    assert torch.equal(logits(model, ids), plain)
    expected = _matrices(model, ids)
    lines = seen.lines()
    assert len(lines) == len(expected) == model.config.num_hidden_layers
    assert all(model.get_submodule(name).layer_idx == n for n, name in enumerate(lines))
    for line, matrices in zip(lines.values(), expected, strict=True):
        for name, values in matrices.items():
            ours = torch.tensor(getattr(line, name), dtype=torch.float64)
            torch.testing.assert_close(ours, values, rtol=2e-5, atol=2e-6, msg=name)
        assert (line.sink_mass is None) == ("sink_mass" not in matrices)


@pytest.mark.parametrize("method", [None, "ReRoPE(window=4)", "DynamicNTK", "logn+"])
@pytest.mark.parametrize("hidden", [[0, 1, 2, 3, 4], [-1, -2, -3, -4, -5], [0, 1, 2, 7, 8]])
def test_padding_is_left_out(method: str | None, hidden: list[int]) -> None:
    model, ids = tiny.build("llama"), tokens()[:1]
    real = torch.ones(1, COUNT + 5, dtype=torch.long)
    real[:, hidden] = 0
    padded = torch.zeros_like(real).masked_scatter(real.bool(), ids)
    places = (real.cumsum(-1) - 1).clamp(min=0)
    with normattn.extend(model, method) if method else nullcontext():
        with observing(model) as whole, torch.no_grad():
            model(input_ids=ids, use_cache=False)
        with observing(model) as seen, torch.no_grad():
            model(input_ids=padded, attention_mask=real, position_ids=places, use_cache=False)
    for name, line in whole.lines().items():
        for field in ("entropy", "entropy_share", "largest", "first_mass", "q_norm", "k_norm"):
            ours = getattr(seen.lines()[name], field)
            assert ours == pytest.approx(getattr(line, field), rel=1e-3), field


@pytest.mark.parametrize("method", ["ReRoPE(window=4)", "YaRN(factor=4)-logn+", "PI(factor=4)"])
def test_an_extended_model(method: str) -> None:
    model, ids = tiny.build("llama"), tokens(48)
    with normattn.extend(model, method):
        plain = logits(model, ids)
        with observing(model) as seen:
            watched = logits(model, ids)
        torch.testing.assert_close(watched, plain, rtol=1e-4, atol=1e-5)
    with observing(model) as as_trained:
        logits(model, ids)
    for name, line in as_trained.lines().items():
        assert seen.lines()[name].largest != line.largest
        assert seen.lines()[name].q_norm == pytest.approx(line.q_norm, rel=0.2)


def test_no_matrix_of_all_pairs_is_made() -> None:
    model, count = tiny.build("llama", max_position_embeddings=4096), 2048
    with observing(model), largest() as record, torch.no_grad():
        model.model(input_ids=tokens(count, 1), use_cache=False)
    assert record.numel < count * count


def test_models_that_cannot_be_looked_into() -> None:
    model = tiny.build("gptj")
    with pytest.raises(InputError, match="own attention code"), observing(model):
        logits(model, tokens())


def test_a_layer_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def more(*given: Any, **named: Any) -> Any:
        out, weights = own(*given, **named)
        return out * 1.25, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", more)
    model = tiny.build("llama")
    model.set_attn_implementation("eager")
    why = "LlamaAttention .* differs by 2.5e-01 of the largest"
    with pytest.raises(InputError, match=why), observing(model):
        logits(model, tokens())


def test_configurations_are_put_back_after_an_error() -> None:
    model = tiny.build("llama")
    before = [each.__dict__.get("config") for each in model.modules()]
    with pytest.raises(RuntimeError, match="stop"), observing(model):
        raise RuntimeError("stop")
    now = [each.__dict__.get("config") for each in model.modules()]
    assert all(one is other for one, other in zip(before, now, strict=True))


def test_the_command_looks_into_a_folder(tmp_path: Path, command: Command) -> None:
    folder, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    text.write_text(" ".join(f"word{(i * i) % 97}" for i in range(400)))
    write_model(folder, initializer_range=0.3)
    asked = ("inspect", folder, "--text", text, "--length", 96, "--windows", 2, "--out", out)
    said = command(*asked, "--attention", "1,1")
    assert said.code == 0, said.err
    assert "model, unmodified: 2 windows of 96 tokens of" in said.out
    measured = measurements.read(out / measurements.FILE)
    assert measured.filter(protocol="drawn")["head"].unique().to_list() == [1]
    largest = measured.filter(statistic="largest", layer=0).group_by("head").agg(pl.max("sum"))
    assert largest.height == 2
    said = command(*asked, "--method", "YaRN(factor=2)")
    assert said.code == 0, said.err
    stretched = measurements.read(out / measurements.FILE)
    assert stretched["method"].unique().to_list() == ["YaRN(factor=2)"]
    assert stretched["sum"].to_list() != measured["sum"].to_list()
    refusals = {
        ("--attention", "9,0"): "this model has layers 0 to 1",
        ("--length", "4000"): "give more text",
        ("--method", "YaRM(factor=2)"): "did you mean YaRN",
    }
    for more, why in refusals.items():
        said = command(*asked, *more)
        assert (said.code, said.out) == (2, ""), more
        assert why in said.err

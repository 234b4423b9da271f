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
from transformers.models.llama import modeling_llama

import normattn
from cli.conftest import Command
from hostile.foreign import write_model
from kernels.memory import largest
from normattn import InputError
from normattn.cli.inspect import observing
from normattn.lab.stats import measurements

from . import tiny
from .families import logits
from .matrix import COUNT, tokens

FOUND: list[dict[str, Tensor]] = []


def _brute_force(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **more: Any
) -> tuple[Tensor, None]:
    """Attention by whole matrices in float64; what it did is kept."""
    scaling, softcap, s_aux = (more.get(name) for name in ("scaling", "softcap", "s_aux"))
    q = query.double()
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (key, value))
    score = q @ k.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(attention_mask[..., : k.shape[2]] != 0, -torch.inf)
    every = score
    if s_aux is not None:
        rest = s_aux.double()[None, :, None, None].expand(*score.shape[:3], 1)
        every = torch.cat((score, rest), -1)
    weight = every.softmax(-1)
    entropy, number = torch.special.entr(weight).sum(-1), (weight > 0).sum(-1)
    several = number > 1
    share = torch.where(several, entropy / number.clamp(min=2).log(), 0.0)
    found = {
        "entropy": entropy.mean((0, 2)),
        "entropy_share": share.sum((0, 2)) / several.sum((0, 2)),
        "largest": score.amax((0, 2, 3)),
        "first_mass": weight[..., 0].mean((0, 2)),
        "q_norm": q.norm(dim=-1).mean((0, 2)),
        "k_norm": key.double().norm(dim=-1).mean((0, 2)),
    }
    FOUND.append(found if s_aux is None else found | {"sink_mass": weight[..., -1].mean((0, 2))})
    return (weight[..., : k.shape[2]] @ v).transpose(1, 2).to(query.dtype), None


AttentionInterface.register("brute_force", _brute_force)
AttentionMaskInterface.register("brute_force", eager_mask)
FAMILIES = {
    "llama": "sdpa",
    "qwen3": "eager",  # normalised queries and keys
    "gemma2": "eager",  # capped logits, windows
    "gpt_oss": "eager",  # a learned sink
    "deepseek_v3": "sdpa",  # values of another size
    "gemma3_text": "sdpa",  # windows
    "nanochat": "eager",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_what_matrices_say(family: str) -> None:
    model, ids = tiny.build(family), tokens()
    model.set_attn_implementation(FAMILIES[family])
    plain = logits(model, ids)
    with observing(model) as seen:
        assert torch.equal(logits(model, ids), plain)
    assert torch.equal(logits(model, ids), plain)
    FOUND.clear()
    model.set_attn_implementation("brute_force")
    logits(model, ids)
    lines = seen.lines()
    assert len(lines) == len(FOUND) == model.config.num_hidden_layers
    assert all(model.get_submodule(name).layer_idx == n for n, name in enumerate(lines))
    for line, matrices in zip(lines.values(), FOUND, strict=True):
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
        with observing(model) as whole:
            logits(model, ids)
        with observing(model) as seen:
            logits(model, padded, attention_mask=real, position_ids=places)
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


def test_what_cannot_be_looked_into_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention code of its own, and a layer that computes something else."""
    own = modeling_llama.eager_attention_forward
    changed = lambda *given, **named: (own(*given, **named)[0] * 1.25, None)  # noqa: E731
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", changed)
    for family, why in (
        ("gptj", "own attention code"),
        ("llama", r"LlamaAttention .* differs by 2\.5e-01 of the largest"),
    ):
        model = tiny.build(family, attn_implementation="eager")
        with pytest.raises(InputError, match=why), observing(model):
            logits(model, tokens())
        assert model.config._attn_implementation == "eager"


def test_the_command_looks_into_a_folder(tmp_path: Path, command: Command) -> None:
    folder, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    text.write_text(" ".join(f"word{(i * i) % 97}" for i in range(400)))
    write_model(folder, initializer_range=0.3)
    asked = ("inspect", folder, "--text", text, "--length", 96, "--windows", 2, "--out", out)
    said = command.done(*asked, "--attention", "1,1")
    assert "model, unmodified: 2 windows of 96 tokens of" in said.out
    measured = measurements.read(out / measurements.FILE)
    assert measured.filter(protocol="drawn")["head"].unique().to_list() == [1]
    largest = measured.filter(statistic="largest", layer=0).group_by("head").agg(pl.max("sum"))
    assert largest.height == 2
    command.done(*asked, "--method", "YaRN(factor=2)")
    stretched = measurements.read(out / measurements.FILE)
    assert stretched["method"].unique().to_list() == ["YaRN(factor=2)"]
    assert stretched["sum"].to_list() != measured["sum"].to_list()
    for option, value, why in (
        ("--attention", "9,0", "this model has layers 0 to 1"),
        ("--length", "4000", "give more text"),
        ("--method", "YaRM(factor=2)", "did you mean YaRN"),
    ):
        said = command(*asked, option, value)
        assert said.out == ""
        assert why in said.last

"""QK-Clip and nGPT's unit weights: what a step does to the weights, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from normattn import CausalLM, CausalLMConfig
from normattn.errors import InputError
from normattn.lab.diagnostics import DiagnosticsProbe
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.runs import read_metrics
from normattn.lab.training import train_model
from normattn.lab.training.distributed import World
from normattn.lab.training.qk_clip import QKClip
from normattn.lab.training.step import TrainStep
from normattn.lab.training.unit_weights import UnitWeights
from normattn.layers import Attention, CrossAttention, GatedAttentionUnit

from .settings import SMALL, small

ALONE = World(0, 1, torch.device("cpu"))
B, T, DIM = 2, 7, 12


def drawn(layer: Any) -> Any:
    """The layer with weights that give logits of about 10, offsets and biases too."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def products(layer: nn.Module, x: Tensor, source: Tensor, seen: Tensor) -> Tensor:
    """The largest q·k/√d of each head over the pairs that are seen, by the weights themselves."""
    if isinstance(layer, CrossAttention):
        q = layer.q(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        k = layer.kv(source).unflatten(-1, (2 * layer.kv_heads, -1)).transpose(1, 2)
        k = k[:, : layer.kv_heads]
    else:
        assert isinstance(layer, Attention | GatedAttentionUnit)
        q, k, _, _ = layer.operands(x)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    largest: Tensor = logits.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    return largest


LAYERS: dict[str, Any] = {
    "heads": lambda: Attention(DIM, 4, score="Baseline-NoPE", bias=True),
    "grouped": lambda: Attention(DIM, 4, 2, score="Baseline-NoPE", qkv_bias=True),
    "across": lambda: CrossAttention(DIM, 4, 2),
    "gau": lambda: GatedAttentionUnit(DIM, 6, score="Baseline-NoPE", offset=True),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_heads_beyond_the_threshold_come_back_to_it(kind: str) -> None:
    torch.manual_seed(0)
    layer = drawn(LAYERS[kind]()).double()
    x, source = torch.randn(B, T, DIM).double(), torch.randn(B, 5, DIM).double()
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, 4:] = True
    seen = ~padding[:, None, :, None]
    if kind == "across":
        memory = layer.remember(source)
        given: dict[str, Any] = {"memory": memory, "query_padding": padding}
        seen = seen.expand(B, 1, T, 5)
    else:
        given = {"key_padding": padding}
        seen = seen & ~padding[:, None, None, :] & torch.ones(T, T).tril().bool()
    before = products(layer, x, source, seen).detach()
    threshold = 0.8 * float(before.median())
    clip = QKClip(layer, threshold, ALONE)
    with clip.recording():
        layer(x, **given)
    outputs = {name: p.clone() for name, p in layer.named_parameters()}
    assert clip.clip() == pytest.approx(float(before.max()), rel=1e-6)
    after = products(layer, x, source, seen)
    torch.testing.assert_close(after, before.clamp(max=threshold), rtol=1e-6, atol=0)
    rows = {"qkv.weight": -12, "kv.weight": -6}
    for name, p in layer.named_parameters():
        if name.startswith(("out", "expand")):
            assert torch.equal(p, outputs[name]), name
    changed = [name for name, p in layer.named_parameters() if not torch.equal(p, outputs[name])]
    assert changed
    for name, values in rows.items():
        if name in outputs and kind != "grouped":
            assert torch.equal(layer.get_parameter(name)[values:], outputs[name][values:])
    # What a step saw counts for that step alone.
    assert clip.clip() == -torch.inf
    torch.testing.assert_close(products(layer, x, source, seen), after, rtol=0, atol=0)


def test_a_training_is_bounded_and_one_that_needs_no_bound_is_unchanged(tmp_path: Path) -> None:
    model = {**SMALL["model"], "score": "Baseline"}
    settings: dict[str, Any] = {"steps": 8, "optimiser": {"lr": 0.05}, "model": model}
    losses, largest, shares = {}, {}, {}
    for name, more in {"free": {}, "high": {"qk_clip": 1e6}, "low": {"qk_clip": 0.5}}.items():
        probes = (DiagnosticsProbe(1, warn=lambda said: None),)
        config = small(**settings, **more)
        train_model(config, tmp_path / name, show_progress=False, probes=probes)
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        losses[name] = [line["loss"] for line in lines]
        largest[name] = [line["largest_logit"] for line in lines if "largest_logit" in line]
        layers = [y for x in read_diagnostics(tmp_path / name) for y in x.layers.values()]
        shares[name] = [share for layer in layers for share in layer.entropy_share]
    assert not largest["free"]
    assert len(largest["high"]) == len(largest["low"]) == 8
    # To rounding: what is observed may go by another kernel.
    assert losses["high"] == pytest.approx(losses["free"], rel=1e-4)
    assert losses["low"] != pytest.approx(losses["free"], rel=1e-4)
    assert largest["high"][-1] > 2 * largest["low"][-1]
    assert len(shares["free"]) == 8 * 2 * 2
    assert shares["high"] == pytest.approx(shares["free"], rel=1e-4)


@pytest.mark.parametrize(
    ("score", "why"),
    [
        ("KNA", "its norm undoes it"),
        ("Baseline-SoftCap", "its cap bends"),
        ("Baseline-ALiBi", "its bias is part"),
        ("Baseline-FoX", "its forgetting is part"),
        ("Baseline-RealFormer", "also those of the layers below"),
        ("Baseline-NoPE-Selective", "its first head selects"),
    ],
)
def test_scores_that_weights_do_not_bound(score: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        QKClip(Attention(DIM, 2, score=score), 1.0, ALONE)
    with pytest.raises(InputError, match=why):
        small(model={**SMALL["model"], "score": score}, qk_clip=1.0)
    with pytest.raises(InputError, match="no attention whose weights"):
        QKClip(nn.Linear(2, 2), 1.0, ALONE)
    with pytest.raises(InputError, match="compiled"):
        small(qk_clip=1.0, compile=True)


@pytest.mark.parametrize(
    "score",
    [
        *("Baseline-logn@4", "Baseline-SSMax(bias=true)@4", "Baseline-Sink", "Baseline-Gate"),
        *("Baseline-Sigmoid@4", "Baseline-NoPE-StickBreaking", "Baseline-Differential"),
    ],
)
def test_every_score_that_is_accepted_is_bounded(score: str) -> None:
    """What a step saw is τ at most when the same batch comes again."""
    torch.manual_seed(0)
    layer = drawn(Attention(16, 4, score=score)).double()
    x = torch.randn(B, T, 16).double()
    clip = QKClip(layer, 0.7, ALONE)
    seen = []
    for _ in range(2):
        with clip.recording():
            layer(x)
        seen.append(clip.clip())
    assert seen[0] > 2
    assert seen[1] == pytest.approx(0.7, rel=1e-6)


# nGPT's unit weights.
NGPT: dict[str, Any] = {**SMALL["model"], "score": "NGPT-RotateFirst", "placement": "nGPT"}


@pytest.mark.parametrize("block", ["transformer", "gau"])
@pytest.mark.parametrize("tied", [True, False])
def test_each_matrix_is_normalised_along_the_width(block: str, tied: bool) -> None:
    """Rows of what reads the stream and columns of what writes to it, as the authors' function."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"block": "gau", "key_size": 8} if block == "gau" else {"heads": 2}
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 16, "layers": 2, "train_length": 8, **more}
    model = CausalLM(CausalLMConfig(**sizes, placement="nGPT", tie_head=tied)).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    UnitWeights(model).normalise()
    matrices = set()
    for name, weight in model.named_parameters():
        if not name.endswith(".weight") or weight.ndim < 2:
            assert torch.equal(weight, before[name]), name
            continue
        matrices.add(name.split(".")[-2])
        axis = 0 if name.split(".")[-2] in ("out", "down") else 1
        vectors = before[name] if axis else before[name].t()
        by_hand = torch.stack([vector / sum(vector * vector) ** 0.5 for vector in vectors])
        torch.testing.assert_close(weight, by_hand if axis else by_hand.t())
    named = {"embedding", "expand", "out"} if block == "gau" else {"embedding", "qkv", "out"}
    named |= set() if block == "gau" else {"up", "down"}
    assert matrices == (named if tied else {*named, "head"})


def test_weights_have_length_1_before_the_first_step() -> None:
    settings, cpu = small(model=NGPT, unit_weights=True), torch.device("cpu")
    task = settings.task(settings.prepare(), cpu, 1)
    TrainStep(task, settings, World(0, 1, cpu), lambda: False)
    weight = task.model.get_parameter("embedding.weight")
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(len(weight)))


def test_a_training_keeps_weights_at_length_1(tmp_path: Path) -> None:
    train_model(small(model=NGPT, steps=5, unit_weights=True), tmp_path, show_progress=False)
    for name, weight in load_file(tmp_path / "model" / "model.safetensors").items():
        if weight.ndim == 2 and ".score." not in name:
            axis = 0 if ".out." in name or ".down." in name else 1
            torch.testing.assert_close(weight.norm(dim=axis), torch.ones(weight.shape[1 - axis]))


def test_what_has_no_meaning_is_refused_and_what_is_off_is_not_written() -> None:
    assert "unit_weights" not in small(model=NGPT).model_dump()
    with pytest.raises(InputError, match="placement nGPT"):
        small(unit_weights=True)
    for other in ({"parallel": "fsdp"}, {"qk_clip": 5.0}):
        model = {**NGPT, "score": "Baseline"}
        with pytest.raises(InputError, match="unit_weights"):
            small(unit_weights=True, model=model, **other)

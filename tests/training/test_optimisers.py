"""What a step does to weights: optimisers by their equations, schedules, QK-Clip, unit weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.lab.diagnostics import DiagnosticsProbe
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.runs import read_metrics
from normattn.lab.training.config import (
    AdamWConfig,
    MuonConfig,
    OptimiserConfig,
    ScheduleConfig,
    TigerConfig,
    lr_multiplier,
)
from normattn.lab.training.distributed import World
from normattn.lab.training.optim import UnitWeights, group_parameters, make_optimiser
from normattn.lab.training.qk_clip import QKClip
from normattn.lab.training.step import TrainStep
from normattn.layers import Attention, CrossAttention, GatedAttentionUnit
from normattn.models import CausalLM, CausalLMConfig

from .settings import NGPT, run, small

LR, STEPS = 0.01, 5
SETTINGS: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.8), "eps": 1e-6, "weight_decay": 0.5}
KINDS = {"embedding": "embedding", "linear": "matrix", "wide": "matrix", "head": "head"}
"""Of weights; all else is a vector."""


def kind_of(name: str) -> str:
    return KINDS.get(name.removesuffix(".weight"), "vector")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 6)
        self.wide = nn.Linear(6, 3)
        self.head = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(2, 3))


class AdamW:
    """θ ← θ − η·wd·θ − η·m̂/(√v̂ + ε), without decay of vectors."""

    m, v, t = np.zeros(()), np.zeros(()), 0

    def step(self, kind: str, theta: np.ndarray, g: np.ndarray) -> np.ndarray:
        (a, b), self.t = SETTINGS["betas"], self.t + 1
        self.m, self.v = a * self.m + (1 - a) * g, b * self.v + (1 - b) * g**2
        m, v = self.m / (1 - a**self.t), self.v / (1 - b**self.t)
        decay = 0.0 if kind == "vector" else SETTINGS["weight_decay"]
        return np.asarray(theta * (1 - LR * decay) - LR * m / (np.sqrt(v) + SETTINGS["eps"]))


class TigerByHand:
    """θ ← θ − η_θ·(sign m + wd·θ)."""

    m = np.zeros(())

    def step(self, kind: str, theta: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.m = 0.9 * self.m + 0.1 * g
        if kind == "vector":
            return np.asarray(theta - LR / 2 * np.sign(self.m))
        rate = LR * np.sqrt(np.mean(theta**2))
        if kind == "embedding":
            rate = LR * np.sqrt(np.mean(theta**2, axis=-1, keepdims=True))
        return np.asarray(theta - rate * (np.sign(self.m) + 0.02 * theta))


class MuonByHand(AdamW):
    """Newton-Schulz in float64: five times a·x + (b·xxᵀ + c·(xxᵀ)²)·x from x = u/‖u‖."""

    def step(self, kind: str, theta: np.ndarray, g: np.ndarray) -> np.ndarray:
        if kind != "matrix":
            return super().step(kind, theta, g)
        self.m = 0.95 * self.m + 0.05 * g
        update = 0.95 * self.m + 0.05 * g
        x = update / np.linalg.norm(update)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
        size = 0.2 * np.sqrt(max(theta.shape))
        return np.asarray(theta - LR * (size * x + SETTINGS["weight_decay"] * theta))


ADAMW, MUON = AdamWConfig(**SETTINGS), MuonConfig(**SETTINGS)


@pytest.mark.parametrize(
    ("config", "by_hand", "within"),
    [
        (ADAMW, AdamW, 1e-12),
        (TigerConfig(lr=LR, beta=0.9, weight_decay=0.02), TigerByHand, 1e-12),
        (MUON, MuonByHand, 1e-3),  # torch's Newton-Schulz is in bf16.
    ],
)
def test_steps_match_the_equation(
    config: OptimiserConfig, by_hand: type[AdamW | TigerByHand], within: float
) -> None:
    """Saved and loaded into another model after two steps, which goes on alike."""
    torch.manual_seed(0)
    net, generator = Net().double(), np.random.default_rng(1)
    optimiser = make_optimiser(net, config)
    assert sorted(optimiser.names) == sorted(name for name, _ in net.named_parameters())
    expected = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    rules = {name: by_hand() for name in expected}
    for step in range(STEPS):
        if step == 2:
            other = Net().double()
            other.load_state_dict(net.state_dict())
            state = optimiser.state()
            net, optimiser = other, make_optimiser(other, config)
            optimiser.load_state(state)
        for name, p in net.named_parameters():
            g = generator.normal(size=tuple(p.shape))
            p.grad = torch.from_numpy(g)
            expected[name] = rules[name].step(kind_of(name), expected[name], g)
        optimiser.step(LR)
    for name, p in net.named_parameters():
        atol = within if kind_of(name) == "matrix" else 1e-12
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=0, atol=atol)


@pytest.mark.parametrize(("split", "rows"), [("qkv", [16, 8, 8]), ("heads", [4] * 8), (None, [32])])
def test_projections_that_muon_splits_move_as_matrices_of_their_own(
    split: Literal["qkv", "heads"] | None, rows: list[int]
) -> None:
    torch.manual_seed(0)
    layer = Attention(16, heads=4, kv_heads=2)
    parts = nn.ParameterList(x.clone() for x in torch.split(layer.qkv.weight, rows))
    own = make_optimiser(layer, MUON.model_copy(update={"split": split}))
    apart = make_optimiser(parts, MUON)
    for _ in range(2):
        layer.zero_grad()
        layer(torch.randn(2, 5, 16)).square().sum().backward()
        assert layer.qkv.weight.grad is not None
        for part, gradient in zip(parts, torch.split(layer.qkv.weight.grad, rows), strict=True):
            part.grad = gradient.clone()
        own.step(0.02)
        apart.step(0.02)
    # Heads go through Newton-Schulz as one batch, which rounds otherwise in bf16.
    torch.testing.assert_close(layer.qkv.weight, torch.cat([*parts]), rtol=0, atol=2e-3)


def test_what_is_a_matrix_an_embedding_and_a_vector() -> None:
    settings = {"vocab_size": 11, "dim": 16, "layers": 1, "train_length": 8}
    unit = CausalLM(CausalLMConfig.model_validate({**settings, "block": "gau", "key_size": 8}))
    frozen = next(name for name in group_parameters(unit).vectors if "gamma" not in name)
    unit.get_parameter(frozen).requires_grad_(False)
    groups = group_parameters(unit)
    # A tied parameter is there once, a frozen one not at all, a gain per head is a vector.
    assert len(groups.embeddings) == 1
    assert all(name.endswith(".weight") for name in groups.matrices)
    assert [name for name in groups.vectors if "gamma" in name]
    names = [name for name, _ in groups.items()]
    trained = [name for name, p in unit.named_parameters() if p.requires_grad]
    assert sorted(names) == sorted(trained) == sorted(make_optimiser(unit, TigerConfig()).names)


def test_what_cannot_be_trained_is_refused() -> None:
    net = Net()
    nn.init.zeros_(net.linear.weight)
    with pytest.raises(InputError, match=r"linear\.weight"):
        make_optimiser(net, TigerConfig())
    with pytest.raises(InputError, match=r"optimiser\.split"):
        make_optimiser(Net(), MUON.model_copy(update={"split": "heads"}))
    with pytest.raises(InputError, match="no trainable parameter"):
        make_optimiser(nn.Identity(), ADAMW)
    with pytest.raises(InputError, match="parameters that do not exist"):
        make_optimiser(Net(), ADAMW).load_state({"other/exp_avg": torch.zeros(1)})


def test_schedules_pass_their_known_points() -> None:
    constant = ScheduleConfig(name="constant", warmup_steps=4)
    assert [lr_multiplier(constant, step, 6) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]
    cosine = ScheduleConfig(name="cosine", warmup_steps=10, floor=0.2)
    points = {10: 1.0, 60: 0.6, 35: 0.2 + 0.4 * (1 + math.sqrt(0.5)), 110: 0.2}
    for step, expected in points.items():
        assert lr_multiplier(cosine, step, 110) == pytest.approx(expected, abs=1e-15)
    with pytest.raises(ValidationError, match="floor 0 changes nothing where the learning rate"):
        ScheduleConfig(name="constant", floor=0.0)


# QK-Clip.
ALONE = World(0, 1, torch.device("cpu"))
B, T, DIM = 2, 7, 12


def drawn(layer: Any) -> Any:
    """The layer with weights that give logits of about 10, offsets and biases too."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def products(layer: nn.Module, x: Tensor, source: Tensor, seen: Tensor) -> Any:
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
    return logits.masked_fill(~seen, -torch.inf).amax((0, 2, 3))


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
    old = {name: p.clone() for name, p in layer.named_parameters()}
    assert clip.clip() == pytest.approx(float(before.max()), rel=1e-6)
    after = products(layer, x, source, seen)
    torch.testing.assert_close(after, before.clamp(max=threshold), rtol=1e-6, atol=0)
    changed = [name for name, p in layer.named_parameters() if not torch.equal(p, old[name])]
    assert changed
    assert not [name for name in changed if name.startswith(("out", "expand"))]
    # The rows of values are as they were.
    for name, values in {"qkv.weight": -12 if kind == "heads" else -6, "kv.weight": -6}.items():
        if name in old:
            assert torch.equal(layer.get_parameter(name)[values:], old[name][values:])
    # What a step saw counts for that step alone.
    assert clip.clip() == -torch.inf
    torch.testing.assert_close(products(layer, x, source, seen), after, rtol=0, atol=0)


def test_a_training_is_bounded_and_one_that_needs_no_bound_is_unchanged(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 8, "optimiser": {"lr": 0.05}}
    settings["model"] = {"score": "Baseline"}
    losses, largest, shares = {}, {}, {}
    for name, more in {"free": {}, "high": {"qk_clip": 1e6}, "low": {"qk_clip": 0.5}}.items():
        probes = (DiagnosticsProbe(1, warn=lambda said: None),)
        config = small(**settings, **more)
        run(config, tmp_path / name, probes=probes)
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
        small(model={"score": score}, qk_clip=1.0)
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


def test_weights_have_length_1_before_the_first_step_and_after_the_last(tmp_path: Path) -> None:
    settings = small(model=NGPT, steps=5, unit_weights=True)
    task = settings.task(settings.prepare(), torch.device("cpu"), 1)
    TrainStep(task, settings, ALONE, lambda: False)
    trained = load_file(run(settings, tmp_path).path / "model" / "model.safetensors")
    for name, weight in [*task.model.named_parameters(), *trained.items()]:
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

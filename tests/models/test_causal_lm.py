"""The causal language model: causality, padding, batches, methods, loss, starting values."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import apart
from normattn.errors import InputError
from normattn.kernels.cross_entropy import TokenScores, token_scores
from normattn.layers.attention import Attention
from normattn.layers.feed_forward import SwiGLU
from normattn.layers.residual import DeepNorm, ReZero
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig, Placement
from normattn.score import ScoreSpec

VOCABULARY, LENGTH = 23, 16
BLOCKS: Any = {"mha": {"heads": 4, "kv_heads": 2}, "gau": {"block": "gau", "key_size": 8}}
WIDE: dict[str, Any] = {"vocab_size": 512, "dim": 256, "heads": 4, "train_length": 16}
PLACEMENTS = ["PreLN", "PostLN", "DeepNorm", "ReZero", "AttnRes"]


def _model(**changes: Any) -> CausalLM:
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 16, "layers": 3}
    settings |= {"train_length": LENGTH, "score": "KNA", **changes}
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(**settings)).double()
    for module in model.modules():
        if isinstance(module, ReZero):  # Away from the identity, so that tests see the layers.
            nn.init.constant_(module.alpha, 0.7)
    return model


def _ids(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


MODELS = {(b, p): _model(**BLOCKS[b], placement=p) for b in BLOCKS for p in PLACEMENTS}


@settings(max_examples=24, deadline=None, derandomize=True)
@given(
    which=st.sampled_from(sorted(MODELS)),
    length=st.integers(2, 20),
    cut=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 1000),
)
def test_no_future_token_leaks(which: tuple[str, str], length: int, cut: float, seed: int) -> None:
    model, past = MODELS[which], 1 + int(cut * (length - 1))
    ids, other = _ids(1, length, seed), _ids(1, length, seed + 5000)
    changed = torch.cat([ids[:, :past], other[:, past:]], 1)
    with torch.no_grad():
        difference = (model(ids) - model(changed))[:, :past].abs().max()
    assert difference < 1e-9


@pytest.mark.parametrize("which", [("gau", "DeepNorm"), ("mha", "PostLN"), ("mha", "PreLN")])
@pytest.mark.parametrize("method", ["", "YaRN", "logn+"])
def test_left_padding_changes_nothing(which: tuple[str, str], method: str) -> None:
    model, ids = MODELS[which], _ids(2, 24)
    parameters = {"factor": 4} if method == "YaRN" else {}
    padding = torch.zeros(2, 24, dtype=torch.bool)
    padding[1, :5] = True
    with torch.no_grad(), model.using(method, **parameters):
        padded = model(ids, key_padding=padding)
        torch.testing.assert_close(padded[:1], model(ids[:1]), rtol=0, atol=1e-6)
        torch.testing.assert_close(padded[1:, 5:], model(ids[1:, 5:]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_scores_are_those_of_the_logits(tied: bool) -> None:
    model = _model(**BLOCKS["mha"], tie_head=tied)
    ids = _ids(3, 11)
    logits, targets = model(ids[:, :-1]), ids[:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    hits = logits.argmax(-1) == targets
    result = model.loss(ids)
    torch.testing.assert_close(result.loss, expected.mean(), rtol=0, atol=1e-12)
    assert result.correct == hits.sum()
    scores = model.token_scores(ids)
    torch.testing.assert_close(scores.loss, expected.view(3, 10), rtol=0, atol=1e-12)
    assert torch.equal(scores.correct, hits)
    assert not scores.loss.requires_grad
    assert (model.head_weight is model.embedding.weight) == tied


def test_every_parameter_learns_from_the_loss() -> None:
    for model in MODELS.values():
        model.zero_grad()
        torch.autograd.backward(model.loss(_ids(2, 12)).loss)
        still = {n for n, p in model.named_parameters() if p.grad is None or p.grad.norm() == 0}
        # The first sub-layer of AttnRes has the embedding alone to choose from.
        assert still <= {"blocks.0.mixer.query"}


@pytest.mark.parametrize("block", sorted(BLOCKS))
def test_a_method_is_undone_exactly(block: str) -> None:
    model, ids = MODELS[block, "PreLN"], _ids(2, 40)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(ids)
        with model.using("YaRN", factor=8) as handle:
            assert handle.spec.name == "KNA-YaRN"
            assert (model(ids) - before).abs().max() > 1e-4
        assert (model(ids) - before).abs().max() == 0.0
        handle = model.using(ScoreSpec.parse("KNA-ReRoPE", train_length=LENGTH))
        assert (model(ids) - before).abs().max() > 1e-4
        handle.remove()
        handle.remove()
        assert (model(ids) - before).abs().max() == 0.0
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_a_method_cannot_be_is_refused_and_changes_nothing() -> None:
    model = MODELS["mha", "PreLN"]
    with model.using("as is"), pytest.raises(InputError, match="already switched on"):
        model.using("YaRN", factor=8)
    with pytest.raises(InputError, match="trained"):
        model.using(ScoreSpec.parse("QNA-YaRN(factor=8)"))
    with pytest.raises(InputError, match="factor cannot be added"):
        model.using(ScoreSpec.parse("KNA-YaRN(factor=8)"), factor=4)
    with pytest.raises(InputError, match="factor"):
        model.using("YaRN")
    with pytest.raises(InputError, match=f"from 3 to 99; .* 0 to {VOCABULARY - 1}"):
        model(torch.tensor([[3, 99]]))
    with pytest.raises(InputError, match="128"):
        model.using(ScoreSpec.parse("KNA-NTK(factor=8)@128"))
    with model.using("ReRoPE-logn+") as handle:
        assert handle.active
        assert handle.spec.train_length == LENGTH


def _deviation(weight: Tensor) -> float:
    return float(weight.detach().std())


def test_deepnorm_scales_value_output_and_feed_forward_weights() -> None:
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(**WIDE, layers=8, placement="DeepNorm"))
    beta, xavier = 64**-0.25, math.sqrt(2 / 512)
    alphas = [module.alpha for module in model.modules() if isinstance(module, DeepNorm)]
    assert alphas == [2.0] * 16  # (2 · 8)^¼
    for module in model.modules():
        if isinstance(module, Attention):
            q, k, v = torch.split(module.qkv.weight, 256)
            for weight, expected in ((q, 1), (k, 1), (v, beta), (module.out.weight, beta)):
                assert _deviation(weight) == pytest.approx(expected * xavier, rel=0.02)
        elif isinstance(module, SwiGLU):
            expected = beta * math.sqrt(2 / (256 + module.hidden))
            assert _deviation(module.up.weight) == pytest.approx(expected, rel=0.02)
            assert _deviation(module.down.weight) == pytest.approx(expected, rel=0.02)


def test_a_given_deviation_is_used() -> None:
    torch.manual_seed(0)
    more: dict[str, Any] = {"layers": 2, "init_std": 0.02, "tie_head": False}
    model = CausalLM(CausalLMConfig(**WIDE, **more, placement="PostLN"))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert _deviation(weight) == pytest.approx(0.02, rel=0.03), name


@pytest.mark.parametrize(
    "which", [("gau", "DeepNorm"), *(("mha", placement) for placement in get_args(Placement))]
)
def test_bfloat16_follows_full_precision(which: tuple[str, str]) -> None:
    """Under autocast, and in a model that is cast."""
    model, ids = _model(**BLOCKS[which[0]], placement=which[1]).float(), _ids(2, 17)
    exact, logits = model.loss(ids).loss, model(ids).detach()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(ids).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)
    torch.autograd.backward(loss)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    cast = model.bfloat16()(ids)
    assert cast.dtype == torch.bfloat16
    within = 0.05 * float(logits.abs().max())
    torch.testing.assert_close(cast.float(), logits, rtol=0, atol=within)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens went through the head at a time."""
    rows: list[int] = []

    def counted(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenScores:
        rows.append(len(hidden))
        return token_scores(hidden, weight, targets)

    monkeypatch.setattr("normattn.models.causal_lm.token_scores", counted)
    return rows


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("tokens", "first"), [(256, 130), (200, 150), (1, 0)])
def test_only_the_last_pass_the_head(tokens: int, first: int, bf16: bool, rows: list[int]) -> None:
    model = _model(dim=64, heads=2, vocab_size=512).float()
    ids = torch.randint(512, (3, tokens + 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        whole, last = model.token_scores(ids), model.token_scores(ids, first)
    assert rows == [3 * tokens, 3 * (tokens - first)]
    assert last.loss.shape == last.correct.shape == (3, tokens - first)
    close = 1e-2 if bf16 else 1e-5
    torch.testing.assert_close(last.loss, whole.loss[:, first:], rtol=close, atol=close)
    assert bf16 or torch.equal(last.correct, whole.correct[:, first:])
    for outside in (-1, tokens):
        with pytest.raises(InputError, match=f"{outside} on were asked for, .* predicts {tokens}"):
            model.token_scores(ids, outside)


# A process of its own, because the checker of shapes in the tests is not made to be traced.
COMPILED = """
import torch
from normattn import CausalLM, CausalLMConfig

torch.set_num_threads(1)
for more in ({"heads": 2}, {"block": "gau", "key_size": 8}):
    torch.manual_seed(0)
    config = CausalLMConfig(vocab_size=16, dim=16, layers=1, train_length=8, score="KNA", **more)
    model = CausalLM(config)
    ids = torch.randint(0, 16, (2, 9))
    backend = "aot_eager" if "heads" in more else "eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    logits, expected = compiled(ids), model(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    got = torch.autograd.grad(logits.sin().sum(), list(model.parameters()))
    wanted = torch.autograd.grad(expected.sin().sum(), list(model.parameters()))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    if "heads" in more:
        with torch.no_grad(), model.using("YaRN", factor=4):
            torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=1e-5)
        torch.testing.assert_close(compiled(ids), expected, rtol=0, atol=1e-5)
"""


def test_a_compiled_model_is_one_graph_with_the_same_numbers() -> None:
    done = apart.run(COMPILED)
    assert done.code == 0, done.err[-3000:]

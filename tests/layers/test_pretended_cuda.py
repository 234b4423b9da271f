"""On CUDA no operation mixes devices: every score, models, and models of transformers.

No GPU is needed: tensors only pretend to be there (see `pretended_cuda.py`).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import normattn.kernels.flex as flex
from normattn import CausalLM, CausalLMConfig, InputError, Score, ScoreSpec, attention, generate
from normattn.hf import extend, score_of
from normattn.layers.cache import KeyValueCache
from normattn.layers.residual_scores import residual_layers
from normattn.score.parts import parts
from pretended_cuda import moved, pretend, pretended, pretended_cuda
from thorough import few

HEADS, GROUPS, T, D = 4, 2, 24, 16
SIZES: dict[str, Any] = {"vocab_size": 19, "dim": 16, "heads": 4, "layers": 2, "train_length": 8}
OWN: dict[str, dict[str, Any]] = {"LeakyReRoPE": {"s": 8}, "SelfExtend": {"group": 2}}
NAMES = [name for name, part in parts().items() if part.slot.value not in ("order", "layout")]


def _every_pair(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """Replace `flex_attention`, which modes cannot trace: call its two functions on all pairs."""
    sizes = (*q.shape[:3], k.shape[2])
    at = torch.meshgrid(*(torch.arange(n, device=q.device) for n in sizes), indexing="ij")
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    scores = scores if score_mod is None else score_mod(scores, *at)
    scores = scores.masked_fill(~block_mask(*at), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse


@pytest.fixture(autouse=True)
def _functions_called(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = _every_pair, lambda visible, *sizes, device: visible
    monkeypatch.setattr(flex, "_functions", lambda compiled: functions)


def _spec(name: str) -> ScoreSpec:
    text = name if parts()[name].slot.value == "variant" else f"Baseline-{name}"
    for more in ({"factor": 2.0}, {}):
        try:
            return ScoreSpec.parse(text, T // 2, **more, **OWN.get(name, {}))
        except InputError:
            continue
    raise AssertionError(name)


def _inputs(spec: ScoreSpec) -> tuple[list[Tensor], dict[str, Any]]:
    qkv = [torch.randn(2, heads, T, D) for heads in (HEADS, GROUPS, GROUPS)]
    options: dict[str, Any] = {"causal": not spec.leaks_future}
    if spec.documents:
        options["documents"] = (torch.arange(T) // 9).expand(2, T).contiguous()
    if spec.forgets:
        options["forget"] = torch.randn(2, T, HEADS)
    if spec.gate:
        width = HEADS // 2 if spec.gate.name == "DifferentialV2" else HEADS * D
        options["gate"] = torch.randn(2, T, width)
    return qkv, options


def _there(value: Any) -> Any:
    return pretend(value.clone()) if isinstance(value, Tensor) else value


@torch.no_grad()
@pytest.mark.parametrize("name", few(NAMES, lambda name: NAMES.index(name) % 2 == 0))
def test_a_score_stays_on_its_device(name: str) -> None:
    """Sequences with and without padding and a mask, then decoding; the numbers are the CPU's."""
    torch.manual_seed(0)
    spec = _spec(name)
    score = Score(spec, HEADS, D, GROUPS)
    qkv, options = _inputs(spec)
    padding = torch.arange(T).expand(2, T) < torch.tensor([[2], [0]])
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    there = moved(copy.deepcopy(score))
    for more in ({}, {"key_padding": padding}, {"attn_mask": mask}):
        here, other = ((residual_layers(spec, 2) or [None])[0] for _ in range(2))
        expected = partial(attention, *qkv, score)(residual=here, **options, **more)
        given = {key: _there(value) for key, value in {**options, **more}.items()}
        inputs = [_there(x) for x in qkv]
        with pretended_cuda():
            out = partial(attention, *inputs, there)(residual=other, **given)
        assert pretended(out)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    if spec.leaks_future or spec.documents or spec.residual:
        return
    inputs, cache = [_there(x) for x in qkv], KeyValueCache()
    given = {key: _there(value) for key, value in options.items() if isinstance(value, Tensor)}
    with pretended_cuda():
        for a, b in ((0, T - 2), (T - 2, T - 1), (T - 1, T)):
            rows = {key: value[:, a:b] for key, value in given.items()}
            q, k, v = (x[:, :, a:b] for x in inputs)
            out = attention(q, k, v, there, cache=cache, **rows)
    assert pretended(out)


@pytest.mark.parametrize("score", ["KNA-logn", "KNA-RealFormer", "Baseline-ReRoPE(window=3)"])
def test_a_model_reads_and_generates_on_its_device(score: str) -> None:
    torch.manual_seed(0)
    config = CausalLMConfig(**SIZES, score=ScoreSpec.parse(score))
    model = CausalLM(config).eval()
    there, ids = moved(copy.deepcopy(model)), torch.randint(0, 19, (2, 13))
    with pretended_cuda():
        assert pretended(there.loss(_there(ids)).loss)
        answers = generate(there, [[1, 2, 3], [4]], 6)
    assert answers == generate(model, [[1, 2, 3], [4]], 6)


def test_a_model_of_transformers_is_extended_and_read_on_its_device() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes, **heads)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 64, (1, 48))
    moved(model)
    with pretended_cuda(), torch.no_grad():
        assert len(score_of(model).layers) == 2
        for method in ("YaRN(factor=2)", "ReRoPE", "DynamicNTK(factor=2)", "DualChunk", "logn+"):
            extension = extend(model, method)
            assert pretended(model(_there(ids)).logits), method
            extension.remove()

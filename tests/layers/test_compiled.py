"""`torch.compile` and `torch.export` see one graph, with the same results for texts of any length.

In processes of their own: the run-time type checks of the tests cannot be traced. What is made
while tensors hold no numbers stays with the trace; real calls get real tables.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from layers.written_out import of_program, read_on
from normattn import Score, attention

PROGRAM = """
import json, sys, warnings, torch
from torch._dynamo.testing import CompileCounterWithBackend
from normattn import Score, attention
from normattn.kernels import cross_entropy, linear_cross_entropy
from normattn.layers import residual_layers
from normattn.layers.cache import KeyValueCache
warnings.simplefilter("ignore")
torch.set_num_threads(1)
LENGTHS = (5, 9, 40)

def inputs(length, dtype=torch.float32):
    seed = torch.Generator().manual_seed(length)
    made = [torch.randn(1, 2, length, 8, generator=seed) for _ in range(3)]
    return [x.to(dtype).requires_grad_() for x in made]

class Layer(torch.nn.Module):
    def __init__(self, text):
        super().__init__()
        self.score = Score(text, 2, 8)

    def forward(self, q, k, v):
        return attention(q, k, v, self.score)

class Named(Layer):
    def forward(self, q, k, v):
        return attention(q, k, v, self.score.spec)

def off(one, plain):
    return ((one - plain).abs().max() / plain.abs().max().clamp(min=1)).item()

def worst(call, all_inputs, whole=True, dynamic=None, backend="aot_eager"):
    torch._dynamo.reset()
    run = torch.compile(call, backend=backend, fullgraph=whole, dynamic=dynamic)
    found = []
    for given in all_inputs:
        pairs = []
        for each in (run, call):
            out = each(*given)
            pairs.append((out, *torch.autograd.grad(out.square().sum(), given)))
        found += [off(a, b) for a, b in zip(*pairs)]
    return max(found)

def exported(text):
    layer, length = Layer(text), torch.export.Dim("length", min=2, max=4096)
    at = {name: {2: length} for name in "qkv"}
    run = torch.export.export(layer, tuple(inputs(9)), dynamic_shapes=at).module()
    return max(off(run(*inputs(n)), layer(*inputs(n))) for n in LENGTHS)

def with_lse(q, k, v):
    out, lse = attention(q, k, v, alibi, backend="chunked", return_lse=True)
    return out + lse[..., None]

def two_layers(q, k, v):
    for below in residual_layers(realformer.spec, 2):
        q = attention(q, k, v, realformer, residual=below)
    return q

def loss(h, w):
    return linear_cross_entropy(h.reshape(18, 8), w, torch.arange(18) % 9).loss

alibi, realformer = (Score(f"Baseline-{name}", 2, 8) for name in ("ALiBi", "RealFormer"))
cross_entropy.CHUNK = 4

def check(text, how):
    if how == "export":
        return exported(text)
    if how == "log-sum-exp":
        return worst(with_lse, [inputs(7)])
    if how == "residual":
        return worst(two_layers, [inputs(7)], backend="eager")
    if how == "cross-entropy":
        return worst(loss, [(inputs(9)[0], torch.randn(9, 8, requires_grad=True))])
    if how in ("bfloat16", "float16"):
        backend = "eager" if how == "float16" else "aot_eager"
        return worst(Layer(text), [inputs(7, getattr(torch, how))], backend=backend)
    layer = Named(text) if "named" in how else Layer(text)
    given = [inputs(n) for n in (LENGTHS[:1] if how == "once" else LENGTHS)]
    for x in given[0] if how == "marked" else ():
        torch._dynamo.maybe_mark_dynamic(x, 2)
    whole = "named" not in how or "whole" in how
    # Tracing is what may fail here; the other cases run the compiled backward pass too.
    backend = "aot_eager" if how == "marked" else "eager"
    return worst(layer, given, whole, True if "dynamic" in how else None, backend)

def decoded(text, tokens=16):
    torch._dynamo.reset()
    score, cache = Score(text, 4, 8, 2).eval(), KeyValueCache(tokens)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    graphs = CompileCounterWithBackend("eager")
    step = torch.compile(attention, backend=graphs, fullgraph=True)
    with torch.no_grad():
        outs = [attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], score, cache=cache)]
        for at in range(5, tokens):
            now = slice(at, at + 1)
            outs.append(step(q[:, :, now], k[:, :, now], v[:, :, now], score, cache=cache))
        return off(torch.cat(outs, 2), attention(q, k, v, score)), graphs.frame_count

found = {}
for text, how in json.load(sys.stdin):
    try:
        found[f"{text} {how}"] = decoded(text) if how == "decoded" else check(text, how)
    except Exception as error:
        found[f"{text} {how}"] = f"{type(error).__name__}: {error}"
json.dump(found, sys.stdout)
"""
# Each way to a kernel with lengths that a graph does not know, by a compiler or in an export: two
# regimes and a window; numbers that move with the length and a bias.
MARKED = ("Baseline-ReRoPE(window=3)@8", "QKRMSNorm-SSMax-Sink-SlidingWindow(window=4)@8")
EXPORTED = ("KNA-logn@8", "Baseline-ALiBi")
# Two parts in each graph, where they can stand together.
ONCE = (
    *("CosA-RoPE(layout=interleaved)-ReRoPE(window=3)@8", "Baseline-FIRE-VORoPE@8"),
    *("KNA-ASScale-CoPE@8", "KNA-XLNet-XSA", "NGPT-ScaleInvariant-Entmax", "KNA-NEZHA(clip=3)"),
)
MORE = ("log-sum-exp", "residual", "cross-entropy", "bfloat16")
CASES: dict[str, list[tuple[str, str]]] = {
    "several lengths": [("KNA-logn@8", "auto"), *((text, "marked") for text in MARKED)],
    "export": [(text, "export") for text in EXPORTED],
    "one length": [
        *((text, "once") for text in ONCE),
        *(("Baseline", how) for how in MORE),
        ("KNA-ALiBi", "float16"),
    ],
    "a specification": [("KNA-logn@8", "named"), ("Baseline-ALiBi", "named dynamic")],
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_is_the_same(case: str) -> None:
    found = of_program(PROGRAM, CASES[case])
    assert len(found) == len(CASES[case])
    for name, error in found.items():
        assert isinstance(error, float), (name, error)
        assert error < (2e-2 if "float16" in name else 2e-5), name


def test_what_cannot_be_one_graph_is_refused_in_words() -> None:
    """A spectrum that moves, and a module that would be made within the graph."""
    cases = [("Baseline-DynamicNTK@8", how) for how in ("auto", "export")]
    *moving, made = of_program(PROGRAM, [*cases, ("KNA", "named whole")]).values()
    assert all("run it uncompiled" in str(said) for said in moving), moving
    assert "pass a Score" in str(made)


def test_a_compiled_step_serves_any_number_of_tokens() -> None:
    """Two graphs, where λ grows with n, where a bias goes by distance, and where both do."""
    scores = ["CosA-YaRN(factor=4)-logn+@8", "QKRMSNorm-KERPLELog-logn@8"]
    for name, said in of_program(PROGRAM, [(text, "decoded") for text in scores]).items():
        assert isinstance(said, list), (name, said)
        assert said[0] < 2e-5, (name, said)
        assert said[1] <= 2, (name, said)


# No other test has tables of these sizes, which the first call of each leaves behind.
HEADS, SIZE = 3, 22
TRACED = (
    *("KNA-logn@8", "Baseline-ALiBi", "QKRMSNorm-ReRoPE(window=3)@8", "Baseline-XPos"),
    *("CosA-logn-YaRN(factor=2)@64", "Baseline-SlidingWindow(window=3)", "Baseline-T5Bias"),
)


def _tensors(tokens: int) -> list[Tensor]:
    return list(torch.randn(3, 2, HEADS, tokens, SIZE))


def _fake(score: Score, tokens: int) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = _tensors(tokens)
        assert attention(q, k, v, score).shape == v.shape
        with torch.no_grad():
            read_on(score, (q, k, v), range(4))


def _real_beside_fake(score: Score, tokens: int) -> None:
    q, k, v = _tensors(tokens)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attention(q, k, v, score).shape == v.shape


def _differentiated(score: Score, tokens: int) -> None:
    q, k, v = _tensors(tokens)
    torch.func.grad(lambda q: attention(q, k, v, score).sum())(q)


@pytest.mark.parametrize(
    ("name", "trace", "tokens"),
    [
        *((name, _fake, 19) for name in TRACED),
        *((name, _real_beside_fake, 70) for name in TRACED[:3]),
        *((name, _differentiated, 130) for name in TRACED[:3]),
    ],
)
def test_real_tensors_meet_nothing_of_a_trace(name: str, trace: Any, tokens: int) -> None:
    score = Score(name, HEADS, SIZE)
    trace(score, tokens)
    q, k, v = _tensors(tokens)
    at = torch.arange(tokens)
    # Given positions have tables of their own.
    expected = attention(q, k, v, score, q_positions=at, k_positions=at)
    out = attention(q, k, v, score)
    with torch.no_grad():
        steps = read_on(score, (q, k, v), range(4))
    for found in (out, steps):
        assert type(found) is Tensor
        wanted = expected[:, :, : found.shape[2]]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

"""`torch.compile` sees one graph, and its result and gradients are those without it.

The buffer of residual scores runs between graphs where it is asked for by name.

In a process of its own: the run-time type checks of the tests cannot be traced.
"""

from __future__ import annotations

from layers.written_out import of_program

PROGRAM = """
import json, sys, warnings, torch
from normattn import Score, attention
from normattn.kernels import cross_entropy, linear_cross_entropy
from normattn.layers import residual_layers
warnings.simplefilter("ignore")
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 7, 4, requires_grad=True) for _ in range(3))
weight = torch.randn(9, 4, requires_grad=True)
targets = torch.arange(14) % 9
cross_entropy.CHUNK = 4

def errors(run, inputs, whole=True):
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=whole)
    pairs = []
    for call in (run, compiled):
        out = call(*inputs)
        pairs.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    return max((a - b).abs().max().item() for a, b in zip(*pairs))

found = {}
for text in json.load(sys.stdin):
    score = Score(text, 2, 4)
    found[text] = errors(lambda q, k, v: attention(q, k, v, score), (q, k, v))
plain = Score("Baseline", 2, 4)
for dtype in (torch.bfloat16, torch.float16):
    half = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    found[str(dtype)] = errors(lambda q, k, v: attention(q, k, v, plain), half)
alibi = Score("Baseline-ALiBi", 2, 4)
def with_lse(q, k, v):
    out, lse = attention(q, k, v, alibi, backend="chunked", return_lse=True)
    return out + lse[..., None]

found["log-sum-exp"] = errors(with_lse, (q, k, v))
found["cross-entropy"] = errors(
    lambda h, w: linear_cross_entropy(h.reshape(14, 4), w, targets).loss, (q, weight)
)

def two_layers(q, k, v):
    for below in residual_layers(realformer.spec, 2):
        q = attention(q, k, v, realformer, residual=below, backend="residual")
    return q

realformer = Score("Baseline-RealFormer", 2, 4)
found["residual"] = errors(two_layers, (q, k, v), whole=False)
json.dump(found, sys.stdout)
"""
TEXTS = [
    *("CosA-RoPE(layout=interleaved)-ReRoPE(window=3)@8", "Baseline-FIRE@8", "KNA-CoPE@8"),
    *("KNA-XSA", "Baseline-VORoPE", "KNA-XLNet", "NGPT-ScaleInvariant", "Baseline-ASScale-Entmax"),
    "KNA-NEZHA(clip=3)",
]


def test_one_graph_with_the_same_results() -> None:
    errors = of_program(PROGRAM, TEXTS)
    half = {"torch.bfloat16", "torch.float16"}
    assert set(errors) == {*TEXTS, *half, "log-sum-exp", "cross-entropy", "residual"}
    assert all(errors[name] < 2e-2 for name in half), errors
    assert all(error < 2e-5 for name, error in errors.items() if name not in half), errors

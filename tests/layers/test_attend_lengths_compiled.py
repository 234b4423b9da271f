"""A compiled or exported attention reads texts of any length, in one graph.

In a process of its own: the run-time type checks of the tests cannot be traced.
"""

from __future__ import annotations

import pytest

from layers.written_out import of_program

PROGRAM = """
import json, sys, warnings, torch
from normattn import Score, attention
warnings.simplefilter("ignore")
torch.set_num_threads(1)
LENGTHS = (5, 9, 40)

def inputs(length, half=False):
    seed = torch.Generator().manual_seed(length)
    made = [torch.randn(1, 2, length, 8, generator=seed) for _ in range(3)]
    return [x.requires_grad_() for x in made]

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

def check(text, how):
    torch._dynamo.reset()
    layer = Layer(text)
    worst = 0.0
    if how == "export":
        length = torch.export.Dim("length", min=2, max=4096)
        at = {name: {2: length} for name in "qkv"}
        run = torch.export.export(layer, tuple(inputs(9)), dynamic_shapes=at).module()
        return max(off(run(*inputs(n)), layer(*inputs(n))) for n in LENGTHS)
    if how.startswith("named"):
        layer = Named(text)
    whole = how in ("auto", "dynamic", "named whole")
    dynamic = True if "dynamic" in how else None
    run = torch.compile(layer, backend="aot_eager", fullgraph=whole, dynamic=dynamic)
    for length in LENGTHS:
        qkv = inputs(length)
        out, plain = run(*qkv), layer(*qkv)
        worst = max(worst, off(out, plain))
        grads = (torch.autograd.grad(each.square().sum(), qkv) for each in (out, plain))
        worst = max([worst, *(off(a, b) for a, b in zip(*grads))])
    return worst

found = {}
for text, how in json.load(sys.stdin):
    try:
        found[f"{text} {how}"] = check(text, how)
    except Exception as error:
        found[f"{text} {how}"] = f"{type(error).__name__}: {error}"
json.dump(found, sys.stdout)
"""
# One of each way to a kernel: numbers that move with the length, two regimes, a bias, a window.
EACH_WAY = (
    *("KNA-logn@8", "Baseline-ReRoPE(window=3)@8", "Baseline-ALiBi"),
    "Baseline-Sink-SlidingWindow(window=4)",
)
# The same way as KNA-logn, with less or other arithmetic before it.
FOLDED = ("CosA-RoPE(layout=interleaved)-YaRN(factor=4)@8", "QKRMSNorm-SSMax@8")


@pytest.mark.parametrize(
    ("how", "scores"),
    [("auto", (*EACH_WAY, *FOLDED)), ("export", EACH_WAY)],
)
def test_several_lengths(how: str, scores: tuple[str, ...]) -> None:
    found = of_program(PROGRAM, [(text, how) for text in scores])
    wrong = {name: x for name, x in found.items() if isinstance(x, str) or not x < 2e-5}
    assert len(found) == len(scores)
    assert not wrong


def test_a_spectrum_that_moves_is_refused_in_words() -> None:
    cases = [("Baseline-DynamicNTK@8", how) for how in ("auto", "export")]
    for name, told in of_program(PROGRAM, cases).items():
        assert isinstance(told, str), name
        assert "run it uncompiled" in told, (name, told[:500])


def test_a_specification_is_made_a_module_outside_of_the_graph() -> None:
    cases = [("KNA-logn@8", "named"), ("Baseline-ALiBi", "named dynamic"), ("KNA", "named whole")]
    *found, refused = of_program(PROGRAM, cases).values()
    assert all(isinstance(x, float) and x < 2e-5 for x in found), found
    assert "pass a Score" in str(refused)


DECODING = """
import json, sys, warnings, torch
from torch._dynamo.testing import CompileCounterWithBackend
from normattn import Score, attention
from normattn.layers.cache import KeyValueCache
warnings.simplefilter("ignore")
torch.set_num_threads(1)

def check(text, tokens=16):
    torch._dynamo.reset()
    score, cache = Score(text, 4, 8, 2).eval(), KeyValueCache(tokens)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    graphs = CompileCounterWithBackend("aot_eager")
    step = torch.compile(attention, backend=graphs, fullgraph=True)
    with torch.no_grad():
        outs = [attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], score, cache=cache)]
        for at in range(5, tokens):
            now = slice(at, at + 1)
            outs.append(step(q[:, :, now], k[:, :, now], v[:, :, now], score, cache=cache))
        off = (torch.cat(outs, 2) - attention(q, k, v, score)).abs().max().item()
    return off, graphs.frame_count

json.dump({text: check(text) for text in json.load(sys.stdin)}, sys.stdout)
"""


def test_a_compiled_step_serves_any_number_of_tokens() -> None:
    """Two graphs, where λ grows with n, where a bias goes by distance, and where both do."""
    scores = ["CosA-YaRN(factor=4)-logn+@8", "QKRMSNorm-KERPLELog-logn@8"]
    for name, (off, graphs) in of_program(DECODING, scores).items():
        assert off < 2e-5, (name, off)
        assert graphs <= 2, (name, graphs)

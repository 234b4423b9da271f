"""Bad tensors are refused in a sentence, by the library itself.

The calls run in a process of their own, without the run-time type checks of the tests: users do
not have those, so it is the library's own sentence that must appear.
"""

from __future__ import annotations

import pytest

from layers.written_out import of_program

# name, the call, what its refusal must say
CASES = [
    ("three axes", "attention(q[0], k, v, 'KNA')", "q, k and v must be (batch, heads, tokens"),
    ("batches", "attention(q[:1], k, v, 'KNA')", "must have the same batch size"),
    ("k and v heads", "attention(q, k, v[:, :1], 'KNA')", "k and v must have the same heads"),
    ("sizes", "attention(q, k[..., :2], v, 'KNA')", "q and k must have the same size"),
    ("groups", "attention(q[:, :3], k, v, 'KNA')", "must be a multiple of the key heads"),
    ("dtypes", "attention(q, k.half(), v, 'KNA')", "must share a dtype"),
    (
        "float8 in a cache",
        "attention_cached(*(x.to(e4m3) for x in (q[:, :2], k, v)), Score('KNA', 2, 4), "
        "KeyValueCache())",
        "bfloat16 or float16",
    ),
    ("float8 in a layer", "Attention(8, 2)(x.to(e4m3))", "x must be float32, float64"),
    ("complex", "attention(*(x.cfloat() for x in (q, k, v)), 'KNA-NoPE')", "float32, float64"),
    ("float8 mask", "attention(q, k, v, 'KNA', attn_mask=mask.to(e4m3))", "attn_mask must be"),
    ("odd size", "attention(q[..., :3], k[..., :3], v, 'KNA')", "an even head dimension"),
    ("more queries", "attention(q, k[:, :, 1:], v[:, :, 1:], 'KNA')", "needs q_positions"),
    ("backend", "attention(q, k, v, 'KNA', backend='flash')", "unknown backend 'flash'"),
    ("dropout", "attention(q, k, v, 'KNA', dropout_p=1.0)", "at least 0 and below 1"),
    ("padding shape", "attention(q, k, v, 'KNA', key_padding=padding[:1])", "key_padding must be"),
    (
        "padding dtype",
        "attention(q, k, v, 'KNA', key_padding=padding.int())",
        "key_padding must be",
    ),
    (
        "query padding",
        "attention(q, k, v, 'KNA', query_padding=padding[:, 1:])",
        "query_padding must be boolean of shape (2, 5)",
    ),
    ("mask shape", "attention(q, k, v, 'KNA', attn_mask=mask[:3])", "broadcast to (2, 4, 5, 5)"),
    ("mask dtype", "attention(q, k, v, 'KNA', attn_mask=mask.int())", "attn_mask must be boolean"),
    ("positions shape", "attention(q, k, v, 'KNA', q_positions=at[:3])", "q_positions must be"),
    ("real positions", "attention(q, k, v, 'KNA', q_positions=at.float())", "must be int64 or"),
    ("unsigned", "attention(q, k, v, 'KNA', q_positions=at.byte())", "must be int64 or int32"),
    ("bidirectional", "attention(q, k, v, 'KNA-ReRoPE@8', causal=False)", "for causal attention"),
    ("leak", "attention(q, k, v, 'QKInstanceNorm(gain=false)')", "leaks the future"),
    (
        "restarting positions",
        "attention(q, k, v, 'KNA', q_positions=again, k_positions=again)",
        "name the score with Packed and give documents",
    ),
    ("restarting row", "attention(q, k, v, 'KNA', k_positions=rows)", "documents="),
    ("restarting in a layer", "Attention(8, 2)(x, positions=again)", "documents="),
    (
        "restarting in a cache",
        "attention_cached(q[:, :2], k, v, Score('KNA', 2, 4), KeyValueCache(), positions=rows)",
        "documents=",
    ),
    ("no batch", "Attention(8, 2)(x[0])", "must be (batch, tokens, width)"),
    ("no batch of a source", "CrossAttention(8, 2).remember(x[0])", "source must be (batch"),
    ("open", "attention(q, k, v, 'KNA-YaRN@8')", "needs factor"),
    ("unknown", "attention(q, k, v, 'KNB')", "did you mean KNA"),
    ("built for", "attention(q, k, v, Score('KNA', 4, 8, 2))", "the score was built for 4 query"),
    ("learned", "attention(q, k, v, 'QKRMSNorm')", "make a Score(spec, heads=…, head_dim=…)"),
    ("length 1", "ScoreSpec.parse('KNA', train_length=1)", "whole number of at least 2"),
]
PROGRAM = """
import json, sys, torch
from normattn import Attention, GatedAttentionUnit, InputError, Score, ScoreSpec, attention
from normattn.layers import CrossAttention
from normattn.layers.attention import attention_cached
from normattn.layers.cache import KeyValueCache
q, k, v = (torch.zeros(2, heads, 5, 4) for heads in (4, 2, 2))
at, padding = torch.arange(5), torch.zeros(2, 5, dtype=torch.bool)
again = torch.tensor([0, 1, 2, 0, 1])
rows = torch.stack((at, again))
x, across = torch.zeros(2, 5, 8), CrossAttention(8, 2)
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
mask = torch.ones(5, 5, dtype=torch.bool)
said = {}
for name, call in json.load(sys.stdin):
    try:
        eval(call)
        said[name] = "nothing"
    except InputError as error:
        said[name] = str(error)
    except Exception as error:
        said[name] = f"a traceback of {type(error).__name__}: {error}"
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return of_program(PROGRAM, [(name, call) for name, call, _ in CASES])


@pytest.mark.parametrize(("name", "call", "reason"), CASES, ids=[name for name, _, _ in CASES])
def test_refused_in_a_sentence(said: dict[str, str], name: str, call: str, reason: str) -> None:
    assert reason in said[name], f"{call} said: {said[name]}"
    assert "\n" not in said[name]

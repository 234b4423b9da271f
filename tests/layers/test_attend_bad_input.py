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
    ("devices", "read('KNA'), read('KNA', k=k.to('meta'))", "k is on the meta device"),
    ("float8 in a cache", "kept(q.to(e4m3), k.to(e4m3), v.to(e4m3))", "bfloat16 or float16"),
    ("float8 in a layer", "Attention(8, 2)(x.to(e4m3))", "x must be float32, float64"),
    ("complex", "attention(*(x.cfloat() for x in (q, k, v)), 'KNA-NoPE')", "float32, float64"),
    ("float8 mask", "read('KNA', attn_mask=mask.to(e4m3))", "attn_mask must be"),
    ("odd size", "small(3, 'KNA')", "an even head dimension"),
    ("more queries", "attention(q, k[:, :, 1:], v[:, :, 1:], 'KNA')", "needs q_positions"),
    ("backend", "read('KNA', backend='flash')", "unknown backend 'flash'; expected one of auto, "),
    ("dropout", "read('KNA', dropout_p=1.0)", "at least 0 and below 1"),
    ("padding shape", "read('KNA', key_padding=padding[:1])", "key_padding must be"),
    ("padding dtype", "read('KNA', key_padding=padding.int())", "key_padding must be"),
    ("query padding", "read('KNA', query_padding=padding[:, 1:])", "query_padding must be boolean"),
    ("mask shape", "read('KNA', attn_mask=mask[:3])", "broadcast to (2, 4, 5, 5)"),
    ("mask dtype", "read('KNA', attn_mask=mask.int())", "attn_mask must be boolean"),
    ("positions shape", "read('KNA', q_positions=at[:3])", "q_positions must be"),
    ("real positions", "read('KNA', q_positions=at.float())", "must be int64 or"),
    ("unsigned", "read('KNA', q_positions=at.byte())", "must be int64 or int32"),
    ("bidirectional", "read('KNA-ReRoPE@8', causal=False)", "for causal attention"),
    ("leak", "read('QKInstanceNorm(gain=false)')", "leaks the future"),
    ("restarting", "read('KNA', q_positions=again, k_positions=again)", "add Packed to the score"),
    ("restarting row", "read('KNA', k_positions=rows)", "documents="),
    ("restarting in a layer", "Attention(8, 2)(x, positions=again)", "documents="),
    ("restarting in a cache", "kept(q, k, v, k_positions=rows)", "documents="),
    ("no batch", "Attention(8, 2)(x[0])", "must be (batch, tokens, width)"),
    ("no batch of a source", "cross().remember(x[0])", "source must be (batch"),
    ("open", "read('KNA-YaRN@8')", "needs factor"),
    ("learned", "read('QKRMSNorm')", "make a Score(spec, heads=…, head_dim=…)"),
    ("what is learned", "read('QKRMSNorm')", "learns query_norm.weight, key_norm.weight"),
    ("running", "read('QKBatchNorm(gain=false)', False)", "learns running statistics"),
    ("no features", "Score('KNA', 2, 0)", "head_dim must be a whole number of at least 1"),
    ("no key heads", "Score('KNA', 4, 4, 0)", "kv_heads must be a whole number of at least 1"),
    ("NTK of a pair", "small(2, 'Baseline-NTK(factor=2)')", "NTK needs a head dimension"),
    ("blocks of a pair", "small(2, 'KNA-DynamicNTK@2')", "NTK needs a head dimension"),
    ("LongRoPE of a pair", "small(2, 'KNA-LongRoPE(factor=2)@8')", "factors="),
    ("three factors", "read('KNA-LongRoPE(factor=2,factors=1:2:3)@8')", "each of the 2 pairs"),
    ("a part of one", "small(1, 'KNA-PartialRoPE')", "even head dimension"),
    ("XPos of three", "small(3, 'KNA-XPos')", "even head dimension"),
    ("values of an odd size", "read('KNA-VORoPE', v=v[..., :3])", "even head dimension"),
    ("own values", "read('KNA-XSA', q=q[:, :, :2], q_positions=at[:2])", "of the last keys"),
    ("no own", "read('KNA-XSA', False, k=k[:, :, 1:], v=v[:, :, 1:])", "5 queries and 4"),
    ("two outputs", "read('KNA-XSA', return_lse=True)", "gives no log-sum-exp"),
    ("two sums", "read(paired, return_lse=True)", "gives no log-sum-exp"),
    ("sums of blocks", "read('KNA-DynamicNTK@2', return_lse=True)", "gives no log-sum-exp"),
    ("no softmax", "read('Baseline-Sigmoid@8', return_lse=True)", "not those of softmax"),
    ("a stick", "read('Baseline-StickBreaking', return_lse=True)", "not those of softmax"),
    ("a pair of two keys", "Attention(12, 4, score='KNA-DifferentialV2')", "even number of them"),
    ("no head size", "Attention(16, 3)", "does not divide into 3 heads"),
    ("uneven heads", "Attention(16, 4, 3)", "cannot share 3"),
    ("no heads", "Attention(16, 0)", "must be a whole number of at least 1"),
    ("dropout of a layer", "Attention(16, 4, dropout=1.0)", "below 1"),
    ("no key", "gated(8, key_size=0)", "must be a whole number of at least 1"),
    ("offset", "gated(8, 8, separate_qk=True, offset=True)", "separate_qk"),
    ("no blocks", "deepnorm_factors(0)", "must be a whole number of at least 1"),
    ("half a head", "Attention(8.0, 2)", "dim must be a whole number"),
    ("a word for heads", "Score('KNA', '2', 8)", "heads must be a whole number"),
    ("room of a cache", "KeyValueCache('many')", "max_length must be a whole number"),
    ("no window of a cache", "KeyValueCache(window=0)", "window must be a whole number"),
    ("a word for causal", "read('KNA', causal='yes')", "causal must be True or"),
    ("a dictionary as cache", "read('KNA', cache={})", "must be a KeyValueCache"),
    ("a list for a layer", "Attention(8, 2)([[0.0]])", "but it is a list"),
    ("a source as memory", "placed(x, x, positions=at)", "what remember returns, not a Tensor"),
    ("a name as parts", "ScoreSpec('KNA')", "ScoreSpec.parse takes a name"),
    ("layer too high", "parse('KNA-HWFA@8').layer(2, 2)", "no layer 2 among 2"),
    ("blocks", "read('KNA-DynamicNTK@8', q_positions=back - 1)", "blocks from position 0"),
    ("one row of positions", "documents_from_positions(at)", "must be a tensor (B, T)"),
    ("a list of lengths", "documents_from_lengths([0, 5])", "must be a tensor of whole"),
    ("lengths from 1", "documents_from_lengths(torch.tensor([1, 3]))", "must start with 0"),
    ("one length", "documents_from_lengths(torch.tensor([0]))", "cu_seqlens must start with 0"),
    ("equal lengths", "documents_from_lengths(torch.tensor([0, 3, 3]))", "must start with 0"),
    ("a layout", "explain('KNA-HWFA(window=4)@16', q.shape)", "differs from layer to layer"),
    ("two ways", "explain('KNA-ReRoPE(window=4)', q.shape, causal=False)", "causal attention only"),
    ("explained leak", "explain('QKInstanceNorm', q.shape)", "leaks the future"),
    ("few keys", "explain('KNA', q.shape, (2, 4, 4, 4))", "needs q_positions"),
    ("explained groups", "explain('KNA', q.shape, (2, 3, 5, 4))", "multiple of the key heads"),
    ("explained cap", "explain('KNA-SoftCap', q.shape, backend='fused')", "a cap"),
    ("a shape of one", "explain('KNA', 5)", "no tensors have the shapes 5"),
    ("an unknown device", "explain('KNA', q.shape, device='tpu')", "on a CPU or a CUDA device"),
    ("no gate", "read('KNA-Gate')", "needs gate=…"),
    ("a gate", "read('KNA', gate=logits)", "gate is given, but KNA"),
    ("gate shape", "read('KNA-Gate', gate=logits)", "of shape (2, 5, 16)"),
    ("no forget", "read('KNA-FoX')", "needs forget=…"),
    ("a forget", "read('KNA', forget=logits)", "forget is given, but KNA"),
    ("forget shape", "read('KNA-FoX', forget=padding)", "of shape (2, 5, 4)"),
    ("FoX", "read('KNA-FoX', False, forget=logits)", "causal attention only"),
    ("FoX backwards", "fox(q_positions=back, k_positions=back)", "needs tokens in their order"),
    ("FoX keys backwards", "fox(k_positions=back)", "must not decrease"),
    ("FoX queries backwards", "fox(q_positions=back)", "needs tokens in their order"),
    ("FoX ahead", "fox(q_positions=at + 1)", "must be those of the last keys"),
    ("Selective", "read('KNA-Selective', False)", "causal attention only"),
    ("few", "attention(q[:, :, 2:], k, v, 'KNA-Selective')", "as many queries as keys, or a cache"),
    ("Selective backwards", "read('KNA-Selective', k_positions=back)", "not decrease"),
    ("Selective rows", "read(packed, k_positions=back, documents=0 * rows)", "must not decrease"),
    ("Selective by fused", "read('KNA-Selective', backend='fused')", "a selection"),
    ("blocks of rows", "parse('KNA-Selective-DynamicNTK@8')", "cannot be combined"),
    ("statistics", "parse('KBatchNorm-Selective')", "not causal, but Selective"),
    ("pairs", "parse('Baseline-Sigmoid-Differential@8')", "both choose the normaliser"),
    ("odd pairs", "Score('Baseline-Differential', 4, 8, 1)", "must be even, but it is 1"),
    ("pair of one", "gated(8, 8, score='KNA-Differential')", "must be even"),
    ("pair values", "attention(q, k, torch.cat((v, v), -1), paired)", "that of the keys, 4"),
    ("pairs by fused", "read(paired, backend='fused')", "values"),
    ("gate across", "cross(score='KNA-NoPE-Gate')", "within one sequence"),
    ("pairs across", "cross(score='KNA-NoPE-Differential')", "within one sequence"),
    ("documents across", "cross(score='KNA-Packed')", "within one sequence"),
    ("causal across", "cross(score='KNA-ReRoPE(window=2)')", "within one sequence"),
    ("blocks across", "cross(score='Baseline-DynamicNTK(factor=2)@8')", "within one sequence"),
    ("source unplaced", "placed.remember(x)", "two sequences do not share"),
    ("reader unplaced", "placed(x, memory)", "two sequences do not share"),
    ("reader's places", "placed(x, memory, positions=at[:4])", "positions must be int64 or int32"),
    ("source padding", "placed.remember(x, padding[:, 1:], at)", "padding must be boolean"),
    ("rows", "placed(torch.zeros(3, 5, 8), memory, positions=at)", "3 rows cannot be shared"),
    ("residual across", "cross(score='KNA-RealFormer')(x, memory)", "residual="),
]
PROGRAM = """
import json, sys, torch
from normattn import Attention, GatedAttentionUnit as gated, InputError, Score, ScoreSpec
from normattn import attention
from normattn import explain
from normattn.layers import CrossAttention, deepnorm_factors
from normattn.layers import documents_from_lengths, documents_from_positions
from normattn.layers.cache import KeyValueCache
q, k, v = (torch.zeros(2, heads, 5, 4) for heads in (4, 2, 2))
at, padding = torch.arange(5), torch.zeros(2, 5, dtype=torch.bool)
again = torch.tensor([0, 1, 2, 0, 1])
rows = torch.stack((at, again))
parse = ScoreSpec.parse
back, logits, paired = at.flip(0), torch.zeros(2, 5, 4), Score('Baseline-Differential', 4, 4, 2)
x, placed = torch.zeros(2, 5, 8), CrossAttention(8, 2, score='Baseline')
memory = placed.remember(x, positions=at)
e4m3, packed = torch.float8_e4m3fn, 'KNA-Selective-Packed'
mask = torch.ones(5, 5, dtype=torch.bool)

def read(score, causal=True, q=q, k=k, v=v, **more):
    return attention(q, k, v, score, causal, **more)

def small(size, score):
    return attention(q[..., :size], k[..., :size], v, score)

def fox(**places):
    return read('KNA-FoX', forget=logits, **places)

def kept(q, k, v, **more):
    return attention(q[:, :2], k, v, Score('KNA', 2, 4), cache=KeyValueCache(), **more)

def cross(**more):
    return CrossAttention(8, 2, **more)

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

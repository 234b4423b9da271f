"""Recipes to try, tensors in any layout, and what a `Score` has learned in the oracle's words."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from normattn import Score, ScoreSpec

from .recipe import REGIMES, Recipe

VARIANTS = (
    *("Baseline", "QNA", "KNA", "CosA", "QKNorm2020"),
    *("QKLayerNorm", "QLayerNorm", "KLayerNorm", "QKRMSNorm", "QRMSNorm", "KRMSNorm"),
    *("QKBatchNorm", "QBatchNorm", "KBatchNorm"),
    *("QKInstanceNorm", "QInstanceNorm", "KInstanceNorm"),
)
LOGN = ("", "logn", "logn+")
GROWTHS = (
    *("SqrtLogN", "SSMax", "SSMax(bias=true)", "YaRNTemperature"),
    *("Temperature", "Temperature(beta=0.7,length=2,shift=1)"),
)
PLACES = (
    *(("half", ""), ("interleaved", ""), ("none", ""), ("half", "PI"), ("half", "ABF")),
    *(("half", "NTK"), ("interleaved", "NTKMixed"), ("half", "YaRN"), ("interleaved", "YaRN")),
    *(("half", "ReRoPE"), ("interleaved", "ReRoPE")),
)
METHODS = (
    *("PI", "ABF", "NTK", "NTKOld", "NTKMixed", "YaRN", "Llama3", "LongRoPE", "DynamicNTK"),
    *("ClippedRoPE", "DroPE"),
    *("ReRoPE", "LeakyReRoPE", "SelfExtend", "StreamingLLM", "DualChunk"),
)
SHAPES = ("XPos", "PartialRoPE", "PRoPE", "HoPE", "PoPE")
BIASES = ("ALiBi", "KERPLELog", "KERPLEPower", "FIRE", "CoPE(positions=4)")
ALONE = (
    *("RotateFirst", "SoftCap", "Sink", "SlidingWindow", "Chunked", "Packed", "Gate", "FoX"),
    *("T5Bias", "ValueResidual", "XSA", "VORoPE", "DifferentialV2", "XLNet", "NGPT"),
    *("ScaleInvariant", "ASScale", "NEZHA", "QKDyT", "QKDerf"),
)
PAIRED = ("Differential", "Differential(init=0.5,eps=0.01)")
NORMALISERS = (
    *("Sigmoid", "Sigmoid(tokens=5)", "StickBreaking", "StickBreaking(current=true)"),
    *("Entmax", "Entmax(alpha=1.25)", "Selective"),
)
LAYOUTS = ("HWFA", "NoPEEvery", "FullEvery", "IRoPE")
RESIDUALS = ("RealFormer", "ResidualQK", "ResidualQKV")
_WORDS = {"query_norm": "Q", "key_norm": "K", "weight": "gain", "bias": "bias"}


def recipes(variant: str) -> Iterator[Recipe]:
    """Every score that can be made with `variant`, gains on and off in turn."""
    for turn, (logn, (position, method)) in enumerate(itertools.product(LOGN, PLACES)):
        gain, across = turn % 2 == 0, ("all", "head", "each")[turn % 3]
        recipe = Recipe(variant, logn, position, method, gain=gain, across=across)
        if not (recipe.leaks and method == "ReRoPE"):
            yield recipe


def methods(method: str) -> Iterator[Recipe]:
    """A method on some variants, log-n forms, layouts and kinds of rotary position.

    Those that change frequencies alone share the kinds out: each takes every second.
    """
    rotary = [Recipe(position="half"), Recipe("KNA", "logn+", "interleaved", shape="XPos")]
    rotary += [Recipe("CosA", "logn", "interleaved"), Recipe("QKNorm2020", "", "half")]
    rotary += [Recipe("KLayerNorm", "", "half", shape="PartialRoPE", fraction=0.6)]
    rotary += [Recipe("KRMSNorm", "", "interleaved", shape="PartialRoPE", side="last")]
    rotary += [Recipe("QRMSNorm", "", "half", direction="backward")]
    rotary += [Recipe("QKRMSNorm", "logn", "half", rotate_first=True)]
    rotary += [Recipe("QLayerNorm", "logn+", "interleaved", rotate_first=True, across="all")]
    rotary += [Recipe("QKRMSNorm", "SSMax", "half", shape="PRoPE", fraction=0.7)]
    rotary += [Recipe("KNA", "SSMax", "interleaved", shape="PoPE")]
    rotary += [Recipe("KNA", "", "half", shape="HoPE", base=20.0)]
    alone = method not in REGIMES and method != "DynamicNTK"
    for recipe in rotary[METHODS.index(method) % 2 :: 2] if alone else rotary:
        # Without its rotation XPos is still a position.
        if not (method == "DroPE" and recipe.shape == "XPos"):
            yield replace(recipe, method=method, train_length=4)
    if method == "ClippedRoPE":
        yield from (Recipe(method=method, clip=clip) for clip in (0, 1, 3, 9))
    if method == "LongRoPE":
        yield Recipe("KNA", "logn", method=method, factors=(1.0, 1.25, 2.0, 3.5))
    if alone:
        yield Recipe("KBatchNorm", "logn", method=method)


def additions() -> Iterator[Recipe]:
    """What stands beside the product, alone, with variants, and all at once."""
    for bias in BIASES:
        # FIRE's threshold, a quarter of the length, lies within the tokens.
        yield Recipe("Baseline", "", "none", bias=bias, train_length=16)
        yield Recipe("KNA", "logn", "none", bias=bias, sink=True)
        yield Recipe("QKRMSNorm", "logn+", "interleaved", "ReRoPE", bias=bias, cap=1.5)
        yield Recipe("QNA", "", "half", "DynamicNTK", bias=bias, near=None, train_length=4)
        yield Recipe("KNA", "logn+", "half", "DualChunk", bias=bias, sink=True)
    yield Recipe("Baseline", "", "none", bias="CoPE")
    yield Recipe("QKNorm2020", "SSMax(bias=true)", "half", bias="CoPE", near=4)
    yield Recipe("CosA", "logn", "interleaved", shape="PoPE", bias="CoPE(positions=2)")
    for variant in ("Baseline", "CosA", "QKNorm2020"):
        yield Recipe(variant, "logn", cap=0.7)
        yield Recipe(variant, "logn+", "interleaved", sink=True)
        yield Recipe(variant, "", near=3)
        yield Recipe(variant, "logn", "none", near=2, sink=True)
        yield Recipe(variant, "logn", "interleaved", chunk=4, sink=True)
        yield Recipe(variant, "", "none", bias="ALiBi", chunk=3)
    for growth in GROWTHS:
        for variant in ("Baseline", "CosA", "QKNorm2020", "QLayerNorm"):
            yield Recipe(variant, growth, base=100.0, cap=3.0 if variant == "CosA" else None)
        yield Recipe("KNA", growth, "interleaved", "ReRoPE", bias="ALiBi")
        yield Recipe("QKRMSNorm", growth, rotate_first=True, method="DynamicNTK", train_length=4)
    yield Recipe("Baseline", "YaRNTemperature", "half", "DualChunk", beyond=1)
    for shape in SHAPES:
        # Of HoPE's pairs two turn in 12 tokens, and one does by half.
        yield Recipe("Baseline", "", "half", shape=shape, base=10.0, train_length=12)
        yield Recipe("QKLayerNorm", "logn", "interleaved", shape=shape, fraction=1.0)
        yield Recipe("QBatchNorm", "", "half", shape=shape)
    for position, fraction in (("half", 0.75), ("interleaved", 0.5), ("half", 1.0)):
        last = Recipe("KNA", "logn", position, shape="PartialRoPE", side="last", fraction=fraction)
        yield from (last, replace(last, bias="ALiBi"), replace(last, rotate_first=True, sink=True))
    yield Recipe("KNA", "logn", "interleaved", direction="backward", cap=2.0)
    yield Recipe("QKRMSNorm", "", "half", direction="backward", rotate_first=True, bias="ALiBi")
    first = ("KNA", "QKLayerNorm", "QRMSNorm", "KLayerNorm", "QKBatchNorm", "QInstanceNorm")
    for turn, variant in enumerate(first):
        yield Recipe(variant, "logn", rotate_first=True, gain=turn % 2 == 0)
    everything = Recipe("QKRMSNorm", "logn", rotate_first=True, cap=2.0, sink=True)
    for method in ("", "SelfExtend", "StreamingLLM", "YaRN", "DynamicNTK"):
        yield replace(everything, method=method, bias="KERPLELog", shape="PartialRoPE")
    yield replace(everything, near=4, bias="ALiBi")


def normalised() -> Iterator[Recipe]:
    """Normalisers other than softmax, beside each second kind of part in turn."""
    beside = (
        Recipe("Baseline", "", "none"),
        Recipe("KNA", "logn", "none", bias="ALiBi", cap=1.5),
        Recipe("QKRMSNorm", "SSMax", "half", bias="FIRE", near=4),
        Recipe("CosA", "logn+", "interleaved", "ReRoPE"),
        Recipe("KNA", "", "none", bias="CoPE(positions=3)"),
        Recipe("QNA", "", "half", "DynamicNTK", train_length=4),
    )
    for turn, normaliser in enumerate(NORMALISERS):
        for recipe in beside if normaliser == "Selective" else beside[turn % 2 :: 2]:
            # Blocks of rows have no place beside what is handed on from row to row.
            if normaliser != "Selective" or recipe.method != "DynamicNTK":
                yield replace(recipe, normaliser=normaliser)
    yield Recipe("QNA", "", "half", sink=True, cap=2.0, normaliser="Selective")


def documents(batch: int, tokens: int, padded: bool = False) -> tuple[Tensor, Tensor | None]:
    """Documents of several lengths in each row, and padding on the left where it is wanted."""
    ends = torch.tensor([[2, tokens // 2], [1, tokens - 2], [tokens // 3, tokens]])[:batch]
    place = torch.arange(tokens)
    number = (place[None, :, None] >= ends[:, None]).sum(-1)
    return number, (place[None] < torch.arange(batch)[:, None]) if padded else None


def tensors(
    *shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Normal tensors that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in made]


def drawn(score: Score, low: float = 0.5, high: float = 1.5) -> Score:
    """The score in float64, what it learns drawn at random."""
    torch.manual_seed(1)
    for parameter in score.double().parameters():
        torch.nn.init.uniform_(parameter, low, high)
    return score


def built(recipe: Recipe, heads: int, d: int, kv_heads: int | None = None) -> Score:
    """The float64 score of a recipe, what it learns drawn at random."""
    return drawn(Score(ScoreSpec.parse(recipe.text), heads, d, kv_heads))


def learned(score: Score) -> dict[str, Tensor]:
    """The score's parameters under the oracle's names: Q.gain, K.bias, scale."""
    return {
        ".".join(_WORDS.get(word, word) for word in name.split(".")): parameter
        for name, parameter in score.named_parameters()
    }


# Views of a tensor's values (B, H, T, D), known to autograd; the expanded ones repeat some of them.
IN_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "as heads cut from a projection": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "as a Conv1d gives it": lambda x: x.mT.contiguous().mT,
    "every second feature": lambda x: torch.stack((x, x + 9), -1).flatten(-2)[..., ::2],
    "every second row": lambda x: torch.stack((x, x + 9), 3).flatten(2, 3)[:, :, ::2],
    "from the middle": lambda x: F.pad(x, (3, 2, 2, 1), value=9.0)[:, :, 2:-1, 3:-2],
    "one head": lambda x: x[:, :1].expand_as(x),
    "one row of the batch": lambda x: x[:1].expand_as(x),
    "one token": lambda x: x[:, :, :1].expand_as(x),
    "one feature": lambda x: x[..., :1].expand_as(x),
}


def laid(qkv: Sequence[Tensor], cell: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in layouts that the cell's name decides, none contiguous."""
    number, every = zlib.crc32(cell.encode()), [*IN_MEMORY.values()]
    q, k, v = qkv
    return every[number % 7](q), every[number // 7 % 7](k), every[number // 49 % 9](v)

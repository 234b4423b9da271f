"""Which kernel computes some inputs: one table of capabilities, and a fixed rule of choice.

Inputs have some features; a kernel serves them when all are in its row of `TABLE`. Among the
kernels that can, the choice depends on the device, the number type, the shapes and the processor's
features alone, so that it is the same in every process. A request that none can serve is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.flex import flex
from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import spread_infinities
from normattn.kernels.reference import reference_with_lse, strip_rows, strips
from normattn.kernels.residual import concatenated, residual_attention
from normattn.kernels.sdpa import PROCESSOR_FEATURES, fused
from normattn.kernels.stats import Observation, Recorder, observers, record_pass
from normattn.kernels.tiled import Plan
from normattn.kernels.tiled_backward import tiled
from normattn.kernels.two_regime import two_regime
from normattn.plain import traced, transformed

Test = Callable[[AttentionInputs], bool]


def _given(name: str) -> Test:
    return lambda p: getattr(p, name) is not None


def _hides(name: str) -> Test:
    return lambda p: getattr(p.mask, name) is not None


def _irregular(p: AttentionInputs) -> bool:
    mask = p.mask
    matter = mask.causal or mask.window is not None or p.two_regimes or p.bias is not None
    return matter and not mask.aligned


def _learns_on_cpu(p: AttentionInputs) -> bool:
    # flex_attention looks at the tensors, and not whether gradients are wanted now.
    learned = any(x is not None and x.requires_grad for x in p.tensors)
    return learned and p.q.device.type == "cpu"


# What inputs may have. Keys are counted by v: with two regimes there may be fewer near keys.
FEATURES: Mapping[str, Test] = {
    "attention without near and far keys": lambda p: not p.two_regimes,
    "near and far keys": lambda p: p.two_regimes,
    "a bias": _given("bias"),
    "a bias of both positions": _given("pairs"),
    "values of both positions": _given("pair_values"),
    "a normaliser in place of softmax": _given("normaliser"),
    "a selection": _given("selection"),
    "attention without residual scores": lambda p: p.residual_scores is None,
    "residual scores": _given("residual_scores"),
    "a sink": _given("sink"),
    "a cap": _given("cap"),
    "a sliding window": _hides("window"),
    "documents": _hides("query_documents"),
    "a mask": _hides("attn_mask"),
    "a learned mask": lambda p: p.mask.attn_mask is not None and p.mask.attn_mask.requires_grad,
    "padding": _hides("padding"),
    "irregular positions": _irregular,
    "attention without causality": lambda p: not p.mask.causal,
    "a causal mask with T ≠ S": lambda p: p.mask.causal and p.q.shape[2] not in (1, p.v.shape[2]),
    "more queries than keys": lambda p: p.q.shape[2] > p.v.shape[2],
    "fewer queries than keys": lambda p: p.q.shape[2] < p.v.shape[2],
    "zero queries": lambda p: p.q.shape[2] == 0,
    "values of another size": lambda p: p.v.shape[-1] != p.q.shape[-1],
    "dropout": lambda p: p.dropout > 0,
    "float64": lambda p: p.q.dtype == torch.float64,
    "torch.func": lambda p: transformed(),
    "gradients on a CPU": _learns_on_cpu,
    "CUDA": lambda p: p.q.device.type == "cuda",
}
_ALL = frozenset(FEATURES)
_TILED = _ALL - {
    *("a bias of both positions", "values of both positions", "a selection"),
    *("a normaliser in place of softmax", "a learned mask", "residual scores", "torch.func"),
}
_PLAIN = _TILED - {
    *("a bias", "a sink", "a cap", "a sliding window", "documents", "a mask"),
    *("padding", "irregular positions"),
}

Run = Callable[[AttentionInputs, Recorder | None, bool], tuple[Tensor, Tensor | None]]
"""Computes (output, log-sum-exp) of (inputs, recorder of statistics, whether it is wanted)."""


class Kernel(NamedTuple):
    """A way to compute attention: the features that it serves, and what it gives beside the output.

    `gives` may name the log-sum-exp and the statistics. `run` is None where the inputs are written
    in another form, which another kernel computes.
    """

    name: str
    run: Run | None
    serves: frozenset[str]
    gives: tuple[str, ...] = ()

    def why_not(self, inputs: AttentionInputs, lse: bool = False) -> str | None:
        """The reason why it cannot serve the inputs, or give their log-sum-exp; or None."""
        for name, shown in FEATURES.items():
            if name not in self.serves and shown(inputs):
                return f"it does not support {name}"
        sums = inputs.residual_scores
        if sums is not None and (reason := sums.why_not(self.name)):
            return reason
        if lse and "lse" not in self.gives:
            return "it gives no log-sum-exp"
        if lse and inputs.normaliser is not None:
            return "weights that are not those of softmax have no log-sum-exp"
        return None


def _output_only(compute: Callable[[AttentionInputs], Tensor]) -> Run:
    """A kernel that gives only the output."""
    return lambda inputs, recorder, lse: (compute(inputs), None)


def _with_statistics(compute: Callable[[AttentionInputs, Recorder | None], Tensor]) -> Run:
    """A kernel that gives the output and statistics."""
    return lambda inputs, recorder, lse: (compute(inputs, recorder), None)


KERNELS: tuple[Kernel, ...] = (
    # On CUDA scaled_dot_product_attention reaches the stock flash operators.
    Kernel(
        "fused",
        _output_only(fused),
        _PLAIN - {"near and far keys", "a causal mask with T ≠ S", "values of another size"},
    ),
    Kernel(
        "two-regime",
        _output_only(two_regime),
        _PLAIN
        - {
            "attention without near and far keys",
            "attention without causality",
            "values of another size",
        }
        - {"more queries than keys", "fewer queries than keys", "zero queries", "dropout", "CUDA"},
    ),
    Kernel(
        "flex",
        lambda inputs, recorder, lse: flex(inputs),
        _TILED - {"dropout", "zero queries", "float64", "gradients on a CPU"},
        ("lse",),
    ),
    Kernel(
        "residual",
        _with_statistics(residual_attention),
        (_TILED | {"residual scores"}) - {"attention without residual scores", "near and far keys"},
        ("statistics",),
    ),
    Kernel(
        "concatenated",
        None,
        _ALL
        - {
            "attention without residual scores",
            "near and far keys",
            "a learned mask",
            "torch.func",
        },
        ("lse",),
    ),
    Kernel("chunked", tiled, _TILED, ("lse", "statistics")),
    Kernel(
        "strips",
        _with_statistics(strips),
        _ALL - {"residual scores", "torch.func"},
        ("statistics",),
    ),
    Kernel("reference", reference_with_lse, _ALL, ("lse", "statistics")),
)
TABLE: Mapping[str, Kernel] = {kernel.name: kernel for kernel in KERNELS}
BACKENDS: tuple[str, ...] = ("auto", *TABLE)

# Query rows at which tiles beat torch's kernel in float32 on cores that have AVX-512 but not its
# float16 part (AMD's Zen 4 and 5); on Intel's they do not.
_TILES_WIN = range(256, 1025)


def _order(inputs: AttentionInputs) -> Iterator[tuple[str, str]]:
    """Names of kernels, the best first, and why each is at its place."""
    if inputs.residual_scores is not None:
        yield from _residual_order(inputs)
    elif inputs.q.device.type == "cpu":
        yield from _cpu_order(inputs)
    else:
        yield "fused", "everything is absorbed into queries and keys: torch's kernel does the rest"
        if inputs.q.device.type == "cuda":
            yield "flex", "flex_attention takes masks, biases, sinks, near and far keys on CUDA"
    yield "strips", "it supports every score without a T × S matrix, whole rows at a time"
    yield "reference", "no other kernel supports it; it holds the whole T × S matrix"


def _cpu_order(inputs: AttentionInputs) -> Iterator[tuple[str, str]]:
    """The same on a CPU. A compiler unrolls hand-written loops, but tiles are one node for it."""
    q, eager = inputs.q, not torch.compiler.is_compiling()
    rows = q.shape[2]
    if eager and rows > 1:
        yield "two-regime", "both parts go to torch's flash kernel, merged by log-sum-exp"
    has = PROCESSOR_FEATURES.get
    tiles_win = has("avx512_f") and not has("avx512_fp16") and q.dtype != torch.float64
    if eager and rows in _TILES_WIN and tiles_win:
        yield "chunked", "at these lengths on such a processor tiles beat torch's kernel"
    yield "fused", "everything is absorbed into queries and keys: torch's kernel does the rest"
    yield "chunked", "it supports nearly every score without a T × S matrix"


def _residual_order(inputs: AttentionInputs) -> Iterator[tuple[str, str]]:
    """The ways to sum scores up, which layers above the lowest have no choice of."""
    assert inputs.residual_scores is not None
    if inputs.residual_scores.kernel is not None:
        yield inputs.residual_scores.kernel, "the layers below were summed by it"
    if torch.compiler.is_compiling():
        yield "concatenated", "a compiler takes no buffer that is undone in the backward"
    if inputs.q.device.type != "cpu":
        yield "concatenated", "one product of the features of all layers suits a GPU"
    yield "residual", "one buffer for all layers, and no more products than without a residual"
    yield "concatenated", "it leaves what the buffer cannot serve to another kernel"


def choose(inputs: AttentionInputs, backend: str = "auto", lse: bool = False) -> Kernel:
    """The kernel of that name, or the first by the rule that can serve the inputs.

    With `lse` it has to give the log-sum-exp too. Raises `InputError` for an unknown name and for
    a kernel that cannot serve the inputs.
    """
    if backend == "auto":
        able = [TABLE[name] for name, _ in _order(inputs)]
        kernel = next((kernel for kernel in able if kernel.why_not(inputs, lse) is None), able[-1])
    elif backend in TABLE:
        kernel = TABLE[backend]
    else:
        raise InputError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
    if reason := kernel.why_not(inputs, lse):
        raise InputError(f"the {kernel.name} kernel cannot serve this: {reason}")
    return kernel


@dataclass(frozen=True)
class Decision:
    """The kernel of some inputs, why it, and why not each of the others."""

    kernel: str
    why: str
    refused: Mapping[str, str]


def reasons(inputs: AttentionInputs, backend: str = "auto") -> Decision:
    """The kernel that `attend` takes, why, and why not each of the others.

    Raises `InputError` for an unknown name and for a kernel that cannot serve the inputs.
    """
    objections = {kernel.name: kernel.why_not(inputs) for kernel in KERNELS}
    kernel = choose(inputs, backend).name
    why, preferred = "it was asked for by name", "was asked for"
    if backend == "auto":
        why = next(reason for name, reason in _order(inputs) if name == kernel)
        preferred = "comes first"
    refused = {
        name: reason or f"possible, but {kernel} {preferred}"
        for name, reason in objections.items()
        if name != kernel
    }
    return Decision(kernel, why, refused)


def working_bytes(kernel: str, inputs: AttentionInputs) -> int:
    """Bytes of a forward pass in addition to q, k, v and the output: an estimate.

    The reference holds scores and weights, T × S each, strips those of some rows; torch's kernels a
    log-sum-exp, and of two parts their outputs; tiles one tile of scores; the buffer of residual
    scores, one for all layers, a number for each pair.
    """
    q, keys = inputs.q, inputs.v.shape[2]
    batch, heads, rows, _ = q.shape
    number, lines = max(4, q.element_size()), batch * heads * rows * 4
    if kernel in ("reference", "strips"):
        held = rows if kernel == "reference" else strip_rows(inputs)
        return 2 * batch * heads * held * keys * number
    if kernel in ("fused", "flex"):
        return lines * (2 if inputs.two_regimes else 1)
    if kernel == "two-regime":
        # Each part's output and log-sum-exp, and those of both for their shares.
        return 2 * batch * heads * rows * inputs.v.shape[3] * q.element_size() + 4 * lines
    plan = Plan.of(inputs)
    pairs = [tile.count * tile.width for tile in plan.tiles]
    group = next(plan.groups(q), None)
    if group is None:
        return 0
    together = (group.batch.stop - group.batch.start) * (group.heads.stop - group.heads.start)
    tile_bytes: int = together * plan.repeat * max(pairs, default=0) * number
    buffer_bytes: int = batch * heads * sum(pairs) * number
    return tile_bytes + (buffer_bytes if kernel == "residual" else 0)


class AttentionOutput(NamedTuple):
    """What a kernel gives: the output, and what else was requested (else None).

    `lse` (B, H, T) is ln Σ_j exp s(i, j) over all that softmax chooses among: the visible keys and
    a learned sink. It is in float32 or wider, −∞ where there is nothing to choose, and known to
    autograd.
    """

    out: Float[Tensor, "b h t e"]
    lse: Float[Tensor, "b h t"] | None = None
    statistics: Observation | None = None


def run_kernel(
    inputs: AttentionInputs,
    backend: str = "auto",
    *,
    lse: bool = False,
    statistics: bool = False,
    functions: Float[Tensor, "f r"] | None = None,
) -> AttentionOutput:
    """softmax(score) · v by the chosen kernel, and what else is requested.

    Scores are never in less than float32. `statistics` are those of each row's softmax, with the
    means of `functions` of the distance 0 … R − 1; an `observer` that is on gets its own. On a CPU
    tiles give them in place of torch's kernel, as they are computed; a kernel that gives none is
    followed by a pass that only reads scores. Raises `InputError` as `choose` does.
    """
    device, watching = inputs.q.device.type, observers()
    if torch.is_autocast_enabled(device):
        # The tensors' own type decides, for every score alike.
        with torch.autocast(device, enabled=False):
            return run_kernel(inputs, backend, lse=lse, statistics=statistics, functions=functions)
    kernel, asked = choose(inputs, backend, lse), inputs
    if kernel.run is None:
        inputs, backend = concatenated(inputs), "auto"
        kernel = choose(inputs, backend, lse)
    given, inputs = inputs, spread_infinities(inputs)
    if device == "cpu" and kernel.name in ("fused", "two-regime"):
        # On a CPU these make 0 of NaN, or show it in earlier rows; and they give no statistics.
        observed = (statistics or bool(watching)) and backend == "auto"
        diverged = any(x is not y for x, y in zip(inputs.tensors, given.tensors, strict=True))
        if not traced() and (diverged or observed):
            kernel = TABLE["chunked"]
    assert kernel.run is not None
    if not statistics and not watching:
        return AttentionOutput(*kernel.run(inputs, None, lse))
    asked_for = [each.distance_functions(asked) for each in watching] or [functions]
    wanted = next((each for each in asked_for if each is not None), None)
    recorder, recorded = Recorder(inputs, wanted), "statistics" in kernel.gives
    out, sums = kernel.run(inputs, recorder if recorded else None, lse)
    if not recorded:
        record_pass(recorder, inputs)
    found = recorder.observation()
    for each in watching:
        each.record(asked, found)
    return AttentionOutput(out, sums, found)


def attend(inputs: AttentionInputs, backend: str = "auto") -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by the chosen kernel."""
    return run_kernel(inputs, backend).out

"""The choice of a kernel: a table of what each supports, and a fixed order of preference.

A kernel can compute inputs if `TABLE` lists all their features as supported. Among these kernels
the choice depends only on device, dtype, shapes and the processor, so it is the same in every
process. Inputs that no kernel supports raise `InputError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.flex import flex
from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import spread_infinities
from normattn.kernels.reference import reference_with_lse, strips
from normattn.kernels.residual import residual_attention
from normattn.kernels.sdpa import PROCESSOR_FEATURES, fused
from normattn.kernels.stats import Recorder, observers, record_pass
from normattn.kernels.tiled_backward import tiled
from normattn.kernels.two_regime import two_regime
from normattn.plain import traced, transformed

Predicate = Callable[[AttentionInputs], bool]


def _has(name: str) -> Predicate:
    return lambda x: getattr(x, name) is not None


def _mask_has(name: str) -> Predicate:
    return lambda x: getattr(x.mask, name) is not None


def _uses_positions(x: AttentionInputs) -> bool:
    return x.mask.causal or x.mask.window is not None or x.two_regimes or x.bias is not None


# The features that inputs may have. v has all keys; with two regimes k may have fewer.
FEATURES: Mapping[str, Predicate] = {
    "attention without near and far keys": lambda x: not x.two_regimes,
    "near and far keys": lambda x: x.two_regimes,
    "a bias": _has("bias"),
    "a bias of both positions": _has("pairs"),
    "values of both positions": _has("pair_values"),
    "a normaliser in place of softmax": _has("normaliser"),
    "a selection": _has("selection"),
    "attention without residual scores": lambda x: x.residual_scores is None,
    "residual scores": _has("residual_scores"),
    "a sink": _has("sink"),
    "a cap": _has("cap"),
    "a sliding window": _mask_has("window"),
    "documents": _mask_has("query_documents"),
    "a mask": _mask_has("attn_mask"),
    "a learned mask": lambda x: x.mask.attn_mask is not None and x.mask.attn_mask.requires_grad,
    "padding": _mask_has("padding"),
    "irregular positions": lambda x: _uses_positions(x) and not x.mask.aligned,
    "attention without causality": lambda x: not x.mask.causal,
    "a causal mask with T ≠ S": lambda x: x.mask.causal and x.q.shape[2] not in (1, x.v.shape[2]),
    "more queries than keys": lambda x: x.q.shape[2] > x.v.shape[2],
    "fewer queries than keys": lambda x: x.q.shape[2] < x.v.shape[2],
    "zero queries": lambda x: x.q.shape[2] == 0,
    "values of another size": lambda x: x.v.shape[-1] != x.q.shape[-1],
    "dropout": lambda x: x.dropout > 0,
    "float64": lambda x: x.q.dtype == torch.float64,
    "torch.func": lambda x: transformed(),
    # flex_attention checks requires_grad, also where gradients are off.
    "gradients on a CPU": lambda x: (
        x.q.device.type == "cpu" and any(y is not None and y.requires_grad for y in x.tensors)
    ),
    "CUDA": lambda x: x.q.device.type == "cuda",
}
_EVERYTHING = frozenset(FEATURES)
_TILED = _EVERYTHING - {
    *("a bias of both positions", "values of both positions", "a selection"),
    *("a normaliser in place of softmax", "a learned mask", "residual scores", "torch.func"),
}
_PLAIN = _TILED - {
    *("a bias", "a sink", "a cap", "a sliding window", "documents", "a mask"),
    *("padding", "irregular positions"),
}

Run = Callable[[AttentionInputs, Recorder | None, bool], tuple[Tensor, Tensor | None]]
"""(inputs, recorder, with_lse) → (output, log-sum-exp or None)."""


class Kernel(NamedTuple):
    """A way to compute attention, with the features of inputs that it supports.

    `outputs` lists its optional results: "lse", "statistics". Without `run`, the inputs are
    rewritten for another kernel (`concatenated`).
    """

    name: str
    run: Run | None
    supported: frozenset[str]
    outputs: tuple[str, ...] = ()

    def why_not(self, inputs: AttentionInputs, lse: bool = False) -> str | None:
        """Why it cannot compute the inputs, or their log-sum-exp; None if it can."""
        for name, has_feature in FEATURES.items():
            if name not in self.supported and has_feature(inputs):
                return f"it does not support {name}"
        residual = inputs.residual_scores
        if residual is not None and (reason := residual.why_not(self.name)):
            return reason
        if lse and "lse" not in self.outputs:
            return "it gives no log-sum-exp"
        if lse and inputs.normaliser is not None:
            return "weights that are not those of softmax have no log-sum-exp"
        return None


_TWO_REGIME = _PLAIN - {
    *("attention without near and far keys", "attention without causality", "dropout", "CUDA"),
    *("values of another size", "more queries than keys", "fewer queries than keys"),
    "zero queries",
}
_RESIDUAL = _EVERYTHING - {"attention without residual scores", "near and far keys"}

KERNELS: tuple[Kernel, ...] = (
    # On CUDA, scaled_dot_product_attention calls the flash operators.
    Kernel(
        "fused",
        lambda inputs, recorder, lse: (fused(inputs), None),
        _PLAIN - {"near and far keys", "a causal mask with T ≠ S", "values of another size"},
    ),
    Kernel("two-regime", lambda inputs, recorder, lse: (two_regime(inputs), None), _TWO_REGIME),
    Kernel(
        "flex",
        lambda inputs, recorder, lse: flex(inputs),
        _TILED - {"dropout", "zero queries", "float64", "gradients on a CPU"},
        ("lse",),
    ),
    Kernel(
        "residual",
        lambda inputs, recorder, lse: (residual_attention(inputs, recorder), None),
        _RESIDUAL & (_TILED | {"residual scores"}),
        ("statistics",),
    ),
    Kernel("concatenated", None, _RESIDUAL, ("lse",)),
    Kernel("chunked", tiled, _TILED, ("lse", "statistics")),
    Kernel(
        "strips",
        lambda inputs, recorder, lse: (strips(inputs, recorder), None),
        _EVERYTHING - {"residual scores", "torch.func"},
        ("statistics",),
    ),
    Kernel("reference", reference_with_lse, _EVERYTHING, ("lse", "statistics")),
)
TABLE: Mapping[str, Kernel] = {kernel.name: kernel for kernel in KERNELS}
BACKENDS: tuple[str, ...] = ("auto", *TABLE)

# Query rows for which tiles are faster than torch's kernel in float32, on cores with AVX-512 but
# without its float16 part (AMD's Zen 4 and 5).
_TILES_FASTER = range(256, 1025)


def _preferred(inputs: AttentionInputs) -> Iterator[tuple[str, str]]:
    """Kernel names, best first, each with the reason for its rank."""
    q, residual, device = inputs.q, inputs.residual_scores, inputs.q.device.type
    if residual is not None:
        # The lowest layer chooses for all layers above it.
        if residual.kernel is not None:
            yield residual.kernel, "the layers below were summed by it"
        if device != "cpu":
            yield "concatenated", "one product of the features of all layers suits a GPU"
        yield "residual", "one buffer for all layers, and no more products than without a residual"
        yield "concatenated", "it leaves what the buffer cannot serve to another kernel"
    else:
        has, rows = PROCESSOR_FEATURES.get, q.shape[2]
        # A compiler would unroll the loops of "two-regime"; tiles are one operator.
        eager_on_cpu = device == "cpu" and not torch.compiler.is_compiling()
        if eager_on_cpu and rows > 1:
            yield "two-regime", "both parts go to torch's flash kernel, merged by log-sum-exp"
        zen = has("avx512_f") and not has("avx512_fp16")
        if eager_on_cpu and rows in _TILES_FASTER and zen and q.dtype != torch.float64:
            yield "chunked", "at these lengths on such a processor tiles beat torch's kernel"
        yield "fused", "everything is absorbed into queries and keys: torch's kernel does the rest"
        if device == "cpu":
            yield "chunked", "it supports nearly every score without a T × S matrix"
        if device == "cuda":
            yield "flex", "flex_attention takes masks, biases, sinks, near and far keys on CUDA"
    yield "strips", "it supports every score without a T × S matrix, whole rows at a time"
    yield "reference", "no other kernel supports it; it holds the whole T × S matrix"


def choose(inputs: AttentionInputs, backend: str = "auto", lse: bool = False) -> Kernel:
    """The kernel `backend`, or with "auto" the preferred one that supports the inputs.

    `lse` requires the log-sum-exp too. Raises `InputError` for an unknown name, and for a kernel
    that does not support the inputs.
    """
    if backend == "auto":
        order = [TABLE[name] for name, _ in _preferred(inputs)]
        kernel = next((x for x in order if x.why_not(inputs, lse) is None), order[-1])
    elif backend in TABLE:
        kernel = TABLE[backend]
    else:
        raise InputError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
    if reason := kernel.why_not(inputs, lse):
        raise InputError(f"the {kernel.name} kernel cannot serve this: {reason}")
    return kernel


def reasons(inputs: AttentionInputs, backend: str = "auto") -> tuple[str, str, Mapping[str, str]]:
    """The kernel that `choose` returns, why, and why not each other one; errors as in `choose`."""
    kernel = choose(inputs, backend).name
    why, preferred = "it was asked for by name", "was asked for"
    if backend == "auto":
        why, preferred = next(x[1] for x in _preferred(inputs) if x[0] == kernel), "comes first"
    refused = {
        other.name: other.why_not(inputs) or f"possible, but {kernel} {preferred}"
        for other in KERNELS
        if other.name != kernel
    }
    return kernel, why, refused


def run_kernel(
    inputs: AttentionInputs, backend: str = "auto", lse: bool = False
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"] | None]:
    """softmax(score) · v by the chosen kernel, and with `lse` the log-sum-exp of each row.

    The log-sum-exp is ln Σ_j exp s(i, j) over the visible keys and a learned sink: float32 or
    wider, −∞ for a row without any, with a gradient. Active observers get statistics. On a CPU the
    tiled kernel, which computes them, then replaces torch's kernel. Other kernels without
    statistics are followed by a separate pass. Raises `InputError` as `choose` does.
    """
    device = inputs.q.device.type
    if torch.is_autocast_enabled(device):
        # The dtype of the tensors decides, not autocast.
        with torch.autocast(device, enabled=False):
            return run_kernel(inputs, backend, lse)
    kernel, layer_inputs, active = choose(inputs, backend, lse), inputs, observers()
    if inputs.residual_scores is not None and kernel.name != "residual":
        inputs = inputs.residual_scores.concatenate(inputs)
        if kernel.run is None:
            backend, kernel = "auto", choose(inputs, lse=lse)
    unchecked, inputs = inputs, spread_infinities(inputs)
    if device == "cpu" and kernel.name in ("fused", "two-regime") and not traced():
        # On a CPU these kernels turn NaN to 0 or leak it into earlier rows, and lack statistics.
        diverged = any(x is not y for x, y in zip(inputs.tensors, unchecked.tensors, strict=True))
        if diverged or (active and backend == "auto"):
            kernel = TABLE["chunked"]
    assert kernel.run is not None
    if not active:
        return kernel.run(inputs, None, lse)
    requested = [observer.distance_functions(layer_inputs) for observer in active]
    recorder = Recorder(inputs, next((x for x in requested if x is not None), None))
    records = "statistics" in kernel.outputs
    output = kernel.run(inputs, recorder if records else None, lse)
    if not records:
        record_pass(recorder, inputs)
    observation = recorder.observation()
    for observer in active:
        observer.record(layer_inputs, observation)
    return output


def attend(inputs: AttentionInputs, backend: str = "auto") -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by the chosen kernel."""
    return run_kernel(inputs, backend)[0]

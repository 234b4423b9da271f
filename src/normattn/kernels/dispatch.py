"""Which kernel serves a problem: the fastest that can; a request none can serve is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.bias import bias_attention
from normattn.kernels.capabilities import why_not
from normattn.kernels.carried import carried
from normattn.kernels.chunked import chunked
from normattn.kernels.compiled import chunked_node
from normattn.kernels.concatenated import concatenated
from normattn.kernels.fused import fused
from normattn.kernels.infinities import showing_divergence
from normattn.kernels.observe import Eye, observer
from normattn.kernels.observe_tiles import look_over
from normattn.kernels.place import on_cpu
from normattn.kernels.problem import Problem
from normattn.kernels.reference import reference
from normattn.kernels.strips import strips
from normattn.kernels.two_regime import two_regime
from normattn.kernels.two_regime_flash import two_regime_flash


@dataclass(frozen=True)
class Kernel:
    """A way to compute attention; `capabilities` say what it serves."""

    name: str
    run: Callable[[Problem], Tensor]

    def why_not(self, problem: Problem) -> str | None:
        """The reason why it cannot serve the problem, or None."""
        return why_not(self.name, problem)


@dataclass(frozen=True)
class Decision:
    """The kernel of a problem, why it, and why not each of the others."""

    kernel: str
    why: str
    refused: Mapping[str, str]


def _tiles(problem: Problem) -> Tensor:
    return chunked_node(problem) if torch.compiler.is_compiling() else chunked(problem)


def _side_by_side(problem: Problem) -> Tensor:
    return attend(concatenated(problem))


def _in_float32(problem: Problem) -> Tensor:
    """Half-precision tensors widened, so that no score is ever rounded; by the fastest kernel."""
    if problem.q.element_size() != 2:
        return attend(problem)
    q, k, v, far_q, far_k = (
        None if x is None else x.float()
        for x in (problem.q, problem.k, problem.v, problem.far_q, problem.far_k)
    )
    assert q is not None
    assert k is not None
    assert v is not None
    return attend(replace(problem, q=q, k=k, v=v, far_q=far_q, far_k=far_k)).to(problem.v.dtype)


KERNELS: tuple[Kernel, ...] = (
    Kernel("fused", fused),
    Kernel("two-regime", two_regime),
    Kernel("two-regime-flash", two_regime_flash),
    Kernel("bias", bias_attention),
    Kernel("carried", carried),
    Kernel("concatenated", _side_by_side),
    Kernel("chunked", _tiles),
    Kernel("strips", strips),
    Kernel("precise", _in_float32),
    Kernel("reference", reference),
)
BACKENDS: tuple[str, ...] = ("auto", *(kernel.name for kernel in KERNELS))
# Query rows at which tiles beat the stock kernel on a CPU in float32.
_TILES_WIN = range(256, 1025)
# Up to so many features of all layers, and from so many keys on, they are laid side by side.
_FEW_FEATURES, _MANY_KEYS = 32, 2048


def _in_order(problem: Problem) -> Iterator[tuple[str, str]]:
    """The order that is the same on every machine, and why each stands where it does.

    It is the fastest on one kind of AMD core: there tiles beat the stock kernel in half precision,
    and at middle lengths in float32; for two regimes in float32 the stock kernel takes the far
    part. It comes first for a single query of few keys and on a GPU. Hand-written loops are
    unrolled by a compiler, but for the tiles, which are one node of its graph.
    """
    if problem.carry is not None:
        yield from _carrying(problem)
        return
    rows, cpu = problem.q.shape[2], on_cpu(problem.q)
    half = problem.q.element_size() == 2
    if cpu and rows > 1 and not torch.compiler.is_compiling():
        if problem.bias is not None:
            yield "bias", "the bias is a strided view of one line, added tile by tile"
        if problem.window is not None and problem.v.shape[2] > problem.window and not half:
            yield "two-regime", "the far part goes to the stock flash kernel, the band by tiles"
    if cpu and rows == 1 and _step_by_tiles(problem):
        yield "chunked", "for one query over many keys on a CPU plain products stand first"
    if cpu and rows > 1 and half:
        yield "chunked", "in half precision on a CPU tiles stand before the stock kernel"
    if cpu and not torch.compiler.is_compiling() and rows in _TILES_WIN:
        yield "chunked", "at these lengths on a CPU tiles stand before the stock kernel"
    yield "fused", "everything is folded into queries and keys: the stock kernel does the rest"
    if not cpu and not torch.compiler.is_compiling():
        yield "bias", "the bias is a strided view of one line, added tile by tile"
    yield "chunked", "it serves nearly any problem without a T × S matrix"
    yield "strips", "it serves any problem without a T × S matrix, whole rows at a time"
    yield "reference", "no other kernel serves it; it holds the whole T × S matrix"


def _carrying(problem: Problem) -> Iterator[tuple[str, str]]:
    """The ways to sum scores up, which layers above the lowest have no choice of."""
    assert problem.carry is not None
    if problem.carry.way is not None:
        yield problem.carry.way, "the layers below were summed by it"
    if torch.compiler.is_compiling():
        yield "concatenated", "a compiler takes no buffer that is undone in the backward"
    if _few_features(problem):
        yield "concatenated", "so few features of all layers cost less than a buffer of all pairs"
    yield "carried", "one buffer for all layers, and no more products than without a carry"
    yield "concatenated", "it leaves what the buffer cannot serve to another kernel"
    yield "reference", "no other kernel serves it; it holds the whole T × S matrix"


def _few_features(problem: Problem) -> bool:
    """Whether the features of all layers, side by side, beat a buffer.

    Measured on a CPU core in float32: 2 layers of D = 16 take 0.97 of the buffer's time at 2048
    tokens and 0.94 at 4096, 1.11 at 1024 and 1.20 at 512; 3 layers 1.27, 6 layers 1.68, and D = 64
    1.26 at 1024.
    """
    assert problem.carry is not None
    layers, keys = problem.carry.layers, problem.v.shape[2]
    few = layers is not None and layers * problem.q.shape[3] <= _FEW_FEATURES
    return few and problem.q.shape[2] > 1 and keys >= _MANY_KEYS


def _step_by_tiles(problem: Problem) -> bool:
    """Whether plain products beat the stock kernel in a decoding step (measured: 1.1–10 ×)."""
    keys, shared = problem.v.shape[2], problem.q.shape[1] != problem.k.shape[1]
    return keys >= 256 if problem.q.element_size() == 2 else keys >= 2048 and shared


def reasons(problem: Problem, backend: str = "auto") -> Decision:
    """The kernel that `attend` takes, why, and why not each of the others.

    Raises `InputError` for an unknown name and for a kernel that cannot serve the problem.
    """
    objections = {kernel.name: kernel.why_not(problem) for kernel in KERNELS}
    if backend != "auto":
        kernel, why = choose(problem, backend).name, "it was asked for by name"
    else:
        kernel, why = next((k, w) for k, w in _in_order(problem) if objections[k] is None)
    refused = {
        name: reason or f"it could, but {kernel} {_preferred(backend)}"
        for name, reason in objections.items()
        if name != kernel
    }
    return Decision(kernel, why, refused)


def _preferred(backend: str) -> str:
    return "comes first" if backend == "auto" else "was asked for"


def choose(problem: Problem, backend: str = "auto") -> Kernel:
    """The kernel of that name, or the fastest that can serve the problem.

    Raises `InputError` for an unknown name and for a kernel that cannot serve the problem.
    """
    if backend == "auto":
        able = (_NAMED[name] for name, _ in _in_order(problem))
        return next(kernel for kernel in able if kernel.why_not(problem) is None)
    if backend not in _NAMED:
        raise InputError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
    kernel = _NAMED[backend]
    if reason := kernel.why_not(problem):
        raise InputError(f"the {backend} kernel cannot serve this: {reason}")
    return kernel


def unrounded(problem: Problem) -> str:
    """The backend that rounds no score, as the stock kernel does not; "auto" in full precision.

    On a CPU `auto` gives half precision to tiles, which round each score to the tensors' type. The
    stock kernel keeps scores in float32, and so do the parts of two regimes that it is given, which
    is quick where the processor multiplies the type; all else is widened.
    """
    q = problem.q
    if q.device.type != "cpu" or q.element_size() != 2:
        return "auto"
    if why_not("fused", problem) is None:
        return "fused"
    quick = q.dtype == torch.bfloat16 and q.shape[2] > 1 and not torch.compiler.is_compiling()
    if quick and torch.cpu._is_amx_tile_supported() and why_not("two-regime", problem) is None:
        return "two-regime"
    return "precise"


_NAMED: Mapping[str, Kernel] = {kernel.name: kernel for kernel in KERNELS}
# Kernels that show their tiles to an eye, and those that give way to tiles for it.
_SEEN_INTO: Mapping[str, Callable[[Problem, Eye], Tensor]] = {
    "chunked": chunked,
    "bias": bias_attention,
    "carried": carried,
    "strips": strips,
    "reference": reference,
}
_TILED = ("fused", "two-regime", "two-regime-flash")


# Kernels that on a CPU make 0 of NaN, or show it in earlier rows: tiles take what is not finite.
_ASTRAY = (*_TILED, "bias")
_ASKING_AGAIN = ("concatenated", "precise")


def attend(problem: Problem, backend: str = "auto") -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by the chosen kernel.

    While an `observer` is on, a CPU's tiles take what the stock kernel would, so that they can be
    read as they are computed; a kernel that cannot be looked into is followed by a pass that only
    looks.
    """
    device = problem.q.device.type
    if torch.is_autocast_enabled(device):
        # The tensors' own type decides, for every score alike.
        with torch.autocast(device, enabled=False):
            return attend(problem, backend)
    kernel, by = choose(problem, backend), observer()
    if kernel.name in _ASKING_AGAIN:
        # What these make of the problem comes by here once more.
        return kernel.run(problem)
    shown = showing_divergence(problem)
    if shown is not problem and kernel.name in _ASTRAY and on_cpu(problem.q):
        kernel = kernel if torch.compiler.is_compiling() else _NAMED["chunked"]
    problem = shown
    if by is None:
        return kernel.run(problem)
    eye = Eye(problem, by.functions(problem))
    if backend == "auto" and problem.q.device.type == "cpu" and kernel.name in _TILED:
        kernel = _NAMED["chunked"]
    look_in = _SEEN_INTO.get(kernel.name)
    if look_in is not None:
        out = look_in(problem, eye)
    else:
        out = kernel.run(problem)
        look_over(problem, eye)
    by.see(problem, eye.observation())
    return out

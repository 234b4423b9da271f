"""`explain`: what happens to a score on tensors of given shapes, without computing it.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import Problem, Visibility, reasons
from normattn.kernels.carry import CarriedScores
from normattn.kernels.memory import working_bytes
from normattn.kernels.problem import check_shapes
from normattn.score import ScoreSpec
from normattn.score.part import Part
from normattn.score.spec import as_spec


@dataclass(frozen=True)
class Explanation:
    """What is folded into q and k, what is left to a kernel, which one takes it, and why.

    `refused` says of every other kernel why not. `output_bytes` and `working_bytes` are the memory
    of one forward beside q, k and v, estimated.
    """

    spec: str
    shapes: str
    folded: tuple[str, ...]
    left: tuple[str, ...]
    kernel: str
    why: str
    refused: Mapping[str, str]
    output_bytes: int
    working_bytes: int

    def __str__(self) -> str:
        lines = [f"{self.spec} on {self.shapes}", "folded into q and k:", *_items(self.folded)]
        lines += ["left to the kernel:", *_items(self.left)]
        lines += [f"kernel: {self.kernel} ({self.why})", "not taken:"]
        lines += _items([f"{name}: {reason}" for name, reason in self.refused.items()])
        output, working = self.output_bytes / 2**20, self.working_bytes / 2**20
        lines.append(f"memory of a forward: {output:.1f} MiB of output, about {working:.1f} beside")
        return "\n".join(lines)


def explain(
    spec: ScoreSpec | str,
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    v_shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    causal: bool = True,
    backend: str = "auto",
) -> Explanation:
    """What `attention` would do with a score on tensors of these shapes; nothing is allocated.

    Args:
        spec: a specification or its name.
        q_shape: (B, H, T, D).
        k_shape: (B, G, S, D); that of q by default.
        v_shape: (B, G, S, E); that of k by default.
        dtype: of all three.
        device: a CPU or a CUDA device, which need not be there.
        causal: as for `attention`.
        backend: as for `attention`.

    Raises `InputError` where `attention` would: shapes that do not fit, an incomplete score, a
    kernel that cannot serve it; and for a layout, which is a score per layer.
    """
    spec = as_spec(spec).resolve()
    if spec.layout is not None:
        raise InputError(
            f"{spec.name} is a different score in each layer: explain spec.layer(i, layers)"
        )
    if spec.needs_causal and not causal:
        raise InputError(f"{spec.name} is defined for causal attention only")
    if spec.leaks_future and causal:
        raise InputError(f"{spec.name} normalises across the sequence: it is not causal")
    problem = _problem(spec, _stand_ins((q_shape, k_shape, v_shape), dtype, device), causal)
    decision = reasons(problem, backend)
    folded, left = _told(spec)
    q, v = problem.q, problem.v
    shapes = f"q {tuple(q.shape)}, k {tuple(problem.k.shape)}, v {tuple(v.shape)}"
    return Explanation(
        str(spec),
        f"{shapes}, {dtype} on {q.device.type}, {'causal' if causal else 'not causal'}",
        folded,
        left,
        decision.kernel,
        decision.why,
        decision.refused,
        q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3] * q.element_size(),
        working_bytes(decision.kernel, problem),
    )


def _items(lines: Sequence[str]) -> list[str]:
    return [f"  - {line}" for line in lines] or ["  - nothing"]


class _StandIn(Tensor):
    """A tensor without storage, which no operation takes; torch's own fakes load its compiler."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Any:
        place = torch.device(device)
        return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=place)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} needs numbers, and a stand-in has none")


def _stand_ins(
    shapes: tuple[Sequence[int], Sequence[int] | None, Sequence[int] | None],
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors without storage, on a device that need not exist."""
    if torch.device(device).type not in ("cpu", "cuda"):
        raise InputError(f"kernels run on a CPU or a CUDA device, not on {device}")
    q_shape, k_shape, v_shape = shapes
    k_shape = q_shape if k_shape is None else k_shape
    v_shape = k_shape if v_shape is None else v_shape
    q, k, v = (_StandIn(shape, dtype, device) for shape in (q_shape, k_shape, v_shape))
    check_shapes(q, k, v)
    return q, k, v


def _problem(spec: ScoreSpec, tensors: tuple[Tensor, Tensor, Tensor], causal: bool) -> Problem:
    """The problem as a kernel would get it, of stand-ins."""
    q, k, v = tensors
    rows, keys, heads = q.shape[2], k.shape[2], q.shape[1]
    if rows > keys:
        raise InputError(
            f"{rows} queries are the last of the keys, but there are only {keys}: give positions"
        )
    key = torch.arange(keys)
    window, kept = spec.visible
    apart = spec.documents is not None or spec.chunk is not None
    documents = key.new_zeros(k.shape[0], keys) if apart else None
    seen = Visibility(
        *(causal, key[keys - rows :], key, documents is None),
        window=window,
        kept=kept,
        query_documents=None if documents is None else documents[:, keys - rows :],
        key_documents=documents,
    )
    two = spec.regime is not None and spec.regime.window is not None
    bias = _StandIn((heads, keys), q.dtype, q.device) if spec.bias is not None else None
    sink = _StandIn((heads,), q.dtype, q.device) if spec.sink is not None else None
    if bias is not None and spec.bias is not None and spec.bias.learned(heads):
        bias.requires_grad_()
    return Problem(
        *(q, k, v, seen, q if two else None, k if two else None),
        window=spec.regime.window if two and spec.regime is not None else None,
        bias=bias,
        sink=sink,
        cap=getattr(spec.cap, "cap", None),
        carry=_carry(spec),
    )


def _carry(spec: ScoreSpec) -> CarriedScores | None:
    """An empty one where scores are carried; queries and keys are, by any kernel, unseen."""
    if spec.carry is None or spec.carry.carries == "features":
        return None
    return CarriedScores(spec.carry.mean)


def _told(spec: ScoreSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is folded into q and k, and what a kernel has to do."""

    def told(*parts: Part | None) -> list[str]:
        return [f"{part.name}: {part.summary}" for part in parts if part is not None]

    scores = spec.carry is not None and spec.carry.carries == "scores"
    features = None if scores else spec.carry
    folded = told(spec.variant, spec.logn, spec.order, spec.position, spec.spectrum, features)
    carried = spec.carry if scores else None
    left = told(
        spec.regime,
        carried,
        spec.bias,
        spec.cap,
        spec.sink,
        *_visible(spec),
        spec.documents,
        spec.gate,
    )
    if spec.moves:
        left.append(f"query rows in blocks of {spec.train_length}: the spectrum moves")
    return tuple(folded), tuple(left)


def _visible(spec: ScoreSpec) -> tuple[Part, ...]:
    return tuple(part for part in spec.parts if part.slot.value == "visible")

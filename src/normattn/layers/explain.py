"""`explain`: which kernel computes a score for tensors of given shapes, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, reasons
from normattn.kernels.inputs import check_shapes
from normattn.layers.checks import AttentionArguments
from normattn.layers.gates import log_gates, pair_values, sum_gates
from normattn.layers.plan import build_plan
from normattn.layers.residual_scores import residual_layers
from normattn.score import Score, ScoreSpec
from normattn.score.spec import as_spec


@dataclass(frozen=True)
class Explanation:
    """How a score is computed: absorbed and remaining components, and the kernel with its reason.

    `refused` maps each other kernel to the reason against it.
    """

    spec: str
    shapes: str
    folded: tuple[str, ...]
    left: tuple[str, ...]
    kernel: str
    why: str
    refused: Mapping[str, str]

    def __str__(self) -> str:
        def bullets(items: Sequence[str]) -> list[str]:
            return [f"  - {item}" for item in items or ("nothing",)]

        return "\n".join(
            (
                f"{self.spec} on {self.shapes}",
                *("absorbed into q and k:", *bullets(self.folded)),
                *("left to the kernel:", *bullets(self.left)),
                f"kernel: {self.kernel} ({self.why})",
                "other kernels:",
                *bullets([f"{name}: {reason}" for name, reason in self.refused.items()]),
            )
        )


def explain(
    spec: ScoreSpec | Score | str,
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    v_shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    causal: bool = True,
    backend: str = "auto",
) -> Explanation:
    """Explain how `attention` would compute a score on these shapes, without allocating tensors.

    Args:
        spec: a specification, its name, or a `Score`.
        q_shape: (B, H, T, D).
        k_shape: (B, G, S, D); `q_shape` by default.
        v_shape: (B, G, S, E); `k_shape` by default.
        dtype: of all three.
        device: a CPU or a CUDA device, which need not be present.
        causal: as for `attention`.
        backend: as for `attention`.

    Raises `InputError` where `attention` would: shapes that do not fit, an incomplete score, an
    unsupported backend; and for a layout, which is a score per layer.
    """
    spec = spec.spec if isinstance(spec, Score) else as_spec(spec)
    if str(device).split(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"kernels run on a CPU or a CUDA device, not on {device}")
    spec, target = spec.resolve(), torch.device(device)
    k_shape = q_shape if k_shape is None else k_shape
    shapes = (q_shape, k_shape, k_shape if v_shape is None else v_shape)
    inputs = _kernel_inputs(spec, shapes, dtype, target, causal)
    kernel, why, refused = reasons(inputs, backend)
    residual, scores = spec.residual, None
    if residual is not None and residual.summed == "scores":
        residual, scores = None, residual
    windows = [part for part in spec.parts if part.slot.value == "window"]
    absorbed = (spec.variant, spec.logn, spec.order, spec.position, spec.rope_scaling, residual)
    remaining = (
        *(spec.remapping, spec.chunk_remapping, scores, spec.bias, spec.cap, spec.sink),
        *(spec.normaliser, spec.difference, spec.selection, *windows, spec.documents, spec.values),
        spec.gate,
    )
    folded, left = (
        [f"{part.name}: {part.summary}" for part in parts if part is not None]
        for parts in (absorbed, remaining)
    )
    if spec.blockwise:
        name, rows = spec.block
        left.append(f"query rows in blocks of {rows}: {name} rotates keys for each block")
    sizes = ", ".join(f"{name} {tuple(x)}" for name, x in zip("qkv", shapes, strict=True))
    sizes = f"{sizes}, {dtype} on {target.type}, {'causal' if causal else 'not causal'}"
    return Explanation(str(spec), sizes, tuple(folded), tuple(left), kernel, why, refused)


class _FakeTensor(Tensor):
    """A tensor without data that reports a device, which this machine may lack."""

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=device, requires_grad=like.requires_grad
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func} needs data, and a fake tensor has none")


def _kernel_inputs(
    spec: ScoreSpec, shapes: Sequence[Any], dtype: torch.dtype, device: torch.device, causal: bool
) -> AttentionInputs:
    """The inputs of the kernel; for a blockwise score, of the last block."""
    try:
        # Expanded tensors hold one number, however large the shape.
        samples = [torch.zeros((), dtype=dtype).expand(tuple(shape)) for shape in shapes]
    except (TypeError, RuntimeError) as error:
        raise InputError(f"no tensors have the shapes {', '.join(map(str, shapes))}") from error
    check_shapes(*samples)
    with torch.device("meta"):
        q, k, v = (torch.empty(tuple(shape), dtype=dtype) for shape in shapes)
        (batch, heads, _, _), (keys, size) = q.shape, k.shape[2:]
        score, forget_sums = Score(spec, heads, size, k.shape[1]), None
        packed = spec.documents is not None
        documents = torch.empty(batch, keys, dtype=torch.int64) if packed else None
        if spec.forgets:
            logits = torch.empty(batch, keys, heads)
            forget_sums = sum_gates(log_gates(logits, k.shape[1], dtype), heads)
    residual, recorded = residual_layers(spec, 1), []

    def record(inputs: AttentionInputs) -> Tensor:
        recorded.append(inputs)
        return inputs.v.new_empty(*inputs.q.shape[:3], inputs.v.shape[3])

    # Without the gate, which no kernel sees.
    args = AttentionArguments(
        causal=causal, documents=documents, residual=None if residual is None else residual[0]
    )
    plan = build_plan(spec, q, keys, args)
    plan.attend(score, q, k, pair_values(spec, v, size), args, record, forget_sums)
    inputs = recorded[-1]
    tensors = [None if x is None else _FakeTensor(x, device) for x in inputs.tensors]
    fakes = AttentionInputs.of(inputs.settings, tensors)
    return replace(fakes, residual_scores=inputs.residual_scores)

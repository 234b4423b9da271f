"""What all models share: checked token ids, dropout off, inference-time methods, meta models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normattn.errors import InputError
from normattn.score import Score, ScoreSpec


def checked_ids(ids: Any, name: str = "ids") -> Tensor:
    """`ids` themselves; `InputError` unless they are a dense matrix (B, T) of int64 or int32."""
    if not isinstance(ids, Tensor):
        found = f"a {type(ids).__name__}"
    elif ids.layout is not torch.strided:
        found = f"sparse {ids.dtype}"
    elif ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        found = f"{ids.dtype} of {tuple(ids.shape)}"
    else:
        return ids
    raise InputError(
        f"{name} must be a tensor of whole numbers (int64 or int32) of shape (B, T), not {found}"
    )


def embed(
    table: nn.Embedding, norm: nn.Module | None, ids: Tensor, vocabulary: str | None = None
) -> Tensor:
    """The normalised embeddings (B, T, D) of `ids` (B, T).

    Raises `InputError` for an id outside the table (on a CPU); `vocabulary` says what is in it.
    """
    try:
        x: Tensor = table(ids)
    except IndexError as error:
        known = vocabulary or f"this model's vocabulary is 0 to {table.num_embeddings - 1}"
        raise InputError(
            f"token ids run from {int(ids.min())} to {int(ids.max())}; {known}"
        ) from error
    return x if norm is None else norm(x)


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Evaluation mode inside; each of the `model.modules()` then has its own mode again."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class MethodHandle:
    """An inference-time method that is on; `.remove()` or leaving `with` undoes it exactly.

    Only the active spec of each `Score` changes: no weight, no buffer, no train or eval mode.
    `specs` has one for each of `scores`; `.spec` is the whole model's. Removing twice is harmless.
    """

    def __init__(
        self, scores: Sequence[Score], specs: Sequence[ScoreSpec], spec: ScoreSpec
    ) -> None:
        self.spec = spec
        self._before: list[tuple[Score, ScoreSpec]] = []
        try:
            for score, own in zip(scores, specs, strict=True):
                before = score.spec
                score.use(own)
                self._before.append((score, before))
        except BaseException:
            self.remove()
            raise

    @property
    def active(self) -> bool:
        """Whether the method is still switched on."""
        return bool(self._before)

    def remove(self) -> None:
        """Give every `Score` the spec that it had before."""
        while self._before:
            score, spec = self._before.pop()
            score.use(spec)

    def __enter__(self) -> MethodHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _WithoutDraws(TorchFunctionMode):
    """Normal numbers are not drawn: torch would load its compiler for them, which takes seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            return args[0] if args else given["tensor"]
        return func(*args, **given)


@contextmanager
def on_meta() -> Iterator[None]:
    """Modules made inside have parameters with shapes and dtypes, but take no memory."""
    with torch.device("meta"), _WithoutDraws():
        yield

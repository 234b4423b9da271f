"""Helpers of all models: token ids, evaluation mode, inference-time methods, meta models."""

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
    """Return `ids`; `InputError` unless they are a dense (B, T) tensor of int64 or int32."""
    if not isinstance(ids, Tensor):
        actual = f"a {type(ids).__name__}"
    elif ids.layout is not torch.strided:
        actual = f"sparse {ids.dtype}"
    elif ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        actual = f"{ids.dtype} of {tuple(ids.shape)}"
    else:
        return ids
    raise InputError(
        f"{name} must be a tensor of whole numbers (int64 or int32) of shape (B, T), not {actual}"
    )


def embed(table: nn.Embedding, norm: nn.Module | None, ids: Tensor) -> Tensor:
    """The normalised embeddings of `ids`; `InputError` for unknown ids (CPU)."""
    try:
        x: Tensor = table(ids)
    except IndexError as error:
        raise InputError(
            f"token ids run from {int(ids.min())} to {int(ids.max())}; this model's vocabulary is "
            f"0 to {table.num_embeddings - 1}"
        ) from error
    return x if norm is None else norm(x)


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Switch to evaluation mode inside; afterwards each module has its previous mode."""
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

    Only the active specification of each `Score` changes, no weight or buffer. `specs` has one for
    each of `scores`; `.spec` is the whole model's. Removing twice is harmless.
    """

    def __init__(
        self, scores: Sequence[Score], specs: Sequence[ScoreSpec], spec: ScoreSpec
    ) -> None:
        self.spec = spec
        self._before: list[tuple[Score, ScoreSpec]] = []
        try:
            for score, layer_spec in zip(scores, specs, strict=True):
                before = score.spec
                score.use(layer_spec)
                self._before.append((score, before))
        except BaseException:
            self.remove()
            raise

    @property
    def active(self) -> bool:
        """Whether the method is still switched on."""
        return bool(self._before)

    def remove(self) -> None:
        """Restore the previous specification of every `Score`."""
        while self._before:
            score, spec = self._before.pop()
            score.use(spec)

    def __enter__(self) -> MethodHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _SkipNormal(TorchFunctionMode):
    """Skip drawing normal numbers: on the meta device torch would load its compiler for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Parameters of modules made inside have shapes and dtypes, but take no memory."""
    with torch.device("meta"), _SkipNormal():
        yield

"""Look at the queries and keys that every layer's score prepares, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.score import Score


@dataclass(frozen=True)
class Seen:
    """One layer's score at work: the keys as they came in, and what a kernel was given."""

    layer: int
    key: Float[Tensor, "b g s d"]
    problem: AttentionInputs


@contextmanager
def watching(model: nn.Module, see: Callable[[Seen], None]) -> Iterator[None]:
    """Call `see` after each `Score` of `model` has prepared its queries and keys, while inside.

    Layers count from 0 in the order of the model's modules. The hooks are gone afterwards, whatever
    happened. Raises `InputError` for a model without any `Score`, and, while it reads, for scores
    whose pairs are not all of one prepared q and k: a second regime of positions, a moving
    spectrum, packed documents.
    """
    scores = [module for module in model.modules() if isinstance(module, Score)]
    if not scores:
        raise InputError("this model holds no Score to look at")
    handles = [score.register_forward_hook(_hook(layer, see)) for layer, score in enumerate(scores)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    layer: int, see: Callable[[Seen], None]
) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, given: tuple[Any, ...], problem: Any) -> None:
        assert isinstance(module, Score)
        assert isinstance(problem, AttentionInputs)
        spec = module.spec
        if problem.two_regimes or spec.blockwise or spec.documents is not None:
            raise InputError(
                f"{spec.name} scores a pair by more than one prepared query and key; switch the "
                "method off to look at the score"
            )
        if spec.forgets:
            raise InputError(f"{spec.name} has a forgetting gate, which joins the score later")
        see(Seen(layer, given[1], problem))

    return hook

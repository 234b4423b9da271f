"""What each parameter is to an optimiser: a matrix, an embedding, or a vector (gain, bias)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from torch import nn

_VECTOR_NAMES = frozenset({"gain", "bias", "gamma", "beta", "scale", "alpha"})


@dataclass(frozen=True)
class ParameterGroups:
    """Named parameters by kind, each once (a tied one where it is met first), in model order."""

    matrices: dict[str, nn.Parameter]
    embeddings: dict[str, nn.Parameter]
    vectors: dict[str, nn.Parameter]

    def items(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every (name, parameter): matrices, embeddings, vectors."""
        return chain(self.matrices.items(), self.embeddings.items(), self.vectors.items())


def group_parameters(model: nn.Module) -> ParameterGroups:
    """Group the trainable parameters of `model`.

    Embeddings are the weights of `nn.Embedding`. Vectors are everything of fewer than two axes,
    whatever is named a gain, bias, gamma, beta, scale or alpha (a gain per head has two axes and
    is still a gain), and what an attention score learns. All else is a matrix.
    """
    groups = ParameterGroups({}, {}, {})
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            groups.embeddings[name] = parameter
        elif parameter.ndim < 2 or _is_vector(name):
            groups.vectors[name] = parameter
        else:
            groups.matrices[name] = parameter
    return groups


def _is_vector(name: str) -> bool:
    *path, last = name.split(".")
    return "score" in path or not _VECTOR_NAMES.isdisjoint(last.split("_"))

"""Hand-written backwards have no derivative of their own: asking for one is refused in words."""

from __future__ import annotations

import torch

from normattn.errors import InputError


def refuse_second_derivative(who: str, instead: str) -> None:
    """Raise `InputError` when called from a backward that is to be differentiated again.

    torch's `once_differentiable` says nothing where the incoming gradient is a constant, and the
    second derivative is then silently 0.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InputError(f"{who} gives no second derivatives (create_graph=True); use {instead}")

"""A model and its optimiser as named tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.lab.training.optim import Optimiser

MODEL = "model/"
OPTIMISER = "optimiser/"


def pack(model: nn.Module, optimiser: Optimiser) -> dict[str, Tensor]:
    """`model/NAME` for each parameter and kept buffer, `optimiser/NAME/KEY` for each state.

    A tied parameter appears once. The tensors are the live ones, not copies.
    """
    weights = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
    return weights | {OPTIMISER + name: state for name, state in optimiser.state().items()}


@torch.no_grad()
def unpack(tensors: Mapping[str, Tensor], model: nn.Module, optimiser: Optimiser) -> None:
    """Put what `pack` gave back into a model and optimiser of the same construction.

    Raises `InputError` when a tensor is missing, unknown, or of another shape.
    """
    weights = {k.removeprefix(MODEL): v for k, v in tensors.items() if k.startswith(MODEL)}
    own = model_tensors(model)
    if weights.keys() != own.keys():
        name = sorted(weights.keys() ^ own.keys())[0]
        where = "checkpoint" if name in own else "model"
        raise InputError(f"the checkpoint is of another model: the {where} lacks {name}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise InputError(
                f"the checkpoint is of another model: {name} has shape "
                f"{tuple(weights[name].shape)} there and {tuple(tensor.shape)} here"
            )
        tensor.copy_(weights[name])
    moments = {k: v for k, v in tensors.items() if k.startswith(OPTIMISER)}
    optimiser.load_state({k.removeprefix(OPTIMISER): v for k, v in moments.items()})


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (a tied one once) and the buffers that a state_dict keeps, by name."""
    kept = model.state_dict().keys()
    named: dict[str, Tensor] = dict(model.named_parameters())
    named.update({name: buffer for name, buffer in model.named_buffers() if name in kept})
    return named


def kept_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a state_dict keeps, such as running statistics; live ones, not copies."""
    kept = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in kept]

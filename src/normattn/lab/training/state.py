"""A model and its optimiser as named tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from normattn.errors import InputError

MODEL = "model/"
OPTIMISER = "optimiser/"


def pack(
    model: nn.Module, optimiser: torch.optim.Optimizer, names: Sequence[str]
) -> dict[str, Tensor]:
    """`model/NAME` for each parameter and kept buffer, `optimiser/NAME/KEY` for each state.

    A tied parameter appears once. `names` are the optimiser's parameters in its order. The
    tensors are the live ones, not copies.
    """
    tensors = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
    for index, state in optimiser.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"{OPTIMISER}{names[index]}/{key}"] = torch.as_tensor(value)
    return tensors


@torch.no_grad()
def unpack(
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    names: Sequence[str],
) -> None:
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
    _unpack_optimiser(tensors, optimiser, names)


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


def all_finite(model: nn.Module) -> bool:
    """Whether what this process holds of every parameter are finite numbers only."""
    return all(bool(torch.isfinite(_here(p.detach())).all()) for p in model.parameters())


def _here(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, or of a divided one (a DTensor) its part."""
    local = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(local, Tensor)
    return local


def _unpack_optimiser(
    tensors: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, names: Sequence[str]
) -> None:
    states: dict[int, dict[str, Tensor]] = {}
    for index, name in enumerate(names):
        prefix = f"{OPTIMISER}{name}/"
        state = {
            k.removeprefix(prefix): v.clone() for k, v in tensors.items() if k.startswith(prefix)
        }
        if state:
            states[index] = state
    count = sum(len(state) for state in states.values())
    if count != sum(name.startswith(OPTIMISER) for name in tensors):
        raise InputError("the checkpoint holds optimiser state of parameters that do not exist")
    optimiser.load_state_dict({**optimiser.state_dict(), "state": states})

"""Optimisers: AdamW, Tiger and Muon, over parameters grouped by kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.lab.training.config import AdamWConfig, MuonConfig, OptimiserConfig, TigerConfig
from normattn.lab.training.sharding import full_tensor, local_rows
from normattn.layers import GELU, Attention, CrossAttention, GatedAttentionUnit, SwiGLU
from normattn.layers.attention import SelfAttention

Named = dict[str, nn.Parameter]
_VECTOR_NAMES = frozenset({"gain", "bias", "gamma", "beta", "scale", "alpha"})


@dataclass(frozen=True)
class ParameterGroups:
    """Named parameters by kind, each once and in model order."""

    matrices: Named
    embeddings: Named
    vectors: Named

    def items(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over (name, parameter): matrices, embeddings, vectors."""
        return chain(self.matrices.items(), self.embeddings.items(), self.vectors.items())


def group_parameters(model: nn.Module) -> ParameterGroups:
    """Group the trainable parameters of `model`.

    Embeddings are the weights of `nn.Embedding`. Vectors have fewer than two axes, are named gain,
    bias, gamma, beta, scale or alpha (a gain per head has two axes), or belong to an attention
    score. All other parameters are matrices.
    """
    groups = ParameterGroups({}, {}, {})
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            groups.embeddings[name] = parameter
            continue
        *path, last = name.split(".")
        vector = "score" in path or not _VECTOR_NAMES.isdisjoint(last.split("_"))
        (groups.vectors if vector or parameter.ndim < 2 else groups.matrices)[name] = parameter
    return groups


class Optimiser:
    """One or two torch optimisers over the named parameters of a model, stepped together.

    Its state is saved and loaded by the parameters' names.
    """

    def __init__(self, members: list[tuple[torch.optim.Optimizer, list[str]]]) -> None:
        self.members = members

    @property
    def names(self) -> list[str]:
        """The names of all parameters, in the order of `param_groups`."""
        return [name for _, names in self.members for name in names]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all members."""
        return [group for member, _ in self.members for group in member.param_groups]

    def zero_grad(self) -> None:
        """Drop every gradient."""
        for member, _ in self.members:
            member.zero_grad(set_to_none=True)

    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient, with learning rate `lr`."""
        for group in self.param_groups:
            group["lr"] = lr
        for member, _ in self.members:
            member.step()

    def state(self) -> dict[str, Tensor]:
        """Return the state, not copied, as NAME/KEY for each parameter and moment."""
        return {
            f"{names[index]}/{key}": torch.as_tensor(value)
            for member, names in self.members
            for index, state in member.state_dict()["state"].items()
            for key, value in state.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load copies of what `state` returned; `InputError` for state of unknown parameters."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, value in tensors.items():
            name, _, key = path.rpartition("/")
            by_name.setdefault(name, {})[key] = value.clone()
        if not by_name.keys() <= {*self.names}:
            raise InputError("the checkpoint holds optimiser state of parameters that do not exist")
        for member, names in self.members:
            state = {index: by_name[name] for index, name in enumerate(names) if name in by_name}
            member.load_state_dict({**member.state_dict(), "state": state})


def make_optimiser(model: nn.Module, config: OptimiserConfig) -> Optimiser:
    """Return the optimiser of `model`'s trainable parameters; `InputError` if it has none."""
    groups = group_parameters(model)
    names = [name for name, _ in groups.items()]
    if not names:
        raise InputError("the model has no trainable parameter")
    if isinstance(config, TigerConfig):
        return Optimiser([(Tiger(groups, config), names)])
    if isinstance(config, AdamWConfig):
        decayed = {**groups.matrices, **groups.embeddings}
        return Optimiser([(_adamw(decayed, groups.vectors, config, fused=True), names)])
    # Muon for hidden matrices, AdamW for embeddings, the head, vectors and scores.
    matrices: Named = {}
    decayed = {}
    for name, parameter in groups.matrices.items():
        hidden = parameter.ndim == 2 and not name.startswith("head.")
        (matrices if hidden else decayed)[name] = parameter
    decayed |= groups.embeddings
    rows = {} if config.split is None else projection_rows(model, config.split)
    if config.split is not None and matrices.keys().isdisjoint(rows):
        raise InputError(
            f"optimiser.split is {config.split!r}, but the model has no attention projections to "
            "split; leave it out"
        )
    members: list[tuple[torch.optim.Optimizer, list[str]]] = []
    if matrices:
        blocks = [rows.get(name, [len(p)]) for name, p in matrices.items()]
        members.append((Muon(matrices.values(), blocks, config), [*matrices]))
    if decayed or groups.vectors:
        adamw = _adamw(decayed, groups.vectors, config)
        members.append((adamw, [*decayed, *groups.vectors]))
    return Optimiser(members)


def _adamw(
    decayed: Named, undecayed: Named, config: AdamWConfig | MuonConfig, **options: Any
) -> torch.optim.AdamW:
    """Return torch's AdamW without weight decay on `undecayed`."""
    members = [(list(decayed.values()), config.weight_decay), (list(undecayed.values()), 0.0)]
    groups = [{"params": params, "weight_decay": decay} for params, decay in members if params]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **options)


def projection_rows(model: nn.Module, split: Literal["qkv", "heads"]) -> dict[str, list[int]]:
    """Return the row counts of the projections inside fused weights, by the weight's name.

    "qkv" separates queries, keys and values, "heads" also their heads. A gated attention unit has
    one head: always u, v and its shared or separate keys.
    """
    rows: dict[str, list[int]] = {}
    for name, layer in model.named_modules():
        path = f"{name}." if name else ""
        if isinstance(layer, GatedAttentionUnit):
            rows[f"{path}expand.weight"] = layer.widths
        elif isinstance(layer, Attention | CrossAttention):
            heads = [[layer.head_dim] * count for count in (layer.heads, layer.kv_heads)]
            q, kv = heads if split == "heads" else [[sum(sizes)] for sizes in heads]
            if isinstance(layer, Attention):
                rows[f"{path}qkv.weight"] = [*q, *kv, *kv]
            else:
                rows[f"{path}q.weight"] = q
                rows[f"{path}kv.weight"] = [*kv, *kv]
    return rows


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalised momentum, for each block of rows of a matrix.

        m ← β·m + (1 − β)·g
        θ ← θ − η·(0.2·√max(rows, columns)·NS(β·m + (1 − β)·g) + wd·θ)

    NS is `orthogonalise`. The factor matches the step size of AdamW, so that both share one η.
    `blocks` has the row counts of each parameter's blocks, which are orthogonalised separately.
    Under fsdp every process computes NS of the full matrix and updates its own rows.
    Sources: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), arXiv 2502.16982.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], blocks: Sequence[list[int]], config: MuonConfig
    ) -> None:
        defaults = {"weight_decay": config.weight_decay, "momentum": config.momentum}
        super().__init__(parameters, {"lr": config.lr, **defaults})
        self._blocks = dict(zip(self.param_groups[0]["params"], blocks, strict=True))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            lr, beta = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"]
                momentum.lerp_(parameter.grad, 1 - beta)
                update = full_tensor(parameter.grad.lerp(momentum, beta))
                parameter.mul_(1 - lr * group["weight_decay"])
                local, first = local_rows(parameter)
                start = 0
                for rows, equal in groupby(self._blocks[parameter]):  # Neighbours as one batch.
                    count = len([*equal])
                    block = update[start : start + count * rows]
                    batch = block if count == 1 else block.reshape(count, rows, -1)
                    size = 0.2 * math.sqrt(max(batch.shape[-2:]))
                    direction = orthogonalise(batch).reshape(block.shape)
                    low, high = max(start, first), min(start + len(block), first + len(local))
                    if low < high:
                        local_update = direction[low - start : high - start]
                        local[low - first : high - first].add_(local_update, alpha=-lr * size)
                    start += count * rows


def orthogonalise(update: Float[Tensor, "*n r c"]) -> Float[Tensor, "*n r c"]:
    """Return nearly U·Vᵀ of each matrix U·S·Vᵀ, by five Newton-Schulz steps in bf16.

    Each step is x ← a·x + (b·x·xᵀ + c·(x·xᵀ)²)·x, from x = update / ‖update‖.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    tall = update.shape[-2] > update.shape[-1]
    x: Tensor = update.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    multiply: Any = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(5):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Tiger(torch.optim.Optimizer):
    """Tiger: the sign of the momentum, scaled by the size of each parameter.

        m ← β·m + (1 − β)·g
        θ ← θ − η_θ·(sign m + wd·θ)

    η_θ = η·RMS(θ) for a matrix, η·RMS(row) for each row of an embedding, η/2 and no decay for gains
    and biases. One state tensor per parameter. An all-zero matrix has RMS 0 and would never change,
    so it raises `InputError`. Source: kexue 9512.
    """

    def __init__(self, groups: ParameterGroups, config: TigerConfig) -> None:
        for name, parameter in groups.matrices.items():
            if not parameter.any():
                raise InputError(
                    f"Tiger cannot train {name}: it is all zero, so its step would be zero"
                )
        decay = config.weight_decay
        kinds = (("matrix", groups.matrices, decay), ("embedding", groups.embeddings, decay))
        params = [
            {"params": list(members.values()), "kind": kind, "weight_decay": weight_decay}
            for kind, members, weight_decay in (*kinds, ("vector", groups.vectors, 0.0))
            if members
        ]
        super().__init__(params, {"lr": config.lr, "beta": config.beta})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            lr, decay = group["lr"], group["weight_decay"]
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[parameter]["momentum"] for parameter in parameters]
            torch._foreach_lerp_(momenta, [p.grad for p in parameters], 1.0 - group["beta"])
            updates = torch._foreach_sign(momenta)
            if decay != 0.0:
                torch._foreach_add_(updates, parameters, alpha=decay)
            if group["kind"] == "vector":
                torch._foreach_add_(parameters, updates, alpha=-lr / 2.0)
                continue
            if group["kind"] == "embedding":  # RMS of each row, (rows, 1) each.
                sizes = [p.square().mean(dim=-1, keepdim=True).sqrt_() for p in parameters]
            else:  # RMS of each whole matrix, () each.
                sizes = list(torch._foreach_norm(parameters))
                torch._foreach_div_(sizes, [math.sqrt(p.numel()) for p in parameters])
            torch._foreach_mul_(updates, sizes)
            torch._foreach_add_(parameters, updates, alpha=-lr)


class UnitWeights:
    """nGPT's weight normalisation: vectors of length 1 along the model's width, after each step.

    They are the rows of embeddings, the head and input projections (W_q, W_k, W_v, W_up), and the
    columns of output projections (W_out, W_down). Source: arXiv 2410.01131; github.com/NVIDIA/ngpt,
    `normalize_matrices` of train.py.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        outputs = {m.out for m in modules if isinstance(m, SelfAttention | CrossAttention)}
        outputs |= {m.down for m in modules if isinstance(m, SwiGLU | GELU)}
        # Keyed by parameter, so that a tied head counts once.
        self._axes = {
            module.weight: 0 if module in outputs else 1
            for module in modules
            if isinstance(module, nn.Linear | nn.Embedding) and module.weight.requires_grad
        }

    @torch.no_grad()
    def normalise(self) -> None:
        """Scale every vector to length 1; zero vectors stay zero."""
        for weight, axis in self._axes.items():
            weight.copy_(F.normalize(weight, dim=axis))

"""Muon: each matrix moves by the nearest orthogonal matrix to its momentum; the rest by AdamW.

    m ← β·m + (1 − β)·g
    θ ← θ − η·(0.2·√max(rows, columns)·NS(β·m + (1 − β)·g) + wd·θ)

NS is five Newton-Schulz steps towards U·Vᵀ of U·S·Vᵀ, in bf16 (torch's). The factor gives a step
the size of AdamW's, so that both parts share one η. Matrices are what `groups` calls so, without
the head; the `qkv` of multi-head attention is one of them, not three. Embeddings, the head, gains,
biases and what a score learns go by AdamW. Sources: Jordan et al. 2024
(kellerjordan.github.io/posts/muon), arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from normattn.errors import InputError
from normattn.lab.training.optimisers.config import MuonConfig
from normattn.lab.training.optimisers.groups import ParameterGroups
from normattn.lab.training.optimisers.stepping import Stepping

Named = dict[str, nn.Parameter]
_SHARED = "match_rms_adamw"


class Muon(Stepping):
    """torch's Muon and AdamW over grouped parameters, as one optimiser; `names` are in its order.

    Raises `InputError` where torch has no Muon (before 2.9).
    """

    def __init__(self, groups: ParameterGroups, config: MuonConfig) -> None:
        make: Any = getattr(torch.optim, "Muon", None)
        if make is None:
            raise InputError(
                f"the optimiser muon needs torch 2.9 or later, not {torch.__version__}"
            )
        matrices, decayed, plain = _divided(groups)
        self.names = [*matrices, *decayed, *plain]
        decay, lr = config.weight_decay, config.lr
        self._members: list[torch.optim.Optimizer] = []
        if matrices:
            of_muon = {"momentum": config.momentum, "adjust_lr_fn": _SHARED}
            self._members.append(make(matrices.values(), lr=lr, weight_decay=decay, **of_muon))
        parts = [
            {"params": list(part.values()), "weight_decay": weight_decay}
            for part, weight_decay in ((decayed, decay), (plain, 0.0))
            if part
        ]
        if parts:
            self._members.append(torch.optim.AdamW(parts, lr, config.betas, config.eps))
        super().__init__([group for member in self._members for group in member.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Groups and state are one: what is set, saved and loaded here holds for both parts."""
        at = 0
        for member in self._members:
            end = at + len(member.param_groups)
            member.param_groups, member.state = self.param_groups[at:end], self.state
            at = end

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state that `state_dict` of an optimiser of the same construction gave."""
        super().load_state_dict(dict(state_dict))
        self._share()

    def update(self) -> None:
        """Both parts, each its parameters."""
        for member in self._members:
            member.step()


def _divided(groups: ParameterGroups) -> tuple[Named, Named, Named]:
    """The matrices that Muon moves, what AdamW moves with decay, and what without."""
    matrices: Named = {}
    decayed: Named = {}
    for name, parameter in groups.matrices.items():
        hidden = parameter.ndim == 2 and not name.startswith("head.")
        (matrices if hidden else decayed)[name] = parameter
    return matrices, {**decayed, **groups.embeddings}, groups.vectors

"""Collect what every layer's softmax does while a model runs, streamed from its kernels.

Legend: B batch, H query heads, T queries, P position bins.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.stats import Observation, observing
from normattn.lab.diagnostics.angles import Stage, beyond, unseen_angles
from normattn.lab.diagnostics.cosines import CosineSums
from normattn.lab.diagnostics.lines import LayerLine
from normattn.lab.diagnostics.sums import LayerSums
from normattn.score import Score

Padding = tuple[Tensor | None, Tensor | None]


class Collector:
    """The observer of a model's layers: `names` are those of the layers that an owner serves.

    An owner is whoever is announced: a `Score`, or the attention module of another library. `edges`
    bound bins of the query's position (None: one bin); `reach` asks for attention beyond the
    training length, `cosines` for those of queries and keys, which cost another product. `stages`
    say how scores were trained that were not so with what they were built with, at its L, alone.
    """

    def __init__(
        self,
        names: Mapping[Any, Sequence[str]],
        edges: Sequence[int] | None = None,
        reach: bool = False,
        cosines: bool = False,
        stages: Mapping[Score, Sequence[Stage]] | None = None,
    ) -> None:
        self.names = names
        self.stages = {} if stages is None else stages
        self.edges = None if edges is None else tuple(edges)
        self.reach, self.cosines = reach, cosines
        self.sums: dict[str, LayerSums] = {}
        self.cosine_sums: dict[str, CosineSums] = {}
        self._turns = {owner: itertools.cycle(names) for owner, names in self.names.items()}
        self._name: str | None = None
        self._owner: object = None
        self._padding: Padding = (None, None)
        self._at: tuple[Tensor, Tensor]
        self._part: tuple[slice, Tensor | None] | None = None
        self._asked: dict[str, int] = {}

    def restart(self) -> None:
        """A shared block's next use is that of the lowest layer."""
        self._turns = {owner: itertools.cycle(names) for owner, names in self.names.items()}

    def enter(
        self, owner: object, q: Tensor, k: Tensor, padding: Padding, at: tuple[Tensor, Tensor]
    ) -> None:
        """A layer begins; those of other models are left alone."""
        self._part, self._padding, self._at = None, padding, at
        self._owner = owner
        if owner not in self.names:
            self._name = None
            return
        self._name = next(self._turns[owner])
        sums = self._layer(q)
        sums.add_norms("q_norm", q, padding[0], self._bins(at[0], q))
        sums.add_norms("k_norm", k, padding[1], self._bins(at[1], k))

    def confine(self, rows: slice, own: Tensor | None) -> None:
        """The next problem is that of some rows."""
        self._part = rows, own

    def functions(self, problem: AttentionInputs) -> Tensor | None:
        """Attention beyond the training length and at unseen angles, where any can be."""
        self._asked = {}
        score = self._owner
        if self._name is None or not isinstance(score, Score) or not self.reach:
            return None
        if score.spec.train_length is None:
            return None
        spec, length = score.spec, score.spec.train_length
        device = problem.q.device
        seen = problem.visibility
        most = max(int(seen.query.max()), int(seen.key.max())) + 1
        functions = {"beyond": beyond(length, most)}
        block = int(seen.query.min()) // length
        stages = self.stages.get(score, (Stage(score.built, length),))
        angles = unseen_angles(spec, score.head_dim, most, block, stages)
        if angles is not None:
            functions["angle"] = angles
        self._asked = {name: index for index, name in enumerate(functions)}
        return torch.stack(list(functions.values())).to(device)

    def see(self, problem: AttentionInputs, observation: Observation) -> None:
        """A problem of the current layer has been computed."""
        if self._name is None:
            return
        rows, own = self._part or (slice(None), None)
        self._part = None
        valid = (observation.visible > 0).expand(observation.entropy.shape)
        if own is not None:
            valid = valid & own.reshape(-1, 1, own.shape[-1])
        if (padding := self._padding[0]) is not None:
            valid = valid & ~padding[:, None, rows]
        bin_of = self._bins(problem.visibility.query, valid)
        self.sums[self._name].add(observation, self._asked, valid, bin_of)
        if self.cosines:
            heads = problem.q.shape[1]
            if self._name not in self.cosine_sums:
                bins = self.sums[self._name].bins
                self.cosine_sums[self._name] = CosineSums(heads, bins)
            self.cosine_sums[self._name].add(problem, valid, bin_of)

    def normed(self, name: str, side: int) -> Callable[[nn.Module, Any, Tensor], None]:
        """A hook on a score's own normalisation."""

        def hook(module: nn.Module, given: Any, normed: Tensor) -> None:
            if self._name is None:
                return
            rows, padding = slice(0, normed.shape[2]), self._padding[side]
            if side == 0 and self._part is not None:
                rows = self._part[0]
            if padding is not None:
                padding = padding[:, rows]
            bin_of = self._bins(self._at[side][..., rows], normed)
            self.sums[self._name].add_norms(name, normed, padding, bin_of)

        return hook

    def _bins(self, at: Tensor, like: Tensor) -> Tensor | None:
        """The bin of each position, (B, H, T) as `like` is; None where there is but one bin."""
        if self.edges is None:
            return None
        inner = torch.tensor(self.edges[1:-1], device=like.device)
        bins = torch.bucketize(at.contiguous(), inner, right=True)
        bins = bins[:, None] if bins.dim() == 2 else bins[None, None]
        return bins.expand(like.shape[:3])

    def _layer(self, q: Tensor) -> LayerSums:
        assert self._name is not None
        if self._name not in self.sums:
            bins = 1 if self.edges is None else len(self.edges) - 1
            self.sums[self._name] = LayerSums(q.shape[1], bins, q.device)
        return self.sums[self._name]

    def lines(self) -> dict[str, LayerLine]:
        """Every layer that ran, in the order in which they did, over all positions."""
        lines = {}
        for name, sums in self.sums.items():
            means = sums.means()
            kept = {field: means[field] for field in means if field in LayerLine.model_fields}
            lines[name] = LayerLine.model_validate(kept)
        return lines

    def measured(self) -> pl.DataFrame:
        """Every layer that ran, in the order in which they did, as rows of the frame by position.

        They have no identity yet; the factor `layer` is the layer's name.
        """
        assert self.edges is not None
        parts = []
        for layer, (name, sums) in enumerate(self.sums.items()):
            frames = sums.measured(self.edges, layer)
            if name in self.cosine_sums:
                frames += self.cosine_sums[name].measured(self.edges, layer)
            parts += [part.with_columns(pl.lit(name).alias("factor.layer")) for part in frames]
        if not parts:
            raise InputError("nothing was read: no layer of the model ran while it was looked at")
        return pl.concat(parts, how="diagonal")


def layer_names(model: nn.Module) -> dict[Score, tuple[str, ...]]:
    """Every score of a model and the names of the layers that it serves, bottom first.

    A layer is named by its module's path; a block that several layers share has a name for each.
    """
    shared = {path: layers for path, module in model.named_modules() if (layers := _shared(module))}
    names = {}
    for path, module in model.named_modules():
        if isinstance(module, Score):
            names[module] = _names(path.removesuffix("score").removesuffix("."), shared)
    return names


def _shared(module: nn.Module) -> int:
    """How many layers a list of blocks makes of fewer; 0 where each block is one."""
    layers = getattr(module, "layers", 0) if isinstance(module, nn.ModuleList) else 0
    return layers if isinstance(module, nn.ModuleList) and layers > len(module) else 0


def _names(path: str, shared: dict[str, int]) -> tuple[str, ...]:
    for blocks, layers in shared.items():
        lead = f"{blocks}.0." if blocks else "0."
        if path.startswith(lead):
            own, rest = lead.removesuffix("0."), path.removeprefix(lead)
            return tuple(f"{own}{layer}.{rest}" for layer in range(layers))
    return (path,)


@contextmanager
def collecting(
    model: nn.Module,
    edges: Sequence[int] | None = None,
    *,
    reach: bool = False,
    cosines: bool = False,
    stages: Mapping[Score, Sequence[Stage]] | None = None,
) -> Iterator[Collector]:
    """Collect what the layers of `model` do while inside, for any number of forward passes.

    `reach`, `cosines` and `stages` as `Collector` has them. Nothing stays behind. A compiled model
    runs uncompiled meanwhile: a compiled graph cannot be looked into. Raises `InputError` for a
    model without any `Score`.
    """
    names = layer_names(model)
    if not names:
        raise InputError("this model holds no Score to look at")
    collector = Collector(names, edges, reach, cosines, stages)
    with ExitStack() as stack:
        for score in names:
            for field, side, norm in (
                ("q_normed", 0, score.query_norm),
                ("k_normed", 1, score.key_norm),
            ):
                if norm is not None:
                    handle = norm.register_forward_hook(collector.normed(field, side))
                    stack.callback(handle.remove)
        for module in model.modules():
            if _shared(module):
                handle = module.register_forward_pre_hook(lambda *_: collector.restart())
                stack.callback(handle.remove)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observing(collector))
        yield collector

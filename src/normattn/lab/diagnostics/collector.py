"""Collect what every layer's softmax does while a model runs, streamed from its kernels.

Legend: B batch, H heads, T queries, P bins of the query's position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.cosines import BINS
from normattn.kernels.stats import AttentionStatistics, LayerSums, observing
from normattn.lab.diagnostics.angles import unseen_angles
from normattn.lab.diagnostics.lines import LayerLine
from normattn.lab.stats import sums
from normattn.score import Score

COSINE_EDGES = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64).tolist()


def _measured(layer_sums: LayerSums, edges: Sequence[int], layer: int) -> list[pl.DataFrame]:
    """Every statistic as rows of the measurements table, by head and bin of the position."""
    parts = [
        _rows(name, above, below, layer, "position", edges)
        for name, (above, below) in layer_sums.totals().items()
    ]
    if layer_sums.cosines is not None:
        by_bin = layer_sums.cosines.double().cpu().unbind(1)
        for first, counts in zip(edges, by_bin, strict=False):
            rows = _rows("cosine", counts, counts, layer, "cosine", COSINE_EDGES)
            parts.append(rows.with_columns(pl.lit(float(first)).alias("factor.position")))
    return parts


def _rows(
    name: str, above: Tensor, below: Tensor, layer: int, axis: str, edges: Sequence[float | int]
) -> pl.DataFrame:
    """Rows of sums and counts (H, P); what is not finite counts for nothing."""
    known = above.isfinite()
    values, counts = above.where(known, 0.0).numpy(), below.where(known, 0.0).numpy()
    return pl.concat(
        sums(
            *(name, ["all texts"], values[head, None], counts[head, None]),
            axis=axis,
            edges=edges,
            layer=layer,
            head=head,
        )
        for head in range(len(values))
    )


class Collector(AttentionStatistics):
    """Statistics of a model's layers, as lines and as rows of the measurements table.

    `reach` asks for attention beyond the training length. The rest as in `AttentionStatistics`.
    """

    def __init__(
        self,
        names: Mapping[Any, Sequence[str]],
        edges: Sequence[int] | None = None,
        reach: bool = False,
        cosines: bool = False,
    ) -> None:
        super().__init__(names, edges, cosines)
        self.reach = reach

    def distance_functions(self, inputs: AttentionInputs) -> Tensor | None:
        """Distances beyond the training length, and at unseen angles, where any can be."""
        self.function_names = []
        score = self.owner
        if self.layer is None or not isinstance(score, Score) or not self.reach:
            return None
        spec, length, mask = score.spec, score.spec.train_length, inputs.mask
        if length is None:
            return None
        most = max(int(mask.query.max()), int(mask.key.max())) + 1
        functions = {"beyond": (torch.arange(most) >= length).double()}
        block = int(mask.query.min()) // length
        angles = unseen_angles(spec, score.head_dim, most, block, score.built)
        if angles is not None:
            functions["angle"] = angles
        self.function_names = list(functions)
        return torch.stack(list(functions.values())).to(inputs.q.device)

    def normed(self, name: str, side: int) -> Callable[[nn.Module, Any, Tensor], None]:
        """A hook on a score's own normalisation of queries (0) or keys (1)."""

        def hook(module: nn.Module, given: Any, normed: Tensor) -> None:
            self.add_norms(name, side, normed, own_rows=side == 0)

        return hook

    def lines(self) -> dict[str, LayerLine]:
        """Every layer that ran, in the order in which they did, over all positions."""
        return {
            name: LayerLine.model_validate(layer.means(LayerLine.model_fields))
            for name, layer in self.sums.items()
        }

    def measured(self) -> pl.DataFrame:
        """Every layer that ran, in that order, as rows by position; the factor `layer` names it."""
        assert self.edges is not None
        if not self.sums:
            raise InputError(
                "nothing was recorded: no layer of the model ran while it was inspected"
            )
        return pl.concat(
            [
                part.with_columns(pl.lit(name).alias("factor.layer"))
                for layer, (name, layer_sums) in enumerate(self.sums.items())
                for part in _measured(layer_sums, self.edges, layer)
            ],
            how="diagonal",
        )


def layer_names(model: nn.Module) -> dict[Score, tuple[str, ...]]:
    """Every score of a model and the names of the layers that it serves, bottom first.

    A layer is named by its module's path; a block that several layers share has a name for each.
    Raises `InputError` for a model that has none.
    """
    shared = [(path, module.layers) for path, module in model.named_modules() if _shared(module)]
    names: dict[Score, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Score):
            path = path.removesuffix("score").removesuffix(".")
            names[module] = (path,)
            for blocks, layers in shared:
                own = f"{blocks}." if blocks else ""
                if path.startswith(f"{own}0."):
                    rest = path.removeprefix(f"{own}0.")
                    names[module] = tuple(f"{own}{layer}.{rest}" for layer in range(layers))
    if not names:
        raise InputError("this model has no Score to inspect")
    return names


def _shared(module: nn.Module) -> bool:
    """Whether a list of blocks makes more layers than it holds."""
    return isinstance(module, nn.ModuleList) and getattr(module, "layers", 0) > len(module)


@contextmanager
def collecting(
    model: nn.Module,
    edges: Sequence[int] | None = None,
    *,
    reach: bool = False,
    cosines: bool = False,
) -> Iterator[Collector]:
    """Collect what the layers of `model` do while inside, for any number of forward passes.

    `reach` and `cosines` as `Collector` has them. Nothing stays behind. A compiled model
    runs uncompiled meanwhile: a compiled graph cannot be looked into. Raises `InputError` for a
    model without any `Score`.
    """
    names = layer_names(model)
    collector = Collector(names, edges, reach, cosines)
    with ExitStack() as stack:
        for score in names:
            for side, (name, norm) in enumerate(
                (("q_normed", score.query_norm), ("k_normed", score.key_norm))
            ):
                if norm is not None:
                    handle = norm.register_forward_hook(collector.normed(name, side))
                    stack.callback(handle.remove)
        for module in filter(_shared, model.modules()):
            handle = module.register_forward_pre_hook(lambda *_: collector.restart())
            stack.callback(handle.remove)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observing(collector))
        yield collector

"""Collect attention statistics of every layer while a model runs, streamed from its kernels.

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


def _layer_rows(layer_sums: LayerSums, edges: Sequence[int], layer: int) -> list[pl.DataFrame]:
    """Return every statistic as rows of the measurements table, by head and position bin."""
    frames = [
        _rows(name, total, count, layer, "position", edges)
        for name, (total, count) in layer_sums.totals().items()
    ]
    if layer_sums.cosines is not None:
        by_bin = layer_sums.cosines.double().cpu().unbind(1)
        for first, counts in zip(edges, by_bin, strict=False):
            rows = _rows("cosine", counts, counts, layer, "cosine", COSINE_EDGES)
            frames.append(rows.with_columns(pl.lit(float(first)).alias("factor.position")))
    return frames


def _rows(
    name: str, total: Tensor, count: Tensor, layer: int, axis: str, edges: Sequence[float | int]
) -> pl.DataFrame:
    """Return rows of sums and counts (H, P), without values that are not finite."""
    finite = total.isfinite()
    values, counts = total.where(finite, 0.0).numpy(), count.where(finite, 0.0).numpy()
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
    """Attention statistics of a model, as JSON lines and as rows of the measurements table.

    With `reach`, also attention beyond the training length; see `AttentionStatistics`.
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
        """Return 1 for each distance beyond the training length, and shares of unseen angles."""
        self.function_names = []
        score = self.owner
        if self.layer is None or not isinstance(score, Score) or not self.reach:
            return None
        spec, length, mask = score.spec, score.spec.train_length, inputs.mask
        if length is None:
            return None
        distances = max(int(mask.query.max()), int(mask.key.max())) + 1
        functions = {"beyond": (torch.arange(distances) >= length).double()}
        block = int(mask.query.min()) // length
        angles = unseen_angles(spec, score.head_dim, distances, block, score.built)
        if angles is not None:
            functions["angle"] = angles
        self.function_names = list(functions)
        return torch.stack(list(functions.values())).to(inputs.q.device)

    def norm_hook(self, name: str, side: int) -> Callable[[nn.Module, Any, Tensor], None]:
        """Return a hook for a score's normalisation of queries (0) or keys (1)."""

        def hook(module: nn.Module, inputs: Any, normed: Tensor) -> None:
            self.add_norms(name, side, normed, own_rows=side == 0)

        return hook

    def lines(self) -> dict[str, LayerLine]:
        """Return a line for every layer that ran, in order, over all positions."""
        return {
            name: LayerLine.model_validate(layer.means(LayerLine.model_fields))
            for name, layer in self.sums.items()
        }

    def measured(self) -> pl.DataFrame:
        """Return rows by position for every layer that ran; the factor `layer` is its name."""
        assert self.edges is not None
        if not self.sums:
            raise InputError(
                "nothing was recorded: no layer of the model ran while it was inspected"
            )
        return pl.concat(
            [
                frame.with_columns(pl.lit(name).alias("factor.layer"))
                for layer, (name, layer_sums) in enumerate(self.sums.items())
                for frame in _layer_rows(layer_sums, self.edges, layer)
            ],
            how="diagonal",
        )


def layer_names(model: nn.Module) -> dict[Score, tuple[str, ...]]:
    """Return every score of a model with the names of its layers, bottom first.

    A layer's name is its module's path; a block that several layers share has a name for each.
    Raises `InputError` if the model has no score.
    """
    shared = [(path, module.layers) for path, module in model.named_modules() if _is_shared(module)]
    names: dict[Score, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Score):
            path = path.removesuffix("score").removesuffix(".")
            names[module] = (path,)
            for blocks, layers in shared:
                prefix = f"{blocks}." if blocks else ""
                if path.startswith(f"{prefix}0."):
                    suffix = path.removeprefix(f"{prefix}0.")
                    names[module] = tuple(f"{prefix}{layer}.{suffix}" for layer in range(layers))
    if not names:
        raise InputError("this model has no Score to inspect")
    return names


def _is_shared(module: nn.Module) -> bool:
    """Return whether a list of blocks has more layers than modules."""
    return isinstance(module, nn.ModuleList) and getattr(module, "layers", 0) > len(module)


@contextmanager
def collecting(
    model: nn.Module,
    edges: Sequence[int] | None = None,
    *,
    reach: bool = False,
    cosines: bool = False,
) -> Iterator[Collector]:
    """Collect statistics of the layers of `model` inside, over any number of forward passes.

    `reach` and `cosines` are as in `Collector`. Hooks are removed afterwards. A compiled model runs
    uncompiled, because hooks do not see inside a graph. Raises `InputError` for a model without a
    `Score`.
    """
    names = layer_names(model)
    collector = Collector(names, edges, reach, cosines)
    with ExitStack() as stack:
        for score in names:
            for side, (name, norm) in enumerate(
                (("q_normed", score.query_norm), ("k_normed", score.key_norm))
            ):
                if norm is not None:
                    handle = norm.register_forward_hook(collector.norm_hook(name, side))
                    stack.callback(handle.remove)
        for module in filter(_is_shared, model.modules()):
            handle = module.register_forward_pre_hook(lambda *_: collector.restart())
            stack.callback(handle.remove)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observing(collector))
        yield collector

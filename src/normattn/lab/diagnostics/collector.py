"""Collect attention statistics of every layer while a model runs, streamed from its kernels.

Legend: B batch, H heads, T queries, P bins of the query's position; R distances.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import polars as pl
import torch
from jaxtyping import Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.cosines import BINS
from normattn.kernels.stats import AttentionStatistics, observing
from normattn.lab.diagnostics.lines import LayerLine
from normattn.lab.stats import sums
from normattn.score import Score, ScoreSpec
from normattn.score.parts import RotaryPosition, rope_frequencies
from normattn.terminal import warn

COSINE_EDGES = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64).tolist()


class Collector(AttentionStatistics):
    """Attention statistics of a model; with `reach` also attention beyond its training length."""

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
            raise InputError("nothing was recorded: no layer of the model ran inside")
        frames = []
        for layer, (path, layer_sums) in enumerate(self.sums.items()):
            of_layer = [
                _rows(name, total, count, layer, "position", self.edges)
                for name, (total, count) in layer_sums.totals().items()
            ]
            if layer_sums.cosines is not None:
                by_bin = layer_sums.cosines.double().cpu().unbind(1)
                for first, counts in zip(self.edges, by_bin, strict=False):
                    rows = _rows("cosine", counts, counts, layer, "cosine", COSINE_EDGES)
                    of_layer.append(
                        rows.with_columns(pl.lit(float(first)).alias("factor.position"))
                    )
            frames += [frame.with_columns(pl.lit(path).alias("factor.layer")) for frame in of_layer]
        return pl.concat(frames, how="diagonal")


def _rows(
    name: str, total: Tensor, count: Tensor, layer: int, axis: str, edges: Sequence[float | int]
) -> pl.DataFrame:
    """Return rows of sums and counts (H, P), without values that are not finite."""
    finite = total.isfinite()
    values, counts = total.where(finite, 0.0).numpy(), count.where(finite, 0.0).numpy()
    bins: dict[str, Any] = {"axis": axis, "edges": edges, "layer": layer}
    return pl.concat(
        sums(name, ["all texts"], values[head, None], counts[head, None], head=head, **bins)
        for head in range(len(values))
    )


def unseen_angles(
    spec: ScoreSpec, head_dim: int, distances: int, block: int = 0, trained: ScoreSpec | None = None
) -> Float[Tensor, " r"] | None:
    """Return for every distance r = 0 … R − 1 the share of feature pairs at unseen angles.

    Pair m rotates by θ_m·ρ(r). θ are the frequencies of a score (for query rows block·L … if they
    depend on the block), and ρ(r) is its relative position for r. Angles up to the largest of r < L
    were trained, or all of them if that is a full circle. `spec` is the present score, `trained`
    the trained one (default: its trained components). None without rotation or training length.
    """
    length = spec.train_length
    if not isinstance(spec.position, RotaryPosition) or length is None:
        return None
    angle = _angles(spec, head_dim, distances, block)
    seen = _angles(spec.trained if trained is None else trained, head_dim, length, 0).amax(0)
    # A tolerance, so that rounding does not make the last seen angle unseen.
    unseen = (angle % (2 * math.pi) > seen * (1 + 1e-9) + 1e-9) & (seen < 2 * math.pi)
    return unseen.double().mean(-1)


def _angles(spec: ScoreSpec, head_dim: int, distances: int, block: int) -> Float[Tensor, "r pairs"]:
    """Return the rotation of each feature pair at every distance, in radians."""
    position = spec.position
    assert isinstance(position, RotaryPosition)
    size = position.rotary_dim(head_dim)
    theta = rope_frequencies(size, position.base)
    spec = spec.for_block(block) if spec.blockwise else spec
    if spec.rope_scaling is not None:
        assert spec.train_length is not None
        theta = spec.rope_scaling.inverse_frequencies(size, position.base, spec.train_length)
    relative = torch.arange(distances, dtype=torch.float64)
    remapping = spec.remapping
    if spec.chunk_remapping is not None:
        relative = relative.clamp(max=spec.chunk_remapping.reach - 1)
    elif remapping is not None and remapping.window is not None:
        query, key = remapping.far_positions(relative, torch.zeros_like(relative))
        relative = torch.where(relative >= remapping.window, query - key, relative)
    return relative[:, None] * position.adjusted(theta).abs()


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

    `reach` and `cosines` are as in `inspect_model`. Hooks are removed afterwards. A compiled model
    runs uncompiled: hooks do not see inside a graph. Raises `InputError` without a `Score`.
    """
    names = layer_names(model)
    collector = Collector(names, edges, reach, cosines)

    def add_norms(side: int, module: nn.Module, inputs: Any, normed: Tensor) -> None:
        collector.add_norms(("q_normed", "k_normed")[side], side, normed, own_rows=side == 0)

    with ExitStack() as stack:
        for score in names:
            for side, norm in enumerate((score.query_norm, score.key_norm)):
                if norm is not None:
                    handle = norm.register_forward_hook(partial(add_norms, side))
                    stack.callback(handle.remove)
        for module in filter(_is_shared, model.modules()):
            handle = module.register_forward_pre_hook(lambda *_: collector.restart())
            stack.callback(handle.remove)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observing(collector))
        yield collector


class DiagnosticsProbe:
    """Writes statistics of every layer to RUN/diagnostics.jsonl at the steps that are `due`.

    They are recorded in the step's own forward passes. A line is `{"step": …, "layers": {name:
    LayerLine}}`, for this process's shard of the batch. Warns once on stderr if a head's mean
    H / ln n is below 0.02: its scores concentrate.
    """

    name = "diagnostics"

    def __init__(self, every: int, warn: Callable[[str], None] = lambda text: warn(text)) -> None:
        self.every = every
        self._warn = warn
        self._warned = False

    def due(self, step: int, steps: int) -> bool:
        """Return true for the first step, every `every` steps, and the last."""
        return step % self.every == 0 or step in (1, steps)

    @contextmanager
    def around(self, task: Any, step: int) -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Record a step."""
        with collecting(task.model) as collector:

            def line() -> Mapping[str, Any]:
                layers = collector.lines()
                shares = [
                    (share, f"head {head} of {name}")
                    for name, layer in layers.items()
                    for head, share in enumerate(layer.entropy_share)
                    if share is not None
                ]
                share, head = min(shares, default=(1.0, ""))
                if share < 0.02 and not self._warned:
                    self._warned = True
                    self._warn(
                        f"warning: scores concentrate at step {step}: {head} has a mean entropy of "
                        f"{share:.3f} ln n, so nearly every query attends to one key (said once; "
                        f"more in {self.name}.jsonl)"
                    )
                return {"layers": {name: layer.model_dump() for name, layer in layers.items()}}

            yield line

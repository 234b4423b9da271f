"""Residual scores (RealFormer): every layer attends with the sum of its scores and those below.

The sum is held in one of three ways, which the lowest layer's kernel decides for all:

- residual: one buffer of scores for the whole stack. Going up, layer n adds its products to it in
  place, tile by tile, and attends with softmax of the sums. Coming down, its backward finds s_n in
  the buffer, adds its gradient to a second buffer (that of s_m is the sum of those of all layers
  from m on), and takes its products away again. So a stack of any depth holds one or two numbers
  per pair, where a stored sum holds several for each layer, and computes no more products than
  attention without residuals. What undoing rounds off is about the last digit of a score.
- concatenated: ⟨[q_1 … q_n], [k_1 … k_n]⟩ = Σ_m ⟨q_m, k_m⟩, exactly. Nothing per pair is kept and
  any kernel serves it, but layer n multiplies n·D features.
- reference: one tensor known to autograd.

In the buffer, layers are chained by an empty tensor, so that backward meets them from the top down.
A layer above that a backward leaves out (a loss at an early exit) is undone with its remembered
queries and keys. Undoing happens once: a second backward, and a second derivative, are refused.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size; n key heads of a group, c token rows of a tile, W its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.inputs import AttentionInputs, Stack
from normattn.kernels.numerics import refuse_second_derivative
from normattn.kernels.stats import Eye
from normattn.kernels.tile_scores import TileScores, Workspace
from normattn.kernels.tiled import Group, Plan, Tile, hide_edges
from normattn.kernels.tiled_backward import backward_tiles, draw_seed, forward_tiles

WAYS = ("residual", "concatenated", "reference")
"""The kernels that hold a sum: what the lowest layer begins, no other can go on with."""


class ResidualScores:
    """s_n = Σ_m q_m k_mᵀ, m = 1 … n, before masks, biases and caps; `mean`: over n.

    The kernel of the lowest layer decides how the sum is held, and all other layers follow:
    "residual" in one buffer that every layer updates in place, "concatenated" as the queries and
    keys of all layers, "reference" as one tensor known to autograd. `layers` is how many there
    will be, if that is known. The last two serve a layer that a backward computes once more.
    """

    def __init__(self, mean: bool = False, layers: int | None = None) -> None:
        self.mean = mean
        self.layers = layers
        self.count = 0
        self.way: str | None = None
        self.stack: Stack | None = None
        self.ledger: Ledger | None = None
        self.token: Tensor | None = None
        self._sums: list[Tensor | None] = []
        self._queries: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._next, self._numbered = 0, False
        self._task = _backward_running()
        self._learning = torch.is_grad_enabled()

    @property
    def share(self) -> float:
        """What the sum is multiplied with: 1, or 1/n for n layers."""
        return 1.0 / self.count if self.mean else 1.0

    def begin(self, layer: int) -> None:
        """Make `layer`, from 0, the next to enter. Layer 0 begins a forward of its own."""
        if layer == 0 and self._task == _backward_running():
            self.way = self.stack = self.ledger = self.token = None
            self._sums, self._queries, self._keys = [], [], []
            self._learning = torch.is_grad_enabled()
        self._next, self._numbered = layer, True

    def elsewhere(self, way: str) -> str | None:
        """Why a kernel cannot go on from the layers below; None where it can."""
        if self.way in (None, way) or way not in WAYS:
            return None
        return f"the layers below were summed by the {self.way} kernel, and one serves all layers"

    def enter(self, way: str, stack: Stack) -> None:
        """The next layer enters.

        Raises `InputError` for a layer of another shape, for one whose layer below has not run, and
        for one that a backward computes once more where the sum is held in a buffer, or where the
        forward ran without gradients.
        """
        if self._task != _backward_running():
            if way == "residual" or not self._numbered:
                raise InputError(
                    "the buffer of residual scores cannot be filled once more in a backward, as "
                    "activation checkpointing of single layers does: checkpoint the whole stack, "
                    "or take backend='concatenated'"
                )
            if not self._learning and torch.is_grad_enabled():
                raise InputError(
                    "residual scores have no gradient where the forward ran without: activation "
                    "checkpointing needs use_reentrant=False"
                )
        if self.stack is not None and self.stack != stack:
            raise InputError(
                "all layers that share residual scores must have the same shape, but "
                f"below is {self.stack} and here {stack}; each forward needs new `ResidualScores`"
            )
        if way != "residual" and self._next > len(self._sums if way == "reference" else self._keys):
            raise InputError(
                f"layer {self._next} adds to the scores of the layers below, which have not all "
                "run: run all layers of the stack in every forward, bottom first"
            )
        self.stack, self.way, self.count = stack, way, self._next + 1
        self._next, self._numbered = self.count, False

    def stored(self, score: Float[Tensor, "b h t s"]) -> Float[Tensor, "b h t s"]:
        """The sum with this layer's scores, known to autograd."""
        layer = self.count - 1
        below = self._sums[layer - 1] if layer else None
        whole = score if below is None else below + score
        self._sums[layer : layer + 1] = [whole]
        if layer and not torch.is_grad_enabled():
            self._sums[layer - 1] = None
        return whole * self.share if self.mean else whole

    def features(
        self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]
    ) -> tuple[Float[Tensor, "b h t nd"], Float[Tensor, "b g s nd"]]:
        """[q_1 … q_n] and [k_1 … k_n], whose product is the sum."""
        layer = slice(self.count - 1, self.count)
        self._queries[layer], self._keys[layer] = [q], [k]
        whole = torch.cat(self._queries[: self.count], -1)
        return whole * self.share if self.mean else whole, torch.cat(self._keys[: self.count], -1)


def _backward_running() -> int:
    """The number of the backward in which this runs; −1 outside of any."""
    if torch.compiler.is_compiling():
        return -1
    return int(torch._C._current_graph_task_id())


class ScoreBuffer:
    """A number for each pair, in float32 (float64 for float64), each tile's (n, c·r, W) by itself.

    Causal rows hold the keys up to their tile's last row: about half of T × S. Pieces of that size
    are what an allocator keeps from step to step; one large piece would be fresh pages every time.
    """

    def __init__(self, like: Tensor, plan: Plan) -> None:
        """Nothing yet: a tile is taken, uninitialised, when it is first asked for."""
        self.repeat, self.like = plan.repeat, like.new_empty(0)
        self.tiles: dict[tuple[int, int, int], Tensor] = {}

    def tile(self, group: Group, tile: Tile) -> Tensor:
        """The scores (n, c·r, W) of a group's tile."""
        name = group.batch.start, group.heads.start, tile.rows.start
        if name not in self.tiles:
            n = (group.batch.stop - group.batch.start) * (group.heads.stop - group.heads.start)
            lines = (tile.rows.stop - tile.rows.start) * self.repeat
            self.tiles[name] = self.like.new_empty(n, lines, tile.width)
        return self.tiles[name]


@dataclass(frozen=True)
class LayerScores:
    """The buffers as one layer sees them.

    `lowest`: nothing is below it; `share` multiplies the sum before softmax. In the backward
    `gradients` holds those of the sums; `highest`: no layer above has written any yet.
    """

    sums: ScoreBuffer
    share: float
    lowest: bool
    gradients: ScoreBuffer | None = None
    highest: bool = False


@dataclass
class Ledger:
    """The one buffer of a stack, and which layers are in it.

    `remembered` has the queries and keys of the layers that a backward may have to undo.
    """

    plan: Plan
    sums: ScoreBuffer | None = None
    gradients: ScoreBuffer | None = None
    at: int = 0
    remembered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def up(self, like: Tensor, plan: Plan, number: int, share: float) -> LayerScores:
        """For the forward of layer `number`, from 1."""
        if number == 1:
            self.sums = ScoreBuffer(like, plan)
        if self.sums is None or self.at != number - 1:
            raise InputError(
                "a layer was to add to residual scores that a backward has undone already: make a "
                "new `ResidualScores` for each forward"
            )
        self._refuse_other_pairs(plan)
        self.at = number
        return LayerScores(self.sums, share, lowest=number == 1)

    def down(self, like: Tensor, plan: Plan, number: int, share: float) -> LayerScores:
        """For the backward of layer `number`, whose scores are then the last in the buffer."""
        assert self.sums is not None
        highest = self.gradients is None
        if self.gradients is None:
            self.gradients = ScoreBuffer(like, plan)
        return LayerScores(self.sums, share, number == 1, self.gradients, highest)

    def undo_above(self, inputs: AttentionInputs, plan: Plan, number: int) -> None:
        """Take away what layers that this backward has not met added."""
        while self.at > number:
            assert self.sums is not None
            q, k = self.remembered[self.at]
            above = AttentionInputs(q, k, inputs.v, inputs.visibility).widened()
            for group in plan.groups(above.q):
                scores = TileScores(above, plan, group)
                for tile in group.tiles:
                    scores.accumulate(self.sums.tile(group, tile), tile, sign=-1)
            self.undone(self.at)

    def undone(self, number: int) -> None:
        """Layer `number` is no longer in the buffer."""
        self.at = number - 1
        self.remembered.pop(number, None)
        if number == 1:
            self.sums = self.gradients = None

    def _refuse_other_pairs(self, plan: Plan) -> None:
        mine, theirs = self.plan, plan
        for one in ("causal", "window", "kept"):
            if getattr(mine.seen, one) != getattr(theirs.seen, one):
                raise InputError(
                    "all layers that share residual scores must see the same pairs, but "
                    "causality or the sliding window differs between them"
                )
        if mine.shape.aligned != theirs.shape.aligned:
            raise InputError(
                "all layers that share residual scores must see the same pairs, but "
                "positions differ"
            )


class ResidualTileScores(TileScores):
    """The scores are the sums in a buffer, to which a forward adds its products."""

    def __init__(
        self,
        layer: LayerScores,
        inputs: AttentionInputs,
        plan: Plan,
        group: Group,
        space: Workspace | None = None,
    ) -> None:
        """`layer` is the buffer as this layer sees it."""
        super().__init__(inputs, plan, group, space)
        self.layer = layer

    def enter(self, tile: Tile) -> None:
        """Add a tile's products to the sums of the layers below."""
        sums = self.layer.sums.tile(self.group, tile)
        if self.layer.lowest:
            self.products(tile, sums)
        else:
            self.accumulate(sums, tile)
        if self.plan.shape.aligned and (self.layer.lowest or not self.finite):
            # Hidden in every layer alike: what is added to −∞, or taken from it, changes nothing,
            # unless it is NaN, which earlier rows would then read.
            hide_edges(self.apart(sums), tile, self.plan)

    def leave(self, tile: Tile) -> None:
        """Take this layer's products away again."""
        if not self.layer.lowest:
            self.accumulate(self.layer.sums.tile(self.group, tile), tile, sign=-1)

    def weights(self, tile: Tile, capped: bool = False, kept: bool = False) -> Tensor:
        """As for any scores."""
        layer, sums = self.layer, self.layer.sums.tile(self.group, tile)
        score = self.room("score", tile)
        bare = self.inputs.cap is None and self.inputs.bias is None and self.sink is None
        alike = self.plan.shape.aligned and self.group.seen.regular and not kept
        if bare and layer.share == 1 and alike:
            # What causality and the window hide is −∞ in the sums.
            return torch.softmax(sums, -1, out=score)
        torch.mul(sums, layer.share, out=score[..., : tile.width])
        return self.softmax(score, tile, capped, kept)

    def by_product(self, by_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the sums (n, c·r, W): that of this layer's scores joins those above."""
        layer = self.layer
        assert layer.gradients is not None
        gradient = layer.gradients.tile(self.group, tile)
        mine = super().by_product(by_score, tile)[..., : tile.width]
        if layer.highest:
            return torch.mul(mine, layer.share, out=gradient)
        if layer.lowest:
            # Nobody reads it again: written to the tile in the cache, not to memory.
            return torch.add(gradient, mine, alpha=layer.share, out=mine)
        return gradient.add_(mine, alpha=layer.share)


class _Position(NamedTuple):
    """Of a layer in its stack: number, from 1, what multiplies the sum, whether gradients come."""

    number: int
    share: float
    learning: bool


class _ResidualAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ledger: Ledger,
        position: _Position,
        settings: Mapping[str, Any],
        seed: int,
        eye: Eye | None,
        token: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        given = AttentionInputs.of(settings, tensors)
        wide = given.widened()
        plan = Plan.of(wide)
        layer = ledger.up(wide.q, plan, position.number, position.share)
        if position.learning:
            ledger.remembered[position.number] = given.q.detach(), given.k.detach()
        ctx.save_for_backward(*tensors)
        ctx.rest = ledger, position, settings, seed
        out, _ = forward_tiles(wide, plan, seed, partial(ResidualTileScores, layer), eye)
        return out.to(given.v.dtype), token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the residual kernel", "backend='reference'")
        ledger, position, settings, seed = ctx.rest
        number = position.number
        if ledger.at < number:
            raise InputError(
                "residual scores are undone in a backward and serve one only: add the losses and "
                "call backward once, or use backend='reference' or 'concatenated'"
            )
        given = AttentionInputs.of(settings, ctx.saved_tensors)
        wide = given.widened()
        plan = Plan.of(wide)
        ledger.undo_above(wide, plan, number)
        layer = ledger.down(wide.q, plan, number, position.share)
        by_out = grads[0].to(wide.v.dtype)
        sums = backward_tiles(wide, plan, by_out, seed, partial(ResidualTileScores, layer))
        ledger.undone(number)
        return (None, None, None, None, None, grads[1], *sums.all(given))


def residual_attention(inputs: AttentionInputs, eye: Eye | None = None) -> Float[Tensor, "b h t e"]:
    """softmax(Σ_m q_m k_mᵀ) · v, the products of this layer joining those of the layers below.

    `eye` looks on, and changes nothing. Raises `InputError` where the layers below have another
    shape or see other pairs, in a recomputation by activation checkpointing, and in a second
    backward.
    """
    # `disable` loads the compiler, which takes longer than torch itself: only where one runs.
    if torch.compiler.is_compiling():
        out: Tensor = torch.compiler.disable(_residual_attention)(inputs, eye)  # type: ignore[no-untyped-call]
        return out
    return _residual_attention(inputs, eye)


def _residual_attention(inputs: AttentionInputs, eye: Eye | None) -> Tensor:
    state = inputs.residual_scores
    assert isinstance(state, ResidualScores)
    state.enter("residual", inputs.stack)
    if state.ledger is None:
        state.ledger = Ledger(Plan.of(inputs))
    token = inputs.q.new_empty(0) if state.token is None else state.token
    tensors = inputs.tensors
    wanted = any(x is not None and x.requires_grad for x in (token, *tensors))
    position = _Position(state.count, state.share, wanted and torch.is_grad_enabled())
    out, state.token = _ResidualAttention.apply(  # type: ignore[no-untyped-call]
        *(state.ledger, position, inputs.settings, draw_seed(inputs), eye, token, *tensors)
    )
    attended: Tensor = out
    return attended


def concatenated(inputs: AttentionInputs) -> AttentionInputs:
    """The same inputs without a residual: their features are those of this layer and all below."""
    state = inputs.residual_scores
    assert state is not None
    state.enter("concatenated", inputs.stack)
    q, k = state.features(inputs.q, inputs.k)
    return replace(inputs, q=q, k=k, residual_scores=None)

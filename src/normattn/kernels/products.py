"""Products of a tile's rows with keys and values, and the room that they are written to.

Legend: n key heads of a group, r query heads per key head, S keys, E value size, c token rows of a
tile, W its columns, X further logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from normattn.kernels.operands import Operands
from normattn.kernels.place import on_cpu
from normattn.kernels.tiles import Tile

# Rows of a product below which a strided operand costs more than a copy of it.
_FEW = 16


class Products:
    """The products of one group's tiles, whose scores have `further` columns beyond the keys."""

    def __init__(self, operands: Operands, further: int) -> None:
        """No room is taken yet."""
        self.operands, self.further = operands, further
        self._rooms: dict[str, Tensor] = {}
        self._across: dict[str, Tensor] = {}

    def room(self, name: str, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
        """(n, c·r, W + X) of uninitialised scores, by default of the type of q.

        Taken once for any tile: fresh pages cost as much as the arithmetic.
        """
        q, plan = self.operands.q, self.operands.plan
        if name not in self._rooms:
            largest = max(
                (t.rows.stop - t.rows.start) * (t.width + self.further) for t in plan.tiles
            )
            size = q.shape[0] * plan.repeat * largest
            self._rooms[name] = q.new_empty(size, dtype=q.dtype if dtype is None else dtype)
        lines = self.operands.lines(tile)
        shape = torch.Size((q.shape[0], lines.stop - lines.start, tile.width + self.further))
        return self._rooms[name][: shape.numel()].view(shape)

    def scores(self, tile: Tile, into: Tensor) -> None:
        """⟨q, k⟩ of a tile, each span by its regime, into the first W columns."""
        for span, where in tile.laid():
            q, k, name, columns = self.operands.side(span)
            across = self._turned(name, k)
            product(q[:, self.operands.lines(tile)], across, columns, into[..., where])

    def accumulate(self, sums: Tensor, tile: Tile, sign: int = 1) -> None:
        """Sums (n, c·r, W) ± the products of a tile, in place."""
        direct = sums.dtype == self.operands.q.dtype and sums.shape[1] >= _FEW
        if not direct:
            products = self.room("products", tile)[..., : tile.width]
            self.scores(tile, products)
            sums.add_(products, alpha=sign)
            return
        for span, where in tile.laid():
            q, k, _, columns = self.operands.side(span)
            part = sums[..., where]
            part.baddbmm_(
                q[:, self.operands.lines(tile)], k[:, columns].transpose(1, 2), alpha=sign
            )

    def values(self, weight: Tensor, tile: Tile, out: Tensor) -> None:
        """Σ_j weight · v into `out` (n, c·r, E)."""
        spans, v = tile.spans, self.operands.v
        if weight.shape[1] < _FEW and all(a.stop == b.start for a, b in pairwise(spans)):
            # As in a decoding step: far and near columns follow each other.
            columns = slice(spans[0].start, spans[-1].stop) if spans else slice(0)
            times([(weight[..., : tile.width], v[:, columns])], out)
            return
        times(((weight[..., where], v[:, span.columns]) for span, where in tile.laid()), out)

    def by_weight(self, by_out: Tensor, tile: Tile) -> Tensor:
        """⟨by_out, v⟩, (n, c·r, W + X); 0 for the further logits, whose values are 0."""
        result = self.room("gradient", tile)
        if self.further:
            result[..., tile.width :] = 0
        turned = self._turned("v", self.operands.v)
        for span, where in tile.laid():
            product(by_out, turned, span.columns, result[..., where])
        return result

    def _turned(self, name: str, x: Tensor) -> Tensor:
        """xᵀ; in half precision a copy, if many tiles use it: its products are then faster."""
        few = len(self.operands.plan.tiles) < 4
        if not on_cpu(x) or x.element_size() != 2 or few:
            return x.transpose(1, 2)
        if name not in self._across:
            self._across[name] = x.transpose(1, 2).contiguous()
        return self._across[name]


def product(a: Tensor, b: Tensor, columns: slice, out: Tensor) -> None:
    """a·b[columns] into `out`.

    Few rows go to a space of their own, as a strided one is slow for them. Half-precision ones are
    ten times slower still where b is not whole: then all columns are taken, or one head at a time.
    """
    part = b[..., columns]
    if a.shape[1] >= _FEW:
        torch.bmm(a, part, out=out)
    elif a.element_size() != 2 or part.shape[0] == 1 or _dense(part):
        out.copy_(torch.bmm(a, part))
    elif _dense(b) and 2 * part.shape[-1] >= b.shape[-1]:
        out.copy_(torch.bmm(a, b)[..., columns])
    else:
        for number in range(a.shape[0]):
            torch.mm(a[number], part[number], out=out[number])


def _dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.transpose(1, 2).is_contiguous()


def times(pairs: Iterable[tuple[Tensor, Tensor]], out: Tensor) -> None:
    """Σ a·b into `out`."""
    first = True
    for a, b in pairs:
        dense = a if a.shape[1] >= _FEW else a.contiguous()
        if first:
            torch.bmm(dense, b, out=out)
        else:
            out.baddbmm_(dense, b)
        first = False
    if first:
        out.zero_()

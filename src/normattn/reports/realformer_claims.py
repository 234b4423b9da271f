"""What the sources say of RealFormer, or what follows if they are right, next to what was found.

Sources: the paper (arXiv 2012.11747), the post (kexue.fm/archives/8027), and for PreLN and PostLN
arXiv 2002.04745. "Asked here": no sentence of theirs, but a test of one (if attention converges
with depth, then leaving early and sharing layers should cost less). A claim is found only where the
interval of its difference, paired over documents and seeds, lies on the claimed side of 0. That of
training's stability is about settings, not documents: there a sign test decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.metrics import Estimate
from normattn.reports.realformer_grid import Panel
from normattn.reports.realformer_rows import EncoderRow, Ratio, estimated, paired

PAPER, POST, XIONG = "arXiv 2012.11747", "kexue 8027", "arXiv 2002.04745"
HERE = "asked here"
REALFORMER, POSTLN, PRELN = "RealFormer", "PostLN", "PreLN"
HALF, SHARED = "RealFormer-half", "-shared"


@dataclass(frozen=True)
class Finding:
    """One sentence of a source, the difference that tests it, and the verdict in words.

    `sign` is +1 where the source says that the difference is above 0, −1 where below. `tested`
    says whether a test calls the difference sure; where it is None, its interval does.
    """

    claim: str
    source: str
    size: str
    what: str
    difference: Estimate
    sign: int = 1
    tested: bool | None = None

    @property
    def verdict(self) -> str:
        """found, the opposite, or open."""
        above, below = self.difference.above_zero, self.difference.below_zero
        if self.tested is not None:
            value = self.difference.value
            above, below = self.tested and value > 0, self.tested and value < 0
        right, wrong = (above, below) if self.sign > 0 else (below, above)
        return "found" if right else "the opposite was found" if wrong else "not found"


def findings(
    rows: Sequence[EncoderRow], panels: Sequence[Panel], bootstrap: Bootstrap
) -> list[Finding]:
    """Every claim that these rows and the grid can test, in the order of the page."""
    table = {row.key: row for row in rows}
    sizes = list(dict.fromkeys(row.setting.size for row in rows))
    found: list[Finding] = []
    for size in sizes:
        of_size = {name: row for (each, name), row in table.items() if each == size}
        found += _Tests(size, of_size, bootstrap).all()
    found += _by_size(table, sizes, bootstrap)
    found += _stability(panels)
    return sorted(found, key=lambda each: list(CLAIMS.values()).index((each.claim, each.source)))


CLAIMS = {
    "better": ("RealFormer is better than PostLN and PreLN at equal steps", PAPER),
    "half": (
        "with half the steps RealFormer is better than PostLN with all of them "
        "(said of downstream scores; tested here on hidden tokens)",
        PAPER,
    ),
    "stable": ("RealFormer stabilises training", PAPER),
    "size": ("a larger model pays off with RealFormer more than without", POST),
    "preln": ("residual scores help under PreLN too", HERE),
    "qk": ("residual scores are better than residual q and k", HERE),
    "sparse": ("RealFormer's attention is sparser: its entropy is lower", PAPER),
    "agree": ("attention of neighbouring layers agrees more, so that it converges", POST),
    "exit": ("leaving at half depth costs RealFormer less", HERE),
    "shared": ("sharing one block among all layers costs RealFormer less", HERE),
    "variance": ("PreLN's residual stream grows with depth", XIONG),
    "gradient": (
        "before training, PostLN's gradient is larger at the top than at the bottom",
        XIONG,
    ),
}


class _Tests:
    """The claims about rows of one size."""

    def __init__(self, size: str, rows: dict[str, EncoderRow], bootstrap: Bootstrap) -> None:
        self.size, self.rows, self.bootstrap = size, rows, bootstrap

    def all(self) -> Iterator[Finding]:
        yield from self._accuracy("better", REALFORMER, POSTLN)
        yield from self._accuracy("better", REALFORMER, PRELN)
        yield from self._accuracy("half", HALF, POSTLN)
        yield from self._accuracy("preln", "RealFormer-PreLN", PRELN)
        yield from self._accuracy("qk", REALFORMER, "ResidualQK")
        yield from self._depth("sparse", "entropy", "entropy in nats, mean over layers", -1)
        yield from self._depth("agree", "agreement", "agreement head by head, upper half")
        yield from self._depth("agree", "agreement_mean", "agreement of mean heads, upper half")
        yield from self._exit()
        yield from self._shared()
        yield from self._within("variance", PRELN, "variance", (1, -1), "last − first layer")
        yield from self._within(
            "gradient", POSTLN, "gradients_start", (0, -1), "gradient norm, top − bottom layer"
        )

    def _pair(self, a: str, b: str) -> tuple[EncoderRow, EncoderRow] | None:
        if a not in self.rows or b not in self.rows:
            return None
        try:
            return paired(self.rows[a], self.rows[b])
        except InputError:  # no seed of one is a seed of the other: nothing to compare
            return None

    def _finding(
        self, key: str, what: str, terms: Sequence[tuple[float, Ratio]], row: EncoderRow, sign: int
    ) -> Finding:
        difference = estimated(terms, row.counts, self.bootstrap)
        return Finding(*CLAIMS[key], self.size, what, difference, sign)

    def _accuracy(self, key: str, a: str, b: str) -> Iterator[Finding]:
        pair = self._pair(a, b)
        if pair is not None:
            terms = [(1.0, pair[0].accuracy()), (-1.0, pair[1].accuracy())]
            yield self._finding(key, f"{a} − {b}, accuracy in points", terms, pair[0], 1)

    def _depth(self, key: str, field: str, what: str, sign: int = 1) -> Iterator[Finding]:
        pair = self._pair(REALFORMER, POSTLN)
        if pair is not None and pair[0].setting.layers > 1:
            mine, theirs = (row.layers(field) for row in pair)
            count = mine.above.shape[-1]
            bins = range(count) if field == "entropy" else range(count // 2, count)
            terms = [(1.0, mine.mean(bins)), (-1.0, theirs.mean(bins))]
            yield self._finding(key, f"RealFormer − PostLN, {what}", terms, pair[0], sign)

    def _exit(self) -> Iterator[Finding]:
        pair = self._pair(REALFORMER, POSTLN)
        if pair is not None and pair[0].setting.layers > 1:
            layers = pair[0].setting.layers
            half, last = [layers // 2 - 1], [layers - 1]
            terms = [
                (factor, row.layers("correct").mean(bins))
                for row, sign in zip(pair, (1.0, -1.0), strict=True)
                for bins, factor in ((last, sign), (half, -sign))
            ]
            what = f"points lost by leaving after layer {layers // 2} of {layers}"
            yield self._finding("exit", f"RealFormer − PostLN, {what}", terms, pair[0], -1)

    def _shared(self) -> Iterator[Finding]:
        pairs = [self._pair(name + SHARED, name) for name in (REALFORMER, POSTLN)]
        if pairs[0] is None or pairs[1] is None:
            return
        seeds = set(pairs[0][0].seeds) & set(pairs[1][0].seeds)
        if seeds:
            rows = [row.only(sorted(seeds)) for pair in pairs if pair for row in pair]
            factors = (1.0, -1.0, -1.0, 1.0)
            terms = [(f, row.accuracy()) for f, row in zip(factors, rows, strict=True)]
            what = "RealFormer − PostLN, points gained by sharing (negative: lost)"
            yield self._finding("shared", what, terms, rows[0], 1)

    def _within(
        self, key: str, name: str, field: str, ends: tuple[int, int], what: str
    ) -> Iterator[Finding]:
        row = self.rows.get(name)
        if row is None or row.setting.layers < 2:
            return
        gradient = field.startswith("gradients")
        found = row.gradients(field) if gradient else row.layers(field)
        if found is not None:
            first, last = (found.mean([range(found.above.shape[-1])[end]]) for end in ends)
            yield self._finding(key, f"{name}, {what}", [(1.0, last), (-1.0, first)], row, 1)


def _stability(panels: Sequence[Panel]) -> Iterator[Finding]:
    """Which settings of the grid fail with one placement alone.

    Decided by a two-sided exact sign test over them, at 5 %: settings are chosen, not drawn, so
    that no interval is made.
    """
    failed: dict[str, dict[tuple[int, float, float], bool]] = {}
    for panel in panels:
        for (rate, dropout), cell in panel.cells.items():
            place = (panel.warmup, rate, dropout)
            failed.setdefault(panel.row, {})[place] = cell.state != "learned"
    if REALFORMER not in failed or POSTLN not in failed:
        return
    mine, theirs = failed[REALFORMER], failed[POSTLN]
    both = [place for place in mine if place in theirs]
    if not both:
        return
    counts = [sum(each[place] for place in both) for each in (mine, theirs)]
    alone = [
        sum(a[place] and not b[place] for place in both)
        for a, b in ((mine, theirs), (theirs, mine))
    ]
    what = (
        f"settings of the grid that failed: RealFormer {counts[0]} − PostLN {counts[1]} "
        f"of {len(both)} (only one of them: {alone[0]}, {alone[1]})"
    )
    difference = Estimate(float(counts[0] - counts[1]), None, None, 0, 0, 0)
    sure = _sign_test(*alone) <= 0.05
    yield Finding(*CLAIMS["stable"], "grid", what, difference, -1, sure)


def _sign_test(a: int, b: int) -> float:
    """P of a split at least as uneven as a to b, where either side is as likely."""
    total = a + b
    extreme = sum(math.comb(total, n) for n in range(min(a, b) + 1))
    return min(1.0, extreme / float(2 ** max(0, total - 1)))


def _by_size(
    table: dict[tuple[str, str], EncoderRow], sizes: Sequence[str], bootstrap: Bootstrap
) -> Iterator[Finding]:
    """What the largest size adds to the smallest, with RealFormer and without."""
    if len(sizes) < 2:
        return
    for other in (POSTLN, PRELN):
        keys = [(size, name) for name in (REALFORMER, other) for size in (sizes[-1], sizes[0])]
        if any(key not in table for key in keys):
            continue
        rows = [table[key] for key in keys]
        seeds = set.intersection(*(set(row.seeds) for row in rows))
        if not seeds:
            continue
        rows = [row.only(sorted(seeds)) for row in rows]
        factors = (1.0, -1.0, -1.0, 1.0)
        terms = [(f, row.accuracy()) for f, row in zip(factors, rows, strict=True)]
        yield Finding(
            *CLAIMS["size"],
            f"{sizes[0]} → {sizes[-1]}",
            f"RealFormer's gain − {other}'s, accuracy in points",
            estimated(terms, rows[0].counts, bootstrap),
        )

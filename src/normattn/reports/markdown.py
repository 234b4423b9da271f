"""Rows → table.md: the table, what stands behind it, the findings, the source's table beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import Cells, RowKey
from normattn.reports.claims import Claim, claim
from normattn.reports.metrics import METRICS, TAX, Estimate
from normattn.reports.table import COLUMNS, Row

_TITLES = {
    "train": "train length",
    "repeated": "repeated",
    "repeated_seen": "repeated, seen",
    "non_repeated": "non-repeated",
    "last_segment": "last segment",
    "tax": "tax",
}
_COMPARED = ("non_repeated", "repeated", "last_segment")


def markdown(
    rows: Sequence[Row],
    cells: Cells,
    bootstrap: Bootstrap,
    pages: Mapping[str, str] | None = None,
) -> str:
    """The whole of table.md; equal records give equal bytes.

    `pages` are the files beside it and what each holds.
    """
    title = "# Accuracy past the training length"
    beside = [f"- [{name}]({name}): {what}." for name, what in (pages or {}).items()]
    if not rows:
        return "\n\n".join((title, "Measured, each on its own page:", "\n".join(beside))) + "\n"
    parts = [
        title,
        _main_table(rows, bootstrap),
        _legend(rows),
        _behind(rows, cells.left_out),
        _diverged(rows),
        _findings(cells, bootstrap),
        "\n".join(("Also measured:", "", *beside)) if beside else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """An aligned Markdown table; the first column to the left, the others to the right."""
    lines = [list(head), *(list(line) for line in body)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def show(line: Sequence[str]) -> str:
        first = line[0].ljust(widths[0])
        rest = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
        return "| " + " | ".join((first, *rest)) + " |"

    rule = "| " + " | ".join(("-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:]))) + " |"
    return "\n".join([show(lines[0]), rule, *(show(line) for line in lines[1:])])


def shown(value: Estimate | None, signed: bool = False, digits: int = 1) -> str:
    """ "36.7 [35.9, 37.5]", or a dash where nothing was measured; `digits` after the point."""
    if value is None:
        return "–"
    form = f"{'+' if signed else ''}.{digits}f"
    if value.low is None or value.high is None:
        return f"{value.value:{form}} [no interval]"
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


def column_title(rows: Sequence[Row], key: str) -> str:
    """A column's title with its context length where all rows share one, e.g. "repeated (512)"."""
    protocol = TAX.protocol if key == "tax" else METRICS[key].protocol
    lengths = {row.lengths[protocol] for row in rows if protocol in row.lengths}
    return f"{_TITLES[key]} ({lengths.pop()})" if len(lengths) == 1 else _TITLES[key]


def _main_table(rows: Sequence[Row], bootstrap: Bootstrap) -> str:
    head = ("score", *(column_title(rows, key) for key in COLUMNS))
    intro = (
        f"Token accuracy in %, with {bootstrap.level:.0%} intervals from {bootstrap.resamples} "
        "bootstrap resamples of the documents, and of the seeds where there are several."
    )
    return f"{intro}\n\n" + grid(head, (_line(row) for row in rows))


def _line(row: Row) -> tuple[str, ...]:
    if row.empty and row.diverged:
        return (row.name, f"diverged at step {row.diverged[0].step}", *[""] * (len(COLUMNS) - 1))
    mark = " ‡" if row.diverged else ""
    values = (shown(row.metrics[key], signed=key == "tax") for key in COLUMNS)
    return (row.name + mark, *values)


def _legend(rows: Sequence[Row]) -> str:
    context = column_title(rows, "last_segment")
    return "\n".join(
        (
            "- train length: at the length the model was trained at, always without a method.",
            "- repeated: a segment of text tiled to the whole context; seen: only the tokens whose",
            "  answer stands earlier in the context.",
            "- non-repeated: natural held-out text, every token scored.",
            f"- {context}: the last training length of tokens after the longest context.",
            "- tax: what a method changes at the training length when it is switched on there, in",
            "  points.",
        )
    )


def _behind(rows: Sequence[Row], left_out: int) -> str:
    """How many documents, tokens and seeds stand behind each column."""
    lines = []
    for key in COLUMNS:
        found = [value for row in rows if (value := row.metrics[key]) is not None]
        if found:
            lines.append(
                (
                    column_title(rows, key),
                    *(_span(sorted({getattr(v, field) for v in found})) for field in _COUNTS),
                )
            )
    if not lines:
        return ""
    text = "What stands behind each value (tokens are those scored, counted once for all seeds):"
    seeds = "; ".join(
        f"{names}: seed{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}"
        for group, names in _seed_groups(rows)
    )
    note = f"Seeds: {seeds}."
    if any(1 < len(row.seeds) < 5 for row in rows):
        note += " Resampling so few seeds understates how much further seeds would vary."
    if min(value.documents for row in rows for value in row.metrics.values() if value) < FEW:
        note += few_note("documents")
    if left_out:
        note += f" Left out: {left_out} records on other sets than most rows share."
    return f"{text}\n\n{grid(('column', *_COUNTS), lines)}\n\n{note}"


FEW = 20
"""Documents or samples below which percentile intervals hold the truth less often than they say."""


def few_note(what: str) -> str:
    """The warning that fewer than `FEW` stand behind an interval."""
    return f" Fewer than {FEW} {what}: these intervals are too narrow to rely on."


_COUNTS = ("documents", "tokens", "seeds")


def _span(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _seed_groups(rows: Sequence[Row]) -> list[tuple[tuple[int, ...], str]]:
    groups: dict[tuple[int, ...], dict[str, None]] = {}
    for row in rows:
        if row.seeds:
            groups.setdefault(row.seeds, {})[row.key.variant] = None
    return [(seeds, ", ".join(variants)) for seeds, variants in groups.items()]


def _diverged(rows: Sequence[Row]) -> str:
    failed: dict[tuple[str, int], str] = {}
    for row in rows:
        for each in row.diverged:
            place = f"- {each.variant}, seed {each.seed}: diverged at step {each.step}; the first "
            place += f"value that is not finite came from {each.where}."
            if not row.empty:
                place += " Its rows (‡) are made of the other seeds."
            failed.setdefault((each.variant, each.seed), place)
    return "\n".join(("Diverged runs:", "", *failed.values())) if failed else ""


def _findings(cells: Cells, bootstrap: Bootstrap) -> str:
    """Each variant as it is against the baseline as it is; claimed only beyond the interval."""
    plain = [row for row in cells.rows if not row.method]
    base = next((row for row in plain if row.variant == "Baseline"), None)
    if base is None or len(plain) < 2:
        return ""
    lines = []
    for row in plain:
        if row != base:
            found = (_claimed(cells, row, base, key, bootstrap) for key in _COMPARED)
            lines += [_item(each) for each in found if each is not None]
    if not lines:
        return ""
    head = (
        "Findings, models as they are. A difference counts only where its interval, paired over "
        "documents and seeds, excludes 0; each comparison stands alone (no correction for their "
        "number), and with one seed it speaks of these two trained models only:"
    )
    return "\n".join((head, "", *lines))


def _item(claimed: Claim) -> str:
    seeds = claimed.difference.seeds
    return f"- {claimed.sentence} ({seeds} seed{'s' if seeds > 1 else ''})"


def _claimed(
    cells: Cells, row: RowKey, base: RowKey, key: str, bootstrap: Bootstrap
) -> Claim | None:
    try:
        return claim(cells, row.name, base.name, key, bootstrap=bootstrap)
    except InputError:  # not measured, or not on a set that both share: nothing to compare
        return None


def _pair(ours: Estimate | None, theirs: float) -> tuple[str, str]:
    return ("–" if ours is None else f"{ours.value:.1f}", f"{theirs:.2f}")

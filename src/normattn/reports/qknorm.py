"""The QK-Norm study's page: translation by score, the learning-rate ladder, findings, the claim."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.figures.intervals import Column, draw_intervals
from normattn.reports.figures.stability import draw_ladder
from normattn.reports.markdown import FEW, few_note, grid, shown
from normattn.reports.metrics import Estimate
from normattn.reports.stability import Ladder, LadderRun, ladder_markdown, make_ladder
from normattn.reports.summed import Statistic
from normattn.reports.translation_record import STATISTICS, TranslationRecord
from normattn.reports.translations import REFERENCE, Ended, TranslationRow, translation_rows

SOURCE_BLEU = (28.5, 29.2)
"""What the source reports without and with QK-Norm, on a corpus and at a size of its own."""
COMPARED = ("QKLayerNorm", "QKRMSNorm")
"""The rows that the source's sentence speaks of."""


def qknorm_report(
    records: Sequence[TranslationRecord],
    ended: Sequence[Ended],
    runs: Sequence[LadderRun],
    out: Path,
    *,
    order: Sequence[str] = (),
    setting: Mapping[str, str] | None = None,
    pages: Mapping[str, str] | None = None,
    bootstrap: Bootstrap | None = None,
) -> list[Path]:
    """Write table.md, .csv, .json and the figures into `out`; return the figures' files.

    `order` names the rows that come first, `setting` what was trained on what, `pages` the files
    beside it and what each holds. The same records give the same bytes. Raises `InputError` when
    there is nothing to report.
    """
    drawn = bootstrap or Bootstrap()
    rows = translation_rows(records, ended, order, drawn)
    ladder = make_ladder(runs, order, drawn)
    if not rows and not ladder and not pages:
        raise InputError("there is nothing to report: no model was trained to its end")
    write_text(out / "table.md", _page(rows, ladder, setting or {}, pages or {}, drawn))
    write_text(out / "table.json", _json(rows, ladder))
    write_text(out / "table.csv", _csv(rows))
    paths = _draw_rows(rows, out / "figures")
    return paths + (draw_ladder(ladder, out / "figures") if ladder else [])


def _page(
    rows: Sequence[TranslationRow],
    ladder: Ladder,
    setting: Mapping[str, str],
    pages: Mapping[str, str],
    bootstrap: Bootstrap,
) -> str:
    beside = [f"- [{name}]({name}): {what}." for name, what in pages.items()]
    parts = [
        "# QK-Norm: translation and stability",
        "\n".join(f"- {name}: {value}" for name, value in setting.items()),
        *(_rows_parts(rows, bootstrap) if rows else ()),
        f"## Stability\n\n{ladder_markdown(ladder)}" if ladder else "",
        _ladder_ends(ladder),
        "\n".join(("Also measured:", "", *beside)) if beside else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows_parts(rows: Sequence[TranslationRow], bootstrap: Bootstrap) -> list[str]:
    intro = (
        f"With {bootstrap.level:.0%} intervals from {bootstrap.resamples} bootstrap resamples of "
        "the sentences, and of the seeds where there are several. Δ: difference to Baseline, "
        "paired over sentences and seeds; an interval that holds 0 is no finding."
    )
    return [
        f"## Translation by score\n\n{intro}",
        _main_table(rows),
        "- BLEU, chrF: of the translations by beam search, as sacrebleu computes them.\n"
        "- loss (nats), accuracy (%): per target token of the references, each predicted from "
        "those before it.\n"
        "- BatchNorm and InstanceNorm rows: in the encoder, and on the keys of the cross "
        "attention; elsewhere they would read the future, and those layers are Baseline's.",
        _behind(rows),
        "\n".join(f"- {each.sentence}" for row in rows for each in row.ended),
        _findings(rows),
        _beside_the_source(rows),
    ]


def _main_table(rows: Sequence[TranslationRow]) -> str:
    head = ["score", *(each.title for each in STATISTICS), "Δ BLEU", "Δ loss"]
    lines = []
    for row in rows:
        if not row.records:
            step = row.ended[0].step
            lines.append((row.variant, f"diverged at step {step}", *[""] * (len(head) - 2)))
            continue
        values = (shown(row.values[s.key], digits=s.digits) for s in STATISTICS)
        changes = (_change(row, key, digits) for key, digits in (("bleu", 1), ("loss", 3)))
        lines.append((row.variant + (" ‡" if row.ended else ""), *values, *changes))
    return grid(head, lines)


def _change(row: TranslationRow, key: str, digits: int) -> str:
    return "" if row.variant == REFERENCE else shown(row.changes[key], signed=True, digits=digits)


def _behind(rows: Sequence[TranslationRow]) -> str:
    found: list[Estimate] = [each for row in rows for each in row.values.values() if each]
    if not found:
        return ""
    sentences, tokens = found[0].documents, found[0].tokens
    seeds = sorted({seed for row in rows for seed in row.seeds})
    signatures = sorted({s for row in rows for record in row.records for s in record.signatures})
    text = (
        f"Behind each value: {sentences:,} sentences, {tokens:,} target tokens, "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}."
    )
    if len(seeds) == 1:
        text += " With one seed a difference speaks of these two trained models only."
    elif len(seeds) < 5:
        text += " Resampling so few seeds understates how much further seeds would vary."
    if sentences < FEW:
        text += few_note("sentences")
    return text + "".join(f"\n\n`{signature}`" for signature in signatures)


def _findings(rows: Sequence[TranslationRow]) -> str:
    """Differences to Baseline whose interval excludes 0, and how many were looked at."""
    lines = []
    for row in rows:
        for statistic in STATISTICS:
            change = row.changes[statistic.key]
            if statistic.key in ("bleu", "loss") and change is not None:
                lines.append(_finding(row.variant, statistic, change))
    kept = [line for line in lines if line]
    if not lines:
        return ""
    head = (
        f"Of {len(lines)} differences to Baseline {len(kept)} exclude 0 (each stands alone: no "
        "correction for their number)"
    )
    return head + (":\n\n" + "\n".join(kept) if kept else ".")


def _finding(variant: str, statistic: Statistic, change: Estimate) -> str:
    if not (change.above_zero or change.below_zero):
        return ""
    better = change.above_zero == statistic.higher
    amount = shown(change, signed=True, digits=statistic.digits)
    return f"- {variant}: {statistic.title} {amount}, {'better' if better else 'worse'}."


def _beside_the_source(rows: Sequence[TranslationRow]) -> str:
    by_name = {row.variant: row for row in rows}
    base = by_name.get(REFERENCE)
    lines = []
    for name in COMPARED:
        row = by_name.get(name)
        if base is not None and row is not None:
            cells = (base.values["bleu"], row.values["bleu"])
            change = shown(row.changes["bleu"], signed=True)
            lines.append((f"{name}, here", *(shown(each) for each in cells), change))
    if not lines:
        return ""
    before, after = SOURCE_BLEU
    theirs = ("the source", f"{before}", f"{after}", f"{after - before:+.1f}")
    head = ("", "without", "with QK-Norm", "Δ BLEU")
    return "### Beside the source's sentence: another corpus and size, not a target\n\n" + grid(
        head, [theirs, *lines]
    )


def _ladder_ends(ladder: Ladder) -> str:
    ends = [
        f"- ×{rung.rate:g}: {run.ended.sentence}"
        for score in ladder.scores
        for rung in ladder.of_score(score)
        for run in rung.runs
        if run.ended is not None
    ]
    return "\n".join(("Trainings that ended in NaN:", "", *ends)) if ends else ""


def _json(rows: Sequence[TranslationRow], ladder: Ladder) -> str:
    rungs = [rung.as_json() for score in ladder.scores for rung in ladder.of_score(score)]
    facts = {
        "rows": [row.as_json() for row in rows],
        "ladder": {"unigram": ladder.unigram, "rungs": rungs},
        "source_bleu": list(SOURCE_BLEU),
    }
    return json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _csv(rows: Sequence[TranslationRow]) -> str:
    """One line per score: each statistic, its difference to Baseline, and the ends of both."""
    names = [each.key for each in STATISTICS]
    head = ["score", "seeds", "sentences"]
    for name in (*names, *(f"change_{name}" for name in names)):
        head += [name, f"{name}_low", f"{name}_high"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, "diverged_at_step"])
    for row in rows:
        found = [row.values[name] for name in names] + [row.changes[name] for name in names]
        counts = next((each.documents for each in found if each is not None), "")
        line: list[object] = [row.variant, " ".join(map(str, row.seeds)), counts]
        for each in found:
            line += ["", "", ""] if each is None else [each.value, each.low, each.high]
        writer.writerow([*line, row.ended[0].step if row.ended else ""])
    return text.getvalue()


def _draw_rows(rows: Sequence[TranslationRow], folder: Path) -> list[Path]:
    measured = [row for row in rows if row.records]
    if len(measured) < 2:
        return []
    columns = [
        Column(label, [(row.variant, row.values[key]) for row in measured])
        for key, label in (("bleu", "BLEU"), ("loss", "loss (nats per token)"))
    ]
    return draw_intervals(
        columns,
        folder,
        "bleu_by_score",
        title="Translation by score",
        caption=(
            "Dots: the test set as a whole. Lines: 95 % bootstrap interval over sentences (and "
            "seeds); intervals of two rows may overlap although their paired difference excludes "
            "0. Dotted: Baseline."
        ),
    )

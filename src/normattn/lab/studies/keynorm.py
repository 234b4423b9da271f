"""Does normalising the keys let a model trained on short text handle long text? (kexue 9859)

Eight scores are trained (Baseline, QNA, KNA and CosA, each with and without log-n scaling), and
each reads past its training length in four ways: unmodified, and with NTK, YaRN or ReRoPE. "all"
asks for the extended table: a row for every training-time part, and every inference-time method on
Baseline, KNA and CosA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from normattn.errors import InputError
from normattn.lab.report.claims import Claim
from normattn.lab.report.tables import Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.studies import lm_report as lm
from normattn.lab.studies.base import Study
from normattn.lab.studies.language import TextSetting
from normattn.lab.studies.methods import ALL, candidates, canonical, checked_methods, usable
from normattn.lab.studies.preset import Preset, opened
from normattn.lab.sweep.run import Request, Sweep
from normattn.score.parts import Part, parts
from normattn.score.spec import UNMODIFIED

BASES = ("Baseline", "Baseline-logn", "KNA", "KNA-logn", "CosA", "CosA-logn")
"""The scores that the extended table reads with every method."""
VARIANTS = tuple(
    f"{base}{logn}" for base in ("Baseline", "QNA", "KNA", "CosA") for logn in ("", "-logn")
)
STRETCHING = ("NTK", "YaRN", "ReRoPE")
METHODS = (UNMODIFIED, *STRETCHING)
READ_WITH = ("YaRN", "ReRoPE")
"""The methods that other rows of the extended table are read with."""


def resolve(request: Request) -> Sweep:
    """Every choice made and checked, before anything is written or trained.

    Raises `InputError` for an unknown preset, score, method or setting, and for values out of
    range. A method that one of several scores cannot take leaves out that row, with a sentence;
    so does a part that a row of the extended table cannot have.
    """
    setting = TextSetting.of(opened(request, "keynorm", Preset))
    variants, untrained = _variants(request, setting)
    if request.methods == (ALL,):
        wanted = {
            name: (UNMODIFIED, *(candidates() if name in (*BASES, *VARIANTS) else READ_WITH))
            for name in variants
        }
    else:
        asked = checked_methods(_listed(request.methods, "--methods") or METHODS, setting)
        wanted = dict.fromkeys(variants, asked)
    methods, unread = usable(wanted, setting)
    runs = [setting.run(*each) for each in methods.items()]
    return setting.sweep(request, "keynorm", runs, [*untrained, *unread])


def _variants(request: Request, setting: TextSetting) -> tuple[tuple[str, ...], list[str]]:
    """The scores to train, and why each of the others cannot be trained here."""
    every = (ALL,) in (request.variants, request.methods) and request.variants in (None, (ALL,))
    if not every:
        return canonical(_listed(request.variants, "--variants") or VARIANTS, setting), []
    trained, untrained = list[str](), list[str]()
    for variant in trained_in_variants(int(setting.training["model"]["layers"])):
        try:
            trained += canonical([variant], setting)
        except InputError as error:
            untrained.append(f"{variant} is left out: {error}")
    return tuple(dict.fromkeys(trained)), untrained


def trained_in_variants(
    layers: int, known: Mapping[str, type[Part]] | None = None
) -> tuple[str, ...]:
    """Baseline, KNA and CosA with and without log-n, and a row for every other training-time part.

    Other norms of the score are not among them: `reproduce mechanism` compares those. Each part
    is added alone with its default parameters, on Baseline (NoPE on KNA too, where the source found
    no extrapolation; a part of the slot `order` on QKRMSNorm, as it needs a norm); one that would
    change none of so few `layers` changes the last one.
    """
    rows = list(BASES)
    for name, part in (parts() if known is None else known).items():
        if part.when != "training-time" or name in ("RoPE", "logn"):
            continue
        if part.slot.value == "order":
            rows.append(f"QKRMSNorm-{name}")
        elif part.slot.value != "variant":
            every = getattr(part, "every", 0)
            text = f"{part.name}(every={layers})" if every > layers >= 2 else part.name
            rows += [f"Baseline-{text}", *(["KNA-NoPE"] if name == "NoPE" else [])]
    return tuple(rows)


def _listed(names: tuple[str, ...] | None, option: str) -> tuple[str, ...] | None:
    if names is not None and ALL in names:
        raise InputError(f"{option} {ALL} cannot be combined with other names: {', '.join(names)}")
    return names


# Claims

PAST = {
    "non_repeated": "held-out text past L",
    "repeated": "repeated text past L",
    "last_segment": "the last segment after the longest context",
}
MATTERS = 5.0
"""Points past L below which a difference is small compared with the source's, of 23 and more: where
the data could have shown none but larger ones, an undecided sentence is inconclusive; and a
sentence that promises no loss, or nothing to gain, holds where less than these are lost, or won."""
WITHIN = f"less than {MATTERS:.0f} points"
CONTROLS = {"NoPE", "ALiBi", "SlidingWindow", "HWFA", "KERPLELog", "KERPLEPower", "XPos"}
"""Parts of scores that are there to compare others with."""
said = partial(Claim, source="kexue 9859", matters=MATTERS)


def claims(view: View) -> Iterator[Claim]:
    """What the source says about normalised keys, sentence by sentence; two controls come last."""

    def differ(sentence: str, text: str, ours: str, theirs: str, **more: Any) -> Claim:
        """A claim on the difference of two rows, each "score" or "score method", past L."""
        read = lm.past(lm.ACCURACY, view, text)
        pairs = [(row, method) for row, _, method in (ours.partition(" "), theirs.partition(" "))]
        first, second = (read.at(variant=row, method=method) for row, method in pairs)
        named = " − ".join("-".join(filter(None, pair)) for pair in pairs)
        return said(sentence, first - second, measured=f"{named}, accuracy", **more)

    for row in ("KNA", "CosA", "KNA-logn", "CosA-logn"):
        for text, words in PAST.items():
            yield differ(f"{row} reads better than Baseline: {words}", text, row, "Baseline")
    natural, repeated = "non_repeated", "repeated"
    yield differ(
        "normalising the queries alone does not help: KNA is above QNA on held-out text",
        *(natural, "KNA", "QNA"),
    )
    for row in ("KNA", "CosA", "QNA"):
        yield said(
            f"{row} is slightly better at the training length",
            lm.AT_L.at(variant=row) - lm.AT_L.at(variant="Baseline"),
            measured=f"{row} − Baseline at L, accuracy",
            matters=lm.EQUAL,
        )
    for method in ("YaRN", "ReRoPE"):
        sentence = f"KNA reads held-out text as well as Baseline with {method} ({WITHIN} worse)"
        yield differ(sentence, natural, "KNA", f"Baseline {method}", margin=MATTERS)
    for row in ("KNA", "CosA"):
        for method in STRETCHING:
            sentence = f"{row} gains nothing from {method} on held-out text ({WITHIN})"
            yield differ(sentence, natural, f"{row} {method}", row, sign=-1, margin=MATTERS)
    for method in STRETCHING:
        sentence = f"KNA gains from {method} on repeated text"
        yield differ(sentence, repeated, f"KNA {method}", "KNA")
    yield differ(
        "KNA does not make out positions past L: below Baseline with YaRN on repeated text",
        *(repeated, "KNA", "Baseline YaRN"),
        sign=-1,
    )
    yield from _as_contexts_grow(view)
    yield from _by_distance(view)
    for control, words in (
        ("Baseline-SlidingWindow", "a model with a window of L/4"),
        ("Baseline StreamingLLM", "Baseline does with StreamingLLM"),
    ):
        sentence = f"KNA reads held-out text past L better than {words}"
        yield differ(sentence, natural, "KNA", control, source="control")


def _as_contexts_grow(view: View) -> Iterator[Claim]:
    """The same last segment after L and after the longest context."""
    lengths = view.lengths("last_segment")
    if len(lengths) < 2:
        return
    change, ends = lm.UNMODIFIED_CHANGE, f"after {lengths[-1]:,} − after {lengths[0]:,}"
    rows = view.values("row", {"protocol": "last_segment", "method": ""})
    others = [row for row in lm.ranked(rows, ()) if _candidate(row)]
    for row in ("KNA", "CosA", *others):
        claim = partial(said, source="asked here") if row in others else said
        yield claim(
            f"{row} loses less than Baseline from L to the longest context",
            change.at(variant=row) - change.at(variant="Baseline"),
            measured=f"change of {row} − change of Baseline, last segment",
        )
        yield claim(
            f"{row} needs no change at all: longer contexts do not hurt it (by {WITHIN})",
            change.at(variant=row),
            measured=f"{row}, last segment: {ends}",
            margin=MATTERS,
        )
    yield said(
        "KNA does not extrapolate without rotary positions: longer contexts hurt KNA-NoPE",
        change.at(variant="KNA-NoPE"),
        measured=f"KNA-NoPE, last segment: {ends}",
        sign=-1,
    )


def _candidate(row: str) -> bool:
    """Whether a score is neither of the source nor a control."""
    return row not in VARIANTS and not CONTROLS & set(re.split(r"[-(]", row))


def _by_distance(view: View) -> Iterator[Claim]:
    """Copying over a trained and over an unseen distance; the control sees neither's answer."""
    known, trained = lm.distances(view), max(view.values("train_length"), default=0)
    near, far = max((d for d in known if d < trained), default=0), max(known, default=0)
    if not near < trained <= far:
        return
    copied, unseen = (lm.copied_from(view, d).at(variant="KNA", method="") for d in (near, far))
    control = {"variant": "Baseline", "method": lm.CONTROL}
    against, at = "KNA − Baseline-StreamingLLM", "repeated text, distance"
    yield said(
        f"KNA copies over a distance that it was trained on ({near:,} tokens)",
        copied - copied.at(**control),
        measured=f"{against}, {at} {near:,}",
    )
    yield said(
        f"KNA does not copy over a distance that it was not trained on ({far:,} tokens; {WITHIN})",
        unseen - unseen.at(**control),
        measured=f"{against}, {at} {far:,}",
        sign=-1,
        margin=MATTERS,
    )
    yield said(
        f"YaRN gives KNA that distance ({far:,} tokens)",
        unseen.at(method="YaRN") - unseen,
        measured=f"KNA-YaRN − KNA, {at} {far:,}",
    )


# The source's table, next to ours: another setting, never a target.

SETTING = (
    "100M-parameter GAU (24 layers, width 768, key size 128, DeepNorm, Tiger), trained at 512 "
    "tokens, tested at 4096; corpus and number of steps unpublished (kexue.fm/archives/9859)"
)
# Accuracy in %: at L, then (repeated, non-repeated) unmodified and with NTK, YaRN, ReRoPE.
PUBLISHED: dict[str, tuple[float, tuple[tuple[float, float], ...]]] = {
    "Baseline": (49.41, ((24.17, 23.16), (60.57, 42.20), (80.10, 47.45), (76.11, 47.82))),
    "Baseline-logn": (49.40, ((24.60, 24.02), (75.86, 47.06), (82.57, 46.52), (85.47, 48.87))),
    "QNA": (49.55, ((22.45, 22.18), (52.28, 39.88), (82.53, 47.50), (78.22, 47.72))),
    "QNA-logn": (49.42, ((19.55, 18.74), (57.44, 41.56), (80.08, 45.16), (84.71, 48.31))),
    "KNA": (49.60, ((61.08, 47.69), (64.44, 43.02), (84.19, 47.44), (77.76, 47.73))),
    "KNA-logn": (49.58, ((63.17, 46.40), (79.05, 47.43), (83.95, 47.16), (85.48, 48.78))),
    "CosA": (49.73, ((58.90, 46.98), (62.50, 42.77), (83.40, 47.80), (77.82, 47.80))),
    "CosA-logn": (49.67, ((64.74, 48.39), (78.97, 47.46), (82.28, 45.72), (85.67, 48.39))),
}


def published(row: Row) -> tuple[float, ...] | None:
    """What the source prints of a row: at L, on repeated and on other text; None for another."""
    score, method = row.where["row"], row.where["method"]
    if score not in PUBLISHED or method not in ("", *STRETCHING):
        return None
    train, pairs = PUBLISHED[score]
    return (train, *pairs[("", *STRETCHING).index(method)])


def _source_columns(view: View) -> Iterator[Column]:
    """Ours and theirs, side by side."""
    ours = {column.key: column for column in lm.reading_columns(view)}
    for number, key in enumerate(("train", "repeated", "non_repeated")):
        if key not in ours:
            continue
        yield replace(ours[key], interval=False)
        yield text_column(f"{key}_source", "source", partial(_printed, number))


def _printed(number: int, view: View, row: Row) -> str:
    """One of the numbers that the source prints of a row."""
    return f"{(published(row) or ())[number]:.2f}"


STUDY = Study(
    "keynorm",
    "Does normalising keys (KNA), queries (QNA) or both (CosA) let a model trained on "
    "short text handle long text, unmodified or with NTK, YaRN and ReRoPE?",
    title="Accuracy past the training length",
    help="Train each score, evaluate it at up to 8 times the training length with each method.\n\n"
    "A plan is printed first: runs, tokens, FLOPs, time, disk. To add configurations, rerun with "
    "other --variants, --methods or --seeds and the same OUT. Changing any other setting that "
    "affects a result raises an error.",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve,
    tables=(
        lm.reading_table(
            notes=lambda view: (*lm.precondition(view), *lm.LEGEND), main=lm.MAIN_COLUMNS
        ),
        Table(
            "copying",
            "How far back can each score copy from?",
            lambda view: lm.reading_rows(view) if lm.distances(view) else [],
            lm.copying_columns,
            intro="Token accuracy in % on repeated text, for tokens whose answer occurs earlier, "
            "by how many tokens back it occurs. A model that cannot see so far back is at the "
            f"level of {lm.CONTROL}.",
        ),
        Table(
            "source",
            "The KeyNorm post's table, for comparison: another setting, not a target",
            lambda view: [row for row in lm.reading_rows(view) if published(row)],
            lambda view: [*_source_columns(view)],
            intro=f"The post: {SETTING}. Accuracy in %. For CosA-logn, unmodified, it prints 48.39 "
            "in its large table and 48.95 in its first.",
        ),
    ),
    claims=claims,
    figures=lambda view: [
        *lm.position_figures(view),
        lm.copying_figure(view),
        lm.length_figure(view),
        lm.history_figure(view),
    ],
    summary=lm.in_short,
    variants_help="Trained scores, separated by commas (see `normattn list`), or `all`. "
    "[default: Baseline, QNA, KNA, CosA, each with and without -logn]",
    methods_help="Inference-time methods, separated by commas, or `all`: every one that a score "
    "supports, and every training-time component as well. [default: unmodified,NTK,YaRN,ReRoPE]",
    headline=("train", "repeated_seen", "non_repeated", "change"),
    examples=(
        ("--preset quick", "one head of 128, in minutes: plain RoPE gets worse, KeyNorm does not"),
        ("--methods all", "every method, and every training-time component"),
        ("--preset gpu-100m --corpus hf:NAME --plan", "its cost"),
    ),
)

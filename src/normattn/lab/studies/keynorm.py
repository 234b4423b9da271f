"""Does normalising the keys let a model trained on short text handle long text? (kexue 9859)

Eight scores are trained (Baseline, QNA, KNA and CosA, each with and without log-n scaling). Each is
evaluated on longer text unmodified, and with NTK, YaRN or ReRoPE. "all" makes the extended table: a
row for every training-time component, and every inference-time method on Baseline, KNA and CosA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from normattn.errors import InputError
from normattn.lab.report.tables import Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.studies import lm_report as lm
from normattn.lab.studies.base import Claim, Study
from normattn.lab.studies.language import ALL, TextSetting, candidates
from normattn.lab.studies.preset import Preset, load_preset
from normattn.lab.sweep.run import Request, Sweep
from normattn.score.parts import parts
from normattn.score.spec import UNMODIFIED

BASES = ("Baseline", "Baseline-logn", "KNA", "KNA-logn", "CosA", "CosA-logn")
"""The scores that the extended table evaluates with every method."""
VARIANTS = tuple(
    f"{base}{logn}" for base in ("Baseline", "QNA", "KNA", "CosA") for logn in ("", "-logn")
)
POST_METHODS = ("NTK", "YaRN", "ReRoPE")
METHODS = (UNMODIFIED, *POST_METHODS)
OTHER_METHODS = (UNMODIFIED, "YaRN", "ReRoPE")
"""The methods of the other rows of the extended table."""


def resolve(request: Request) -> Sweep:
    """The sweep of a request, with every choice checked before anything is written or trained.

    Raises `InputError` for an unknown preset, score, method or setting, and for values out of
    range. Unsupported combinations of a score and a method are skipped, with a sentence each; so
    are rows of the extended table that cannot be trained.
    """
    setting = TextSetting.of(load_preset(request, "keynorm", Preset))
    for option, names in (("variants", request.variants), ("methods", request.methods)):
        if names is not None and ALL in names and len(names) > 1:
            listed = ", ".join(names)
            raise InputError(f"--{option} {ALL} cannot be combined with other names: {listed}")
    every_method = request.methods == (ALL,)
    variants, skipped = list[str](), list[str]()
    if request.variants == (ALL,) or (every_method and request.variants is None):
        for variant in extended_variants(int(setting.training["model"]["layers"])):
            try:
                variants += setting.canonical_scores([variant])
            except InputError as error:
                skipped.append(f"{variant} is left out: {error}")
    else:
        variants += setting.canonical_scores(request.variants or VARIANTS)
    if every_method:
        named = {*BASES, *VARIANTS}
        all_methods = (UNMODIFIED, *candidates())
        methods = {name: all_methods if name in named else OTHER_METHODS for name in variants}
    else:
        methods = dict.fromkeys(variants, setting.canonical_methods(request.methods or METHODS))
    supported, unsupported = setting.applicable_methods(methods)
    runs = [setting.run(score, chosen) for score, chosen in supported.items()]
    return setting.sweep(request, "keynorm", runs, [*skipped, *unsupported])


def extended_variants(layers: int) -> tuple[str, ...]:
    """The rows of the extended table: `BASES`, and one for every other training-time component.

    Other norms are left to `reproduce mechanism`. Each component is added alone, with its default
    parameters, to Baseline. NoPE is added to KNA too, where the source found no extrapolation. A
    component of the slot `order` is added to QKRMSNorm, as it needs a norm. A component for every
    n-th layer changes the last one where n exceeds `layers`.
    """
    rows = list(BASES)
    for name, part in parts().items():
        if part.when != "training-time" or name in ("RoPE", "logn"):
            continue
        if part.slot.value == "order":
            rows.append(f"QKRMSNorm-{name}")
        elif part.slot.value != "variant":
            period = getattr(part, "every", 0)
            text = f"{part.name}(every={layers})" if period > layers >= 2 else part.name
            rows += [f"Baseline-{text}", *(["KNA-NoPE"] if name == "NoPE" else [])]
    return tuple(rows)


# Claims

LONGER_TEXTS = {
    "non_repeated": "longer held-out text",
    "repeated": "longer repeated text",
    "last_segment": "the same final tokens after the longest context",
}
MATTERS = 5.0
"""Points on longer text below which a difference is small; the source's are 23 and more. An
undecided claim is inconclusive where only larger differences were detectable. A claim of no loss or
no gain is confirmed where less than this is lost or gained."""
WITHIN = f"less than {MATTERS:.0f} points"
CONTROLS = {"NoPE", "ALiBi", "SlidingWindow", "HWFA", "KERPLELog", "KERPLEPower", "XPos"}
"""Components that other scores are compared with."""
post_claim = partial(Claim, source="kexue 9859", matters=MATTERS)


def claims(view: View) -> Iterator[Claim]:
    """What the source says about normalised keys, sentence by sentence; two controls come last."""

    def difference(sentence: str, protocol: str, first: str, second: str, **fields: Any) -> Claim:
        """A claim on two rows, each "SCORE" or "SCORE METHOD", on the longest texts."""
        accuracy = lm.at_longest(lm.ACCURACY, view, protocol)
        pairs = [(row, method) for row, _, method in (first.partition(" "), second.partition(" "))]
        metrics = [accuracy.at(variant=row, method=method) for row, method in pairs]
        names = " − ".join("-".join(filter(None, pair)) for pair in pairs)
        measured = f"{names}, accuracy"
        return post_claim(sentence, metrics[0] - metrics[1], measured=measured, **fields)

    for row in ("KNA", "CosA", "KNA-logn", "CosA-logn"):
        for protocol, text in LONGER_TEXTS.items():
            yield difference(
                f"{row} is more accurate than Baseline: {text}", protocol, row, "Baseline"
            )
    held_out, repeated = "non_repeated", "repeated"
    yield difference(
        "normalising the queries alone does not help: KNA is above QNA on longer held-out text",
        *(held_out, "KNA", "QNA"),
    )
    for row in ("KNA", "CosA", "QNA"):
        yield post_claim(
            f"{row} is slightly better at the training length",
            lm.AT_L.at(variant=row) - lm.AT_L.at(variant="Baseline"),
            measured=f"{row} − Baseline at the training length, accuracy",
            matters=lm.EQUAL,
        )
    for method in ("YaRN", "ReRoPE"):
        sentence = f"KNA is as accurate on longer held-out text as Baseline with {method} "
        sentence += f"({WITHIN} worse)"
        yield difference(sentence, held_out, "KNA", f"Baseline {method}", margin=MATTERS)
    for row in ("KNA", "CosA"):
        for method in POST_METHODS:
            sentence = f"{row} gains nothing from {method} on longer held-out text ({WITHIN})"
            yield difference(sentence, held_out, f"{row} {method}", row, sign=-1, margin=MATTERS)
    for method in POST_METHODS:
        sentence = f"KNA gains from {method} on longer repeated text"
        yield difference(sentence, repeated, f"KNA {method}", "KNA")
    yield difference(
        "KNA does not resolve unseen distances: below Baseline with YaRN on longer repeated text",
        *(repeated, "KNA", "Baseline YaRN"),
        sign=-1,
    )
    yield from _as_contexts_grow(view)
    yield from _by_distance(view)
    for control, name in (
        ("Baseline-SlidingWindow", "a model with a window of a quarter of the training length"),
        ("Baseline StreamingLLM", "Baseline with StreamingLLM"),
    ):
        sentence = f"KNA is more accurate on longer held-out text than {name}"
        yield difference(sentence, held_out, "KNA", control, source="control")


def _as_contexts_grow(view: View) -> Iterator[Claim]:
    lengths = view.lengths("last_segment")
    if len(lengths) < 2:
        return
    change, ends = lm.UNMODIFIED_CHANGE, f"after {lengths[-1]:,} − after {lengths[0]:,}"
    rows = lm.ranked(view.values("row", {"protocol": "last_segment", "method": ""}), ())
    others = [r for r in rows if r not in VARIANTS and not CONTROLS & set(re.split(r"[-(]", r))]
    for row in ("KNA", "CosA", *others):
        claim = partial(post_claim, source="asked here") if row in others else post_claim
        yield claim(
            f"{row} loses less than Baseline from the training length to the longest context",
            change.at(variant=row) - change.at(variant="Baseline"),
            measured=f"change of {row} − change of Baseline, same final tokens",
        )
        yield claim(
            f"{row} needs no change at all: longer contexts do not hurt it (by {WITHIN})",
            change.at(variant=row),
            measured=f"{row}, same final tokens: {ends}",
            margin=MATTERS,
        )
    for row in ("KNA", "CosA"):
        yield post_claim(
            f"the loss of {row} does not explode as Baseline's does: longer contexts raise it less",
            lm.LOSS_CHANGE.at(variant=row) - lm.LOSS_CHANGE.at(variant="Baseline"),
            measured=f"change of {row} − change of Baseline, loss on the same final tokens",
            sign=-1,
            matters=None,
        )
    yield post_claim(
        "KNA does not extrapolate without rotary positions: longer contexts hurt KNA-NoPE",
        change.at(variant="KNA-NoPE"),
        measured=f"KNA-NoPE, same final tokens: {ends}",
        sign=-1,
    )


def _by_distance(view: View) -> Iterator[Claim]:
    """Claims on copying over a trained and an unseen distance; the control sees neither answer."""
    distances, trained = lm.distances(view), max(view.values("train_length"), default=0)
    near = max((distance for distance in distances if distance < trained), default=0)
    far = max(distances, default=0)
    if not near < trained <= far:
        return
    copied, unseen = (lm.copied_from(view, d).at(variant="KNA", method="") for d in (near, far))
    control = {"variant": "Baseline", "method": lm.CONTROL}
    rows, text = "KNA − Baseline-StreamingLLM", "repeated text, distance"
    yield post_claim(
        f"KNA copies over a distance that it was trained on ({near:,} tokens)",
        copied - copied.at(**control),
        measured=f"{rows}, {text} {near:,}",
    )
    yield post_claim(
        f"KNA does not copy over a distance that it was not trained on ({far:,} tokens; {WITHIN})",
        unseen - unseen.at(**control),
        measured=f"{rows}, {text} {far:,}",
        sign=-1,
        margin=MATTERS,
    )
    yield post_claim(
        f"YaRN gives KNA that distance ({far:,} tokens)",
        unseen.at(method="YaRN") - unseen,
        measured=f"KNA-YaRN − KNA, {text} {far:,}",
    )


# The source's table, for comparison: another setting, not a target

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


def published(row: Row) -> tuple[float, ...]:
    """The source's accuracies of a row: at L, on repeated and on held-out text; () where none."""
    at_l, pairs = PUBLISHED.get(row.where["row"], (0.0, ()))
    by_method = dict(zip(("", *POST_METHODS), pairs, strict=False))
    pair = by_method.get(row.where["method"])
    return (at_l, *pair) if pair else ()


def _source_columns(view: View) -> list[Column]:
    """This project's accuracies, each followed by the source's."""

    def source(index: int, view: View, row: Row) -> str:
        return f"{published(row)[index]:.2f}"

    measured, columns = {c.key: c for c in lm.protocol_columns(view)}, list[Column]()
    for index, key in enumerate(("train", "repeated", "non_repeated")):
        if key in measured:
            columns.append(replace(measured[key], interval=False))
            columns.append(text_column(f"{key}_source", "KeyNorm post", partial(source, index)))
    return columns


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
        lm.protocol_table(
            notes=lambda view: (*lm.precondition(view), *lm.LEGEND),
            main=("train", "non_repeated", "change", "cost"),
        ),
        Table(
            "copying",
            "How far back can each score copy from?",
            lambda view: lm.protocol_rows(view) if lm.distances(view) else [],
            lambda view: [
                Column(f"copied_{d}", f"copied over {d:,} tokens", lm.copied_from(view, d))
                for d in lm.distances(view)
            ],
            intro="Token accuracy in % on repeated text, for tokens whose answer occurs earlier, "
            "by how many tokens back it occurs. A model that cannot see so far back is at the "
            f"level of {lm.CONTROL}.",
        ),
        Table(
            "source",
            "The KeyNorm post's table, for comparison: another setting, not a target",
            lambda view: [row for row in lm.protocol_rows(view) if published(row)],
            _source_columns,
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
    examples=(
        ("--preset quick", "one head of 128, in minutes: plain RoPE gets worse, KeyNorm does not"),
        ("--methods all", "every method, and every training-time component"),
        ("--preset gpu-100m --corpus hf:NAME --plan", "its cost"),
    ),
)

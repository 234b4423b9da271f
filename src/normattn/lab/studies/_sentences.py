"""What kexue 9859 says of normalised keys, sentence by sentence, and the contrast that tests each.

Two further claims are this project's own controls: neither a window of L/4 nor Baseline read
through its first tokens and a window can extrapolate, and neither can fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from normattn.lab.report.claim import Claim, difference
from normattn.lab.report.view import View
from normattn.lab.studies._premise import EQUAL
from normattn.lab.studies._reading import POINTS, TRAINED, change_terms, longest, minus

SOURCE = "kexue 9859"
CONTROL = "control"
PAST = {
    "non_repeated": "natural text past L",
    "repeated": "tiled text past L",
    "last_segment": "the last segment after the longest context",
}

MATTERS = 5.0
"""Points past L below which a difference is small beside the source's, of 23 and more: where the
data could have shown none but larger ones, an undecided sentence has too little data; and a
sentence that promises no loss, or nothing to gain, holds where less than these are lost, or won."""
WITHIN = f"less than {MATTERS:.0f} points"

Rows = dict[str, str | int]


def sentences(view: View) -> list[Claim]:
    """Every sentence as a claim; the controls come last."""
    return [
        *_past_the_training_length(view),
        *_at_the_training_length(),
        *_with_methods(view),
        *_as_contexts_grow(view),
        *_controls(view),
    ]


def _claim(
    sentence: str,
    measured: str,
    ours: Rows,
    theirs: Rows,
    *,
    sign: int = 1,
    source: str = SOURCE,
    matters: float = MATTERS,
    margin: float = 0.0,
) -> Claim:
    return difference(
        *(sentence, source, measured, POINTS, ours, theirs),
        sign=sign,
        matters=matters,
        margin=margin,
    )


def _past_the_training_length(view: View) -> Iterator[Claim]:
    """Scores as they are against Baseline as it is."""
    for row in ("KNA", "CosA", "KNA-logn", "CosA-logn"):
        for protocol, words in PAST.items():
            yield _claim(
                f"{row} reads better than Baseline: {words}",
                f"{row} − Baseline, accuracy",
                *(_past(view, score, protocol) for score in (row, "Baseline")),
            )
    yield _claim(
        "normalising the queries alone does not help: KNA is above QNA on natural text",
        "KNA − QNA, accuracy",
        *(_past(view, row, "non_repeated") for row in ("KNA", "QNA")),
    )


def _at_the_training_length() -> Iterator[Claim]:
    for row in ("KNA", "CosA", "QNA"):
        yield _claim(
            f"{row} is slightly better at the training length",
            f"{row} − Baseline at L, accuracy",
            *({"row": score, **TRAINED} for score in (row, "Baseline")),
            matters=EQUAL,
        )


def _with_methods(view: View) -> Iterator[Claim]:
    """What methods are worth to normalised keys, and what normalised keys are worth beside them."""
    natural, tiled = (
        {row: _past(view, row, protocol) for row in ("KNA", "CosA", "Baseline")}
        for protocol in ("non_repeated", "repeated")
    )
    for method in ("YaRN", "ReRoPE"):
        yield _claim(
            f"KNA as it is reads natural text as well as Baseline with {method} ({WITHIN} worse)",
            f"KNA − Baseline-{method}, accuracy",
            *(natural["KNA"], {**natural["Baseline"], "method": method}),
            margin=MATTERS,
        )
    for row in ("KNA", "CosA"):
        for method in ("NTK", "YaRN", "ReRoPE"):
            yield _claim(
                f"{row} gains nothing from {method} on natural text ({WITHIN})",
                f"{row}-{method} − {row}, accuracy",
                *({**natural[row], "method": method}, natural[row]),
                sign=-1,
                margin=MATTERS,
            )
    for method in ("NTK", "YaRN", "ReRoPE"):
        yield _claim(
            f"KNA gains from {method} on tiled text",
            f"KNA-{method} − KNA, accuracy",
            *({**tiled["KNA"], "method": method}, tiled["KNA"]),
        )
    yield _claim(
        "KNA as it is does not make out positions past L: below Baseline with YaRN on tiled text",
        "KNA − Baseline-YaRN, accuracy",
        *(tiled["KNA"], {**tiled["Baseline"], "method": "YaRN"}),
        sign=-1,
    )


def _as_contexts_grow(view: View) -> Iterator[Claim]:
    """The same last segment after L and after the longest context."""
    lengths = sorted(view.values("length", {"protocol": "last_segment"}))
    if len(lengths) < 2:
        return
    near, far = lengths[0], lengths[-1]
    for row in ("KNA", "CosA"):
        yield Claim(
            f"{row} loses less than Baseline from L to the longest context",
            SOURCE,
            f"change of {row} − change of Baseline, last segment",
            POINTS,
            minus(*(change_terms(view, {"row": r, "method": ""}) for r in (row, "Baseline"))),
            matters=MATTERS,
        )
        yield _claim(
            f"{row} needs no change at all: longer contexts do not hurt it (by {WITHIN})",
            f"{row}, last segment: after {far:,} − after {near:,}",
            *(_last(row, far), _last(row, near)),
            margin=MATTERS,
        )
    yield _claim(
        "KNA does not extrapolate without rotary positions: longer contexts hurt KNA-NoPE",
        f"KNA-NoPE, last segment: after {far:,} − after {near:,}",
        *(_last("KNA-NoPE", far), _last("KNA-NoPE", near)),
        sign=-1,
    )


def _controls(view: View) -> Iterator[Claim]:
    """KNA against what cannot extrapolate and cannot fail."""
    natural = _past(view, "KNA", "non_repeated")
    yield _claim(
        "KNA as it is reads natural text past L better than a model with a window of L/4",
        "KNA − Baseline-SlidingWindow, accuracy",
        *(natural, {**natural, "row": "Baseline-SlidingWindow"}),
        source=CONTROL,
    )
    yield _claim(
        "KNA as it is reads natural text past L better than Baseline does by its first tokens and "
        "a window",
        "KNA − Baseline-StreamingLLM, accuracy",
        *(natural, {**natural, "row": "Baseline", "method": "StreamingLLM"}),
        source=CONTROL,
    )


def _last(row: str, length: int) -> Rows:
    return {"row": row, "method": "", "protocol": "last_segment", "length": length}


def _past(view: View, row: str, protocol: str) -> Rows:
    """A row as it is, over the longest contexts of a protocol."""
    length = longest(view, protocol)
    known: Rows = {} if length is None else {"length": length}
    return {"row": row, "method": "", "protocol": protocol, **known}

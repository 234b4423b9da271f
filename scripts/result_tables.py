"""Write the tables of numbers in docs/ from results/.

    python scripts/result_tables.py

A page marks a table with `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`.
Tests compare every page with this output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import polars as pl
from scipy.stats import spearmanr

from normattn.lab.stats import holm

ROOT = Path(__file__).parents[1]
NO_BREAK = "\N{NO-BREAK SPACE}"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = Mapping[str, Any]
Cell = Callable[[Row], str]

READINGS = ("", "-NTK", "-YaRN", "-ReRoPE")
COMPARED = ("Baseline", "KNA")
EIGHT = tuple(
    f"{name}{logn}" for name in ("Baseline", "QNA", "KNA", "CosA") for logn in ("", "-logn")
)
CONTROLS = ("Baseline-SlidingWindow", "Baseline-StreamingLLM", "KNA-NoPE", "Baseline-ALiBi")
NEWER = (
    *("Baseline", "KNA", "NGPT", "Baseline-HoPE", "Baseline-VORoPE"),
    *("Baseline-ScaleInvariant", "Baseline-T5Bias"),
)
BLOCKS = {
    "the unchanged preset": "gated attention unit under DeepNorm",
    "multi-head attention and SwiGLU": "multi-head attention, SwiGLU",
    "multi-head attention and SwiGLU + PreLN": "the same under PreLN",
    "multi-head attention and SwiGLU + PreLN + a third of the steps": "… a third of the steps",
    "multi-head attention and SwiGLU + PreLN + half of the steps": "… half of the steps",
    "multi-head attention and SwiGLU + PreLN + half of the steps + one head": "… one head of 128",
    "PreLN": "gated attention unit under PreLN",
    "four times the training length": "trained at 512 tokens",
}
BASE, GATED_UNIT, SOURCE = "keynorm-base", "keynorm-workstation", "kexue 9859"
ARMS = {
    "KNA": "unchanged",
    "KNA, separate-qk": "linear W_q and W_k",
    "KNA, third-rope": "rotating a third of the pairs",
}


@cache
def published(folder: str) -> dict[str, Any]:
    """The published table.json of a folder in results/."""
    return dict(json.loads((ROOT / "results" / folder / "table.json").read_text("utf-8")))


def rows(folder: str, table: str = "table") -> dict[str, Row]:
    """The rows of a published table by name."""
    return {row["row"]: row for row in published(folder)["tables"][table]}


def number(value: float, digits: int = 1, sign: bool = False) -> str:
    """A number with a true minus; 0 has none."""
    return f"{value:{'+' if sign else ''}z.{digits}f}".replace("-", "−")


def plain(key: str, digits: int = 1, sign: bool = False) -> Cell:
    """A cell with the value of one measurement."""

    def cell(row: Row) -> str:
        measurement = row.get(key)
        if measurement is None or isinstance(measurement, str):
            return measurement or "–"
        return number(measurement["value"], digits, sign)

    return cell


def interval(key: str, digits: int = 1, sign: bool = False) -> Cell:
    """A cell with the value and its 95 % interval."""

    def cell(row: Row) -> str:
        measurement = row.get(key)
        if not isinstance(measurement, dict):
            return "–"
        value, low, high = (
            number(measurement[part], digits, sign) for part in ("value", "low", "high")
        )
        return f"{value} [{low}, {high}]"

    return cell


def lines(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *body))


def table(
    folder: str,
    columns: Mapping[str, Cell],
    names: Mapping[str, str] | Sequence[str] | None = None,
    head: str = "trained as",
    source: str = "table",
) -> str:
    """Some rows of a published table, with other names where `names` gives them."""
    known = rows(folder, source)
    names = list(known) if names is None else names
    shown = names if isinstance(names, Mapping) else {name: f"`{name}`" for name in names}
    body = [
        [label, *(cell(known[name]) for cell in columns.values())] for name, label in shown.items()
    ]
    return lines([head, *columns], body)


def changes(folder: str, names: Sequence[str]) -> str:
    """Accuracy of every score, and its change from L to 8 L unmodified and with each method."""
    known = rows(folder)
    body = []
    for name in names:
        unmodified = known[name]
        methods = [known.get(f"{name}{method}") for method in READINGS[1:]]
        body.append(
            [
                f"`{name}`",
                *(cell(unmodified) for cell in (interval("train"), plain("repeated_seen"))),
                plain("non_repeated")(unmodified),
                interval("change", sign=True)(unmodified),
                *("–" if row is None else plain("change", sign=True)(row) for row in methods),
            ]
        )
    header = ["trained as", "at L", "repeated, seen, 8 L", "held-out, 8 L", "change, unmodified"]
    return lines([*header, "NTK", "YaRN", "ReRoPE"], body)


def beside_the_post(text: str) -> str:
    """Accuracy at 8 L of the KeyNorm post's 32 rows on one kind of text, here and in the post."""
    known = rows(BASE, "source")
    body = []
    for name in EIGHT:
        pairs = [known[f"{name}{method}"] for method in READINGS]
        cells = [f"{plain(text)(row)} ({row[f'{text}_source']})" for row in pairs]
        body.append([f"`{name}`", *cells])
    return lines(["here (the post)", "unmodified", "NTK", "YaRN", "ReRoPE"], body)


def order_of_the_post() -> str:
    """Spearman's rank correlation of these rows with the post's."""
    known = rows(BASE, "source")
    shown = [known[f"{name}{method}"] for name in EIGHT for method in READINGS]
    body = []
    for text, title in (("repeated", "repeated text"), ("non_repeated", "held-out text")):
        here = [row[text]["value"] for row in shown]
        post = [float(row[f"{text}_source"]) for row in shown]
        body.append([title, str(len(shown)), number(float(spearmanr(here, post).statistic), 2)])
    return lines(["", "rows", "rank correlation with the post"], body)


def verdicts() -> str:
    """Every claim about KNA that both architectures test."""
    claims = [
        {claim["claim"]: claim for claim in published(folder)["claims"]}
        for folder in (BASE, GATED_UNIT)
    ]
    body = []
    for sentence in claims[0]:
        if not _about_kna(sentence):
            continue
        text = re.sub(r"\b(KNA|Baseline)(-\w+)?", r"`\g<0>`", sentence)
        body.append([text, *(_verdict(by_sentence.get(sentence)) for by_sentence in claims)])
    return lines(["claim", "one head of 128", "gated unit"], body)


def _about_kna(sentence: str) -> bool:
    return sentence.startswith(("KNA ", "the loss of KNA "))


def _verdict(claim: Row | None) -> str:
    if claim is None:
        return "–"
    verdict = claim["verdict"]
    word = f"**{verdict}**" if verdict == "contradicted" else verdict
    # A line may break before the numbers, not between them.
    return f"{word}, {interval('difference', sign=True)(claim).replace(' ', NO_BREAK)}"


def together() -> str:
    """How many of the post's claims that both reports test are confirmed, alone and jointly."""
    shown = {BASE: "one head of 128", GATED_UNIT: "gated unit"}
    claims = [(folder, claim) for folder in shown for claim in published(folder)["claims"]]
    tests = [
        (number, verdict, p)
        for number, (_, claim) in enumerate(claims)
        for verdict, p in claim["uncorrected"].items()
    ]
    adjusted = holm([p for *_, p in tests], [number for number, *_ in tests])
    jointly = {
        number
        for (number, verdict, _), p in zip(tests, adjusted, strict=True)
        if verdict == "confirmed" and p <= 0.05
    }
    of_post = set.intersection(
        *({c["claim"] for c in published(f)["claims"] if c["source"] == SOURCE} for f in shown)
    )
    body = []
    for kind, chosen in {"on `KNA`": set(filter(_about_kna, of_post)), "all": of_post}.items():
        for folder, name in shown.items():
            tested = {
                n: c for n, (f, c) in enumerate(claims) if f == folder and c["claim"] in chosen
            }
            alone = sum(claim["verdict"] == "confirmed" for claim in tested.values())
            both = len(jointly & tested.keys())
            body.append([name, kind, str(len(tested)), str(alone), str(both)])
    header = ["architecture", "which", "claims", "confirmed"]
    return lines([*header, f"confirmed, of {len(claims)} together"], body)


def copying() -> str:
    """Accuracy on repeated tokens by segment length, which is the distance to copy from."""
    shown = {
        ("KNA", ""): "`KNA`, unmodified",
        ("Baseline", "StreamingLLM"): "`Baseline` with StreamingLLM",
        ("Baseline", ""): "`Baseline`, unmodified",
        ("KNA", "YaRN"): "`KNA` with YaRN",
        ("Baseline", "YaRN"): "`Baseline` with YaRN",
    }
    path = ROOT / "results" / BASE / "measurements.parquet"
    seen = pl.read_parquet(path).filter(
        (pl.col("protocol") == "repeated") & (pl.col("statistic") == "accuracy_seen"),
        pl.col("of") > 0,
    )
    by_run = ("row", "method", "seed")
    # The first bin of 32 positions in which a token was seen before ends at the segment's length.
    units = seen.group_by(*by_run, "unit").agg(
        (pl.col("bin").min() + 32).alias("segment"), pl.col("sum", "of").sum()
    )
    runs = units.group_by(*by_run, "segment").agg(pl.col("sum").sum() / pl.col("of").sum() * 100)
    means = runs.group_by("row", "method", "segment").agg(pl.col("sum").mean())
    accuracy = {(row, method, segment): value for row, method, segment, value in means.iter_rows()}
    segments = (64, 128, 256, 512)
    body = [
        [label, *(number(accuracy[(*key, segment)]) for segment in segments)]
        for key, label in shown.items()
    ]
    return lines(
        ["distance to copy from, in tokens", *(str(segment - 1) for segment in segments)], body
    )


def inside() -> str:
    """Three tables of `mechanism` side by side, for each gated unit."""
    shown = {
        "energy in the mean key, %": ("table", interval("mean_direction")),
        "attention beyond the training length, %": ("distances", interval("beyond")),
        "rebound of the mean logit": ("profile", interval("rebound", 2, sign=True)),
    }
    sources = {source: rows("bridge-mechanism", source) for source, _ in shown.values()}
    body = [
        [label, *(cell(sources[source][arm]) for source, cell in shown.values())]
        for arm, label in ARMS.items()
        if arm in sources["table"]
    ]
    return lines(["unit", *shown], body)


def sweep() -> str:
    """The learning-rate sweep: each score's lowest loss, and the effect of the highest rate."""
    by_score: dict[str, list[Row]] = {}
    for name, row in rows("qknorm-laptop", "rates").items():
        by_score.setdefault(name.split(" ×")[0], []).append({**row, "rate": name.split(" ×")[1]})
    body = []
    for name, rates in by_score.items():
        best = min(rates, key=lambda row: row["loss"]["value"])
        last = rates[-1]
        logit = last["largest_logit"]["value"]
        body.append(
            [
                f"`{name}`",
                f"{number(best['loss']['value'], 2)} at ×{best['rate']}",
                number(last["loss"]["value"], 2),
                f"{logit:,.0f}",
            ]
        )
    return lines(["score", "lowest loss", "loss at ×32", "largest logit at ×32"], body)


def depths() -> str:
    """Masked language models: accuracy of every placement at both depths."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in published("realformer-workstation")["tables"]["table"]:
        by_name.setdefault(row["row"], {})[row["size"]] = row
    cell = interval("accuracy")
    body = [
        [f"`{name}`", *(cell(sizes.get(size, {})) for size in ("four", "twelve"))]
        for name, sizes in by_name.items()
    ]
    return lines(["accuracy, %", "4 layers", "12 layers"], body)


CHANGE = {
    "at L": interval("KNA_at_l"),
    "`KNA` copies, %": plain("KNA_copies"),
    "change of `KNA`": interval("KNA_change", sign=True),
    "change of `Baseline`": plain("Baseline_change", sign=True),
    "effect": interval("effect", sign=True),
}
BRIDGE = {
    "the unchanged preset": "unchanged",
    "linear W_q and W_k in place of γ": "linear W_q and W_k",
    "a third of the pairs turn": "rotating a third of the pairs",
}
ARM = {
    "at L": interval("KNA_at_l"),
    "copies at L, %": plain("KNA_copies"),
    "change to 8 L": interval("KNA_change", sign=True),
    "effect": interval("effect", sign=True),
}
BLEU = {
    "BLEU": plain("bleu"),
    "against `Baseline`": interval("change_bleu", sign=True),
    "loss against `Baseline`, nats": interval("change_loss", 3, sign=True),
}
IMAGES = {
    "accuracy, %": interval("accuracy"),
    "against `Baseline`": interval("change_accuracy", sign=True),
    "largest logit": plain("largest_logit", 0),
}
NORMS = {
    "micro F1, %": interval("micro_f1", 2),
    "macro F1, %": interval("macro_f1", 2),
    "time of a step, ms": interval("step_ms", 0),
}
LOSSES = {"at 8k": plain("loss_8192", 3), "at 16k": plain("loss_16384", 3)}
METHODS = {
    "unmodified": "unmodified",
    **{
        name: f"`{name}`"
        for name in ("SelfExtend-logn+", "YaRN", "YaRN-logn+", "ReRoPE-logn+", "ReRoPE")
    },
    **{name: f"`{name}`" for name in ("DynamicNTK", "NTK", "PI")},
}
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"
TEXTS = {
    f"{SMOLLM2}, {text}.txt: {method}": f"{told}, {method}"
    for text, told in {"wikitext-2": "WikiText-2", "tiny-shakespeare": "tiny Shakespeare"}.items()
    for method in ("unmodified", "YaRN")
}
CLAMPED = {
    "last tokens alone": interval("accuracy_alone"),
    "after 8 L": interval("accuracy_unmodified"),
    "after 8 L, distances clamped": interval("accuracy_clamped"),
}
OUTSIDE = {
    "far pairs outside the trained range, %": interval("far_outside"),
    "attention on them, %": interval("far_attention"),
}
TABLES: dict[str, Callable[[], str]] = {
    "verdicts": verdicts,
    "together": together,
    "copying": copying,
    "base": partial(changes, BASE, (*EIGHT, *CONTROLS)),
    "post-held-out": partial(beside_the_post, "non_repeated"),
    "post-repeated": partial(beside_the_post, "repeated"),
    "post-order": order_of_the_post,
    "newer": partial(changes, BASE, NEWER),
    "gau": partial(changes, GATED_UNIT, (*EIGHT, *CONTROLS, "Baseline-HWFA")),
    "block": partial(table, "factors-workstation", CHANGE, BLOCKS, "architecture"),
    "bridge": partial(table, "bridge", ARM, BRIDGE, "unit"),
    "bridge-inside": inside,
    "mechanism": partial(table, "mechanism-base", CLAMPED, COMPARED, source="clamped"),
    "logn": partial(
        table,
        "keynorm-workstation",
        {"unmodified": interval("change", sign=True)},
        [f"{name}{logn}" for name in ("Baseline", "KNA", "CosA") for logn in ("", "-logn")],
    ),
    "cosines": partial(table, "mechanism-base", OUTSIDE, COMPARED, source="distances"),
    "multi30k": partial(table, "qknorm-multi30k", BLEU, head="score"),
    "translation": partial(table, "qknorm-laptop", BLEU, head="score"),
    "sweep": sweep,
    "images": partial(
        table,
        "qknorm-laptop",
        IMAGES,
        {f"{name} ×16": f"`{name}`" for name in ("Baseline", "QKLayerNorm", "QKRMSNorm", "KNA")},
        "score",
        "vision",
    ),
    "depths": depths,
    "residuals": partial(
        table,
        "realformer-residuals",
        {
            "accuracy, %": interval("accuracy"),
            "against `PostLN`, points": interval("gain", sign=True),
            "learning rate": plain("learning_rate", 3),
        },
        head="row",
    ),
    "norms": partial(table, "rmsnorm-laptop", NORMS, head="norm"),
    "smollm2": partial(table, "extend-smollm2", LOSSES, METHODS, "method"),
    "gallery": partial(
        table,
        "gallery",
        {"at 8k": interval("loss_1", 3), "at 16k": interval("loss_2", 3)},
        TEXTS,
        "text and method",
    ),
}


def remade(page: str) -> str:
    """The page with every marked table regenerated."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", page)


def main() -> None:
    """Write the tables into the pages."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        page = path.read_text("utf-8")
        if (new := remade(page)) != page:
            path.write_text(new, "utf-8")


if __name__ == "__main__":
    main()

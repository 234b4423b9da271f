"""The tables of the workstation's models in the documentation are what was published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normattn.lab.studies.keynorm import METHODS, VARIANTS
from normattn.lab.studies.language import AS_IS

from .test_quick import RESULTS, ROOT, interval, name, points, published, rows

CONTROLS = ("Baseline-SlidingWindow", "Baseline-StreamingLLM", "KNA-NoPE")
WHOLE_CONTROLS = (*CONTROLS, "Baseline-ALiBi", "Baseline-HWFA")
TABLES = {
    "keynorm-workstation-onehead": ("Baseline", "KNA", *CONTROLS[:2]),
    "keynorm-workstation-mha": ("Baseline", "KNA", *CONTROLS[:2]),
    "keynorm-workstation": (*VARIANTS, *WHOLE_CONTROLS),
}
"""The rows of each table, in their order: the second is that of `docs/findings.md`."""
FINDINGS = (ROOT / "docs" / "findings.md").read_text("utf-8")


def line(row: str, known: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    own = known[row]
    methods = [known.get(name(row, method)) for method in METHODS if method != AS_IS]
    low, high = (f"{own['train'][end]:.1f}" for end in ("low", "high"))
    cells = [
        f"`{row}`",
        f"{own['train']['value']:.1f} [{low}, {high}]",
        f"{own['repeated_seen']['value']:.1f}",
        f"{own['non_repeated']['value']:.1f}",
        interval(own["change"]),
        *("–" if method is None else points(method["change"]["value"]) for method in methods),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_texts_have_every_row_of_the_workstation() -> None:
    header = "| trained as | at L | tiled, seen, 8 L | natural, 8 L | change, as it is |"
    (one_head, unit), (four_heads,) = (text.split(header)[1:] for text in (RESULTS, FINDINGS))
    tables = (one_head, four_heads, unit)
    for text, (folder, shown) in zip(tables, TABLES.items(), strict=True):
        known = rows(folder)
        assert text.splitlines()[2:][: len(shown)] == [line(row, known) for row in shown]
    assert "normattn report results/keynorm-workstation --out again" in RESULTS


def claims(folder: str) -> dict[str, dict[str, Any]]:
    """The published claims of a folder, by their sentence."""
    return {claim["claim"]: claim for claim in published(folder)["claims"]}


def verdict(claim: Mapping[str, Any] | None) -> str:
    """A cell of the table of verdicts: bold what contradicts the source, – what was not tested."""
    if claim is None:
        return "–"
    words = "**contradicted**" if claim["verdict"] == "contradicted" else claim["verdict"]
    return f"{words}, {interval(claim['difference'])}"


def test_the_readme_has_a_verdict_for_every_sentence_about_kna() -> None:
    decided = [claims(folder) for folder in TABLES]
    sentences = [sentence for sentence in decided[1] if sentence.startswith("KNA ")]
    assert {sentence for own in decided[:2] for sentence in own} == set(sentences)
    expected = [
        f"| {sentence.replace('KNA', '`KNA`').replace('Baseline', '`Baseline`')} | "
        f"{' | '.join(verdict(own.get(sentence)) for own in decided)} |"
        for sentence in sentences
    ]
    table = RESULTS.split("| the source, or a control | one head of 128 | four heads of 32 |")[1]
    assert table.splitlines()[2:][: len(expected)] == expected

"""Fuzzed names of scores, corpora, lengths, seeds, settings and methods."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from fault_campaign.campaign import Campaign, Count
from fault_campaign.limits import SECONDS

MOST_CHARACTERS = 2500
WORDS = (
    *("KNA", "CosA", "Baseline", "QKRMSNorm", "logn", "logn+", "YaRN", "ReRoPE", "NTK-mixed"),
    *("RoPE", "NoPE", "KERPLE-log", "ALiBi", "RealFormer", "HWFA", "Packed", "as is", "all"),
    *("window", "factor", "base", "c", "eps", "python-source", "hf:", "~root", "~nobody-here"),
    *("~", "/dev/zero", "/etc", ".", "..", "/", "none", "true", "nan", "inf", "-1", "0", "1e999"),
    *("9" * 25, "9" * 5000, "0x" + "f" * 40, "[" * 200, "{" * 50, "x" * 300, "ü" * 200, "\0"),
    *("\ud800", "\udcff", "\x1b[31m", "\u202e", "\n", "💥", "8k", "16K", "1,2", "7,", "1.5"),
)
MARKS = ("", "-", "(", ")", "=", ",", "@", "?", "&", ":", ".", " ", "+", "†", "/", "%00", '"')


def fuzzed(source: random.Random) -> str:
    """A random sequence of words and marks; occasionally a very long one."""
    count = source.choice((1, 2, 3, 4, 6, 9, 500 if source.random() < 0.02 else 5))
    return "".join(source.choice(WORDS) + source.choice(MARKS) for _ in range(count))


def run(campaign: Campaign) -> Iterator[Count]:
    """Each name to a random parser; the text of a parsed score must give the same score."""
    from normattn.cli import parsing
    from normattn.cli.model_options import method_names
    from normattn.errors import InputError
    from normattn.lab.data.corpora import parse_corpus
    from normattn.score import ScoreSpec

    def score(text: str) -> Any:
        spec = ScoreSpec.parse(text)
        assert ScoreSpec.parse(str(spec)) == spec, "it does not survive its own text"
        return spec

    readers: tuple[Callable[[str], Any], ...] = (
        score,
        score,
        ScoreSpec.parse("KNA").with_method,
        parse_corpus,
        lambda text: parsing.token_counts(text, "--lengths"),
        lambda text: method_names(text, "--methods"),
        parsing.seeds,
        lambda text: parsing.names(text, "--variants"),
        lambda text: parsing.integers(text, "--multiples"),
        lambda text: parsing.assignments([text, f"a.b={text}"]),
    )
    read = Count(
        "a score name is parsed, or raises an InputError with a short message, within 20 s"
    )
    source = campaign.random
    for _ in range(10_000 if campaign.full else 1_000):
        text, reader = fuzzed(source), source.choice(readers)
        started, found = time.monotonic(), ""
        try:
            reader(text)
        except InputError as error:
            found = "" if len(str(error)) < MOST_CHARACTERS else "too many words"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:300]
        if time.monotonic() - started > SECONDS:
            found = "too slow"
        read.check(not found, f"{text[:80]!r}: {found}")
    yield read

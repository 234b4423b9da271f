"""Memory limits for a long text, a long line and a long document.

The measure is the rise of a process's resident memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from fault_campaign.campaign import Campaign, Count
from fault_campaign.limits import within_memory
from fault_campaign.processes import race

MB = 1_000_000
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def run(campaign: Campaign) -> Iterator[Count]:
    """Text of 300 MB, lines of 50 MB, documents of 200,000 tokens; in the tests about a tenth."""
    whole = campaign.full
    text, line, tokens = (300 * MB, 50 * MB, 200_000) if whole else (10 * MB, 5 * MB, 20_000)
    yield from _corpora(campaign, text, line)
    yield from _documents(campaign, tokens)


def _corpora(campaign: Campaign, size: int, line: int) -> Iterator[Count]:
    bounds = (400, 300, 1500) if campaign.full else (250, 150, 300)
    text = campaign.folder / "text.txt"
    _write_words(text, size, campaign.random)
    yield _held(f"{size // MB} MB of text are tokenised and cached", bounds[0], _tokenising(text))
    text.unlink()
    unbroken = "".join(campaign.random.choices(LETTERS, k=line))
    text.write_text(unbroken)
    promise = f"a line of {line // MB} MB without a space is tokenised and cached"
    yield _held(promise, bounds[1], _tokenising(text))
    text.unlink()
    lines = campaign.folder / "text.jsonl"
    lines.write_text(f'{{"text": "{unbroken}"}}\n{{"text": "one more"}}\n')
    del unbroken
    promise = f"one document of {line // MB} MB in a line of JSON is tokenised and cached"
    yield _held(promise, bounds[2], _tokenising(lines))
    lines.unlink()


def _documents(campaign: Campaign, tokens: int) -> Iterator[Count]:
    """Scores that fold into q and k, with a distance bias, and with two regimes.

    The logits of 200,000 tokens would take 6.4 GB (4 bytes × 8,000 words), of 20,000 tokens 640 MB.
    The memory used, up to 783 MB here, holds keys, values, a tile's scores, and what the allocator
    keeps of earlier tiles.
    """
    for score in ("KNA-logn", "Baseline-ALiBi", "KNA-ReRoPE(window=32)"):
        promise = f"a document of {tokens:,} tokens is scored by {score}"
        yield _held(promise, 1000 if campaign.full else 300, _scoring(score, tokens))


def _held(promise: str, megabytes: int, work: Callable[[], int]) -> Count:
    """One trial: the work succeeds within this memory."""
    count = Count(f"{promise} within {megabytes:,} MB of memory")
    (end,) = race([within_memory(work, megabytes * MB)], limit_seconds=3600)
    count.check(end.code == 0, end.shown)
    if end.said:
        print(f"{promise}: {end.said.strip()[-200:]}")
    return count


def _tokenising(corpus: Path) -> Callable[[], int]:
    from normattn.lab.data.tokens import DataConfig, prepare_tokens

    def work() -> int:
        config = DataConfig(corpus=str(corpus), vocab_size=2000)
        data = prepare_tokens(
            config, corpus.parent / f"cache-{corpus.stem}-{corpus.stat().st_size}"
        )
        return int(data.train.total + data.validation.total + data.test.total == 0)

    return work


def _scoring(score: str, tokens: int) -> Callable[[], int]:
    import torch

    from normattn.lab.evaluation.scorer import ModelScorer
    from normattn.models import CausalLM, CausalLMConfig
    from normattn.score import ScoreSpec

    def work() -> int:
        torch.manual_seed(0)
        spec = ScoreSpec.parse(score)
        model = CausalLM(
            CausalLMConfig(vocab_size=8000, dim=32, layers=1, heads=1, train_length=64, score=spec)
        )
        ids = torch.randint(8000, (1, tokens + 1))
        scores = ModelScorer(model)(ids)
        return int(scores.loss.shape != (1, tokens) or not scores.loss.isfinite().all())

    return work


def _write_words(path: Path, size: int, source: random.Random) -> None:
    """Write lines of made-up words, a megabyte at a time; a few are frequent, most are rare."""
    words = ["".join(source.choices(LETTERS, k=source.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    with path.open("w") as file:
        while file.tell() < size:
            drawn = source.choices(words, weights, k=100_000)
            file.write("\n".join(" ".join(drawn[i : i + 12]) for i in range(0, 100_000, 12)))

"""A text read by two processes, half of its tokens on each, is read as by one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

from normattn.cli.evaluation_run import evaluate_run
from normattn.cli.options.evaluate import EvaluateOptions
from normattn.errors import InputError
from normattn.lab.evaluation import from_causal_lm
from normattn.lab.evaluation.scorers import Precision
from normattn.lab.evaluation.shards import following, in_shards, leading
from normattn.lab.stats import frame
from normattn.lab.training import train_causal
from normattn.models import CausalLM, CausalLMConfig
from training.group import together
from training.settings import SMALL, small

LENGTH, VOCABULARY, SEPARATOR = 16, 50, 3
SCORES = (
    *("Baseline", "KNA-logn", "CosA", "QKRMSNorm", "QKRMSNorm-RotateFirst"),
    *("Baseline-SqrtLogN", "Baseline-SSMax", "Baseline-Temperature", "KNA-NoPE"),
    *("Baseline-PartialRoPE", "Baseline-PoPE", "Baseline-PRoPE", "Baseline-XPos"),
    *("Baseline-ALiBi", "Baseline-CoPE", "Baseline-FIRE", "Baseline-FoX", "Baseline-KERPLELog"),
    *("Baseline-SoftCap", "Baseline-Sink", "Baseline-Sigmoid", "Baseline-StickBreaking"),
    *(
        "Baseline-Gate",
        "Baseline-Differential",
        "Baseline-Chunked(size=9)",
        "Baseline-SlidingWindow(window=5)",
    ),
    *(f"Baseline-Packed(separator={SEPARATOR})", "Baseline-HWFA", "Baseline-NoPEEvery(every=2)"),
)
METHODS = (
    *("logn+", "ABF", "DynamicNTK", "NTK", "PI", "YaRN", "DualChunk", "LeakyReRoPE", "ReRoPE"),
    *("SelfExtend", "StreamingLLM"),
)
READ = [*((score, "") for score in SCORES), *(("Baseline", method) for method in METHODS)]
READ += [("KNA", "ReRoPE-logn+"), ("QKRMSNorm-Sink", "YaRN")]


def made(score: str) -> CausalLM:
    """A model with weights and learned gains of some size."""
    torch.manual_seed(0)
    sizes = {"dim": 16, "layers": 2, "heads": 2, "vocab_size": VOCABULARY}
    settings: dict[str, Any] = {**sizes, "train_length": LENGTH, "score": score}
    model = CausalLM(CausalLMConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def texts(tokens: int) -> Tensor:
    """Two rows, with separators among them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (2, tokens + 1), generator=generator)


def differences(rank: int, precision: Precision) -> dict[str, float]:
    """By score and method, how far the losses read in shards are from those read in one process."""
    found = {}
    for score, method in READ:
        model, ids = made(score), texts(43)
        spec = model.config.score.with_method(method).resolve(train_length=LENGTH, factor=4.0)
        with model.using(spec) if method else nullcontext():
            alone = from_causal_lm(model, precision)(ids)
            shared = in_shards(model, precision)(ids)
        assert shared.correct.dtype == torch.bool
        found[f"{score} {method}"] = float((alone.loss - shared.loss).abs().max())
    return found


def test_two_processes_read_as_one_does() -> None:
    every = together(2, differences, "fp32")
    for found in every:
        assert len(found) == len(READ)
        assert max(found.values()) < 2e-5, {k: v for k, v in found.items() if v >= 2e-5}


def led(rank: int) -> Any:
    """What the first process gets, with methods that the other is only told of; four processes."""
    model, ids = made("Baseline"), texts(30)
    if rank:
        following(model)
        return None
    found = []
    with leading() as scored_by:
        for method in ("as is", "ReRoPE"):
            with model.using(method):
                apart = from_causal_lm(model)(ids).loss - scored_by(model, "fp32")(ids).loss
                found.append(float(apart.abs().max()))
    return found


def test_the_others_follow_the_first() -> None:
    first, *others = together(4, led)
    assert max(first) < 2e-5
    assert others == [None] * 3


def refused(rank: int) -> list[str]:
    """What is said of scores and rows that cannot be divided."""
    said = []
    for score, tokens in (("Baseline-RealFormer", 43), ("Baseline-Selective", 43), ("KNA", 3)):
        model = made(score)
        if rank:
            following(model)
            continue
        with leading() as scored_by, pytest.raises(InputError) as error:
            scored_by(model, "fp32")(texts(tokens))
        said.append(str(error.value))
    return said


def test_what_cannot_be_divided_is_refused() -> None:
    (carried, selected, short), _ = together(2, refused)
    assert "carries each layer's scores to the next: every process would hold" in carried
    assert "subtracts what all rows before have selected" in selected
    assert short.startswith("2 processes share a row of 3 tokens, but each needs at least 2")


def evaluated(rank: int, run: Path) -> None:
    """The command, in every process of the group."""
    asked = EvaluateOptions(
        run=run,
        methods=("as is", "ReRoPE"),
        protocols=("last-segment", "by-position"),
        multiples=(1, 4),
        max_windows=2,
        max_tokens=4096,
    )
    evaluate_run(asked)


def test_the_command_measures_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        train_causal(small(steps=4, model={**SMALL["model"]}), run, show_progress=False)
    evaluated(0, runs[0])
    assert together(2, evaluated, runs[1]) == [None, None]
    one, two = (
        pl.concat([frame.read(each) for each in sorted((run / "evaluations").glob("*.parquet"))])
        for run in runs
    )
    assert one.height == two.height > 0
    keys = [name for name in one.columns if name not in ("sum", "weights")]
    both = one.join(two, on=keys, how="inner", nulls_equal=True)
    assert both.height == one.height
    losses = both.filter(pl.col("statistic") == "loss")
    assert losses["sum"].to_list() == pytest.approx(losses["sum_right"].to_list(), rel=1e-5)

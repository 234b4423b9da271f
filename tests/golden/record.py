"""Make the golden record: what must stay equal while the source is rewritten.

    python tests/golden/record.py                    everything, about ten minutes of one core
    python tests/golden/record.py scores families    these parts alone
    python tests/golden/record.py scores KNA-Sink    with one score more

Four parts, one file each in this folder:

- `scores.json`: logits of a two-layer model in float64, for every score of the vocabulary;
- `families.json`: logits of a tiny model of transformers under YaRN and ReRoPE-logn+;
- `losses.json`: digest of the tokens and the first 100 losses, for the presets of each study;
- `studies.json`: the numbers of each study's smoke preset.

The record speaks of public names, the command line and files of results, and of nothing else, so
that it survives a rewriting.
"""

from __future__ import annotations

import csv
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars
import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "tests")]

import apart  # noqa: E402  # it lies beside this folder
from studies.conftest import COMMAND  # noqa: E402

VOCABULARY, LENGTH, TRAIN_LENGTH, SHOWN = 11, 20, 8, 3

STACKS: dict[str, dict[str, Any]] = {
    "placement AttnRes": {"placement": "AttnRes"},
    "placement AttnRes, residual_block 3": {"placement": "AttnRes", "residual_block": 3},
    "placement nGPT": {"placement": "nGPT"},
    "norm dyt": {"norm": "dyt"},
    "norm derf": {"norm": "derf"},
}
"""Norms and residual connections around Baseline: settings of the model."""


def recorded(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text("utf-8"))


def scored_model(score: str) -> Any:
    """A causal model of two layers in float64 whose weights depend on their names alone."""
    from normattn import CausalLM, CausalLMConfig

    config = CausalLMConfig(
        vocab_size=VOCABULARY,
        dim=16,
        layers=2,
        heads=2,
        kv_heads=1 if "DifferentialV2" in score else None,
        train_length=TRAIN_LENGTH,
        **STACKS.get(score, {"score": score}),
    )
    return with_weights(CausalLM(config))


def with_weights(model: nn.Module) -> nn.Module:
    """The model in float64 and evaluation, each parameter made of its own name alone."""
    model = model.double().eval()
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            moved = numbers_of(name, weight.numel()).view_as(weight)
            weight.copy_(0.4 * moved if weight.dim() >= 2 else 0.5 + 0.1 * moved.abs())
    return model


def numbers_of(name: str, count: int) -> Tensor:
    """The same on every machine and version."""
    noise = random.Random(name)
    return torch.tensor([noise.uniform(-1, 1) for _ in range(count)], dtype=torch.float64)


def token_ids() -> Tensor:
    """One row of tokens, longer than the training length."""
    noise = random.Random("tokens")
    return torch.tensor([[noise.randrange(VOCABULARY) for _ in range(LENGTH)]])


@torch.no_grad()
def full_logits(model: Any) -> Tensor:
    """(LENGTH, SHOWN) logits of one forward."""
    logits: Tensor = model(token_ids())[0, :, :SHOWN]
    return logits


@torch.no_grad()
def decoded_logits(model: Any) -> Tensor:
    """The same from a prefill of five tokens, single tokens and steps of several."""
    ids, rows = token_ids(), []
    cache = model.new_cache()
    for start, end in pairwise((0, 5, 7, 8, 9, 15, 16, 17, LENGTH)):
        rows.append(model(ids[:, start:end], cache=cache)[0, :, :SHOWN])
    return torch.cat(rows)


@torch.no_grad()
def encoder_logits(score: str) -> Tensor:
    """(LENGTH, SHOWN) outputs of an attention layer that is not causal, padding at the end."""
    from normattn import Attention

    layer = with_weights(Attention(8, 2, score=f"{score}@{TRAIN_LENGTH}"))
    x = numbers_of("features", 2 * LENGTH * 8).view(2, LENGTH, 8)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, -6:] = True
    out: Tensor = layer(x, causal=False, key_padding=padding, query_padding=padding)
    return out[0, :-6, :SHOWN]


def record_scores(*more: str) -> dict[str, Any]:
    kept = recorded("scores")
    causal = {n: rounded(full_logits(scored_model(n)), 12) for n in (*kept["causal"], *more)}
    encoder = {name: rounded(encoder_logits(name), 12) for name in kept["encoder"]}
    return {"causal": causal, "encoder": encoder}


def rounded(values: Tensor, digits: int) -> list[list[float]]:
    """The rows as numbers of so many digits after the point."""
    return [[round(value, digits) for value in row] for row in values.tolist()]


FAMILY_METHODS = {"YaRN": {"factor": 4}, "ReRoPE-logn+": {"window": 4}}


@lru_cache(1)
def family_model(family: str) -> Any:
    """The family's tiny model, for all its methods: an extension is undone to the last bit."""
    from hf.tiny import build

    return build(family)


def family_logits(family: str, method: str) -> list[list[float]] | None:
    """(8, SHOWN) last logits of the family's tiny model under a method; None where refused."""
    import normattn
    from hf.families import logits
    from hf.matrix import tokens
    from hf.tiny import LENGTH as trained

    model = family_model(family)
    length: dict[str, Any] = {"train_length": trained}
    try:
        with normattn.extend(model, method, **length, **FAMILY_METHODS[method]):
            return rounded(logits(model, tokens())[0, -8:, :SHOWN], 6)
    except normattn.InputError:
        return None


def record_families() -> dict[str, Any]:
    from hf.tiny import rotary_families

    return {f: {m: family_logits(f, m) for m in FAMILY_METHODS} for f in rotary_families()}


TEXT = ("training.batch_size=4", "training.data.vocab_size=300")
SMALL_MODEL = ("training.model.layers=2", "training.model.dim=64", "training.model.heads=2")
SMALL_UNIT = (*SMALL_MODEL[:2], "training.model.train_length=64")
ONE_VISION_STEP = ("vision.training.steps=1", "vision.training.schedule.warmup_steps=1")
# BERT-Large, which has a batch in four parts and the most layers; the other sizes are left out.
LARGE_ENCODER = (
    *("sizes.small.rows=[]", "sizes.base.rows=[]", "training.model.train_length=64"),
    *(f"sizes.large.{name}" for name in SMALL_MODEL),
)
PAIRS = (
    *("training.batch_tokens=2048", "training.data.vocab_size=300", "rates.training.steps=1"),
    *("rates.training.schedule.warmup_steps=1", *ONE_VISION_STEP),
)
RELATIONS = ("training.batch_size=4", "training.data.vocab_size=500", "timing.rounds=2")

TRAININGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "keynorm/quick": ("KNA-logn", TEXT),
    "keynorm/laptop": ("CosA", TEXT),
    "keynorm/workstation": ("KNA", TEXT),
    "keynorm/workstation-mha": ("KNA", TEXT),
    "keynorm/gpu-100m": ("KNA", (*TEXT, *SMALL_UNIT)),
    "realformer/laptop": ("RealFormer", TEXT),
    "realformer/workstation": ("RealFormer", TEXT),
    "realformer/gpu-base": ("RealFormer", (*TEXT, *LARGE_ENCODER)),
    "qknorm/laptop": ("QKRMSNorm", PAIRS),
    "qknorm/multi30k": ("QKRMSNorm", PAIRS[:2]),
    "qknorm/gpu": ("QKRMSNorm", (*PAIRS, *SMALL_MODEL)),
    "rmsnorm/laptop": ("RMSNorm", RELATIONS),
    "rmsnorm/gpu": ("RMSNorm", (*RELATIONS, *SMALL_MODEL, "training.model.hidden=128")),
}
"""A variant of each preset of each study, and what makes it small enough for a processor."""


def corpora(folder: Path) -> Path:
    """Text, sentence pairs and relations made of a counter: the same bytes in any version."""
    noise = random.Random("corpus")
    words = ["".join(noise.choices("etaoinshrdlu", k=noise.randint(2, 8))) for _ in range(400)]
    for number in range(60):
        lines = [" ".join(noise.choices(words, k=12)) for _ in range(60)]
        write(folder / "corpus" / f"text{number:02}.txt", lines)
    # Of a sentence the translation is each word backwards.
    noise = random.Random("pairs")
    sentences = [noise.choices(words, k=noise.randint(3, 12)) for _ in range(1200)]
    pairs = [{"en": " ".join(s), "de": " ".join(word[::-1] for word in s)} for s in sentences]
    write(folder / "pairs.jsonl", map(json.dumps, pairs))
    # In the form of NYT24; a relation is the first letter of an early word.
    noise = random.Random("relations")
    for split, documents in {"train": 400, "dev": 40, "test": 40}.items():
        rows = []
        for _ in range(documents):
            text = noise.choices(words, k=40)
            relations = sorted({word[0] for word in text[:3]})
            triples = [[text[0], relation, text[1]] for relation in relations]
            rows.append(json.dumps({"text": " ".join(text), "triple_list": triples}))
        write(folder / "relations" / f"{split}.jsonl", rows)
    return folder


def write(file: Path, lines: Iterable[str]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines), encoding="utf-8")


CORPUS = {"qknorm": "pairs.jsonl", "rmsnorm": "relations"}  # The other studies read text.


def training_command(name: str, folder: Path) -> list[object]:
    """The command that trains a preset for 100 steps in float32, into `out_of(name, folder)`."""
    (study, preset), (variant, settings) = name.split("/"), TRAININGS[name]
    steps = ("steps=100", "log_every=1", "precision=fp32", "schedule.warmup_steps=5")
    settings = (*settings, *(f"training.{each}" for each in steps))
    return [
        *("reproduce", study, "--preset", preset, "--variants", variant, "--seeds", "1"),
        *("--jobs", "1", "--out", out_of(name, folder)),
        *("--corpus", folder / CORPUS.get(study, "corpus")),
        *(word for each in settings for word in ("--set", each)),
    ]


def out_of(name: str, folder: Path) -> Path:
    return folder / name.replace("/", "-")


def first_losses(name: str, folder: Path) -> dict[str, Any]:
    """The digest of the tokens and the losses of 100 steps of a preset, in float32."""
    run(*training_command(name, folder))
    out = out_of(name, folder)
    measured = polars.read_parquet(out / "measurements.parquet")
    tokens = sorted(set(measured["data"].drop_nulls()) - {""})
    return {"losses": losses_in(out, 100), "tokens": tokens}


def few_losses(name: str, folder: Path, steps: int) -> list[float]:
    """The first losses of the same training, which is killed once it has them."""
    program = begin(*training_command(name, folder))
    try:
        while not program.ended and len(losses_in(out_of(name, folder), steps)) < steps:
            time.sleep(0.1)
        losses = losses_in(out_of(name, folder), steps)
        if len(losses) < steps:
            raise RuntimeError(f"{name} ended after {len(losses)} steps: {program.complained()}")
        return losses
    finally:
        program.clear()


def losses_in(out: Path, steps: int) -> list[float]:
    """The first `steps` losses of the training that has so many, or of the longest."""
    logs = [file.read_text("utf-8").split("\n")[:-1] for file in out.rglob("metrics.jsonl")]
    longest = max(logs, key=len, default=[])
    return [round(json.loads(line)["loss"], 6) for line in longest[:steps]]


def begin(*words: object) -> apart.Program:
    """A command of the command line, begun in a process of its own."""
    return apart.Program(COMMAND.format(cells_here=True), *words)


def run(*words: object) -> None:
    done = begin(*words).end()
    if done.code:
        raise RuntimeError(f"{words} ended with {done.code}: {done.err[-2000:]}")


def record_losses() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        corpora(Path(folder))
        return {name: first_losses(name, Path(folder)) for name in TRAININGS}


CHANGES_RECORDED = (
    "preset,base-130,length-2x,length-4x,no-tiling,steps-third,steps-half,steps-4x,one-head,"
    "heads-2x,deepnorm,tiger,gau,layers-6,layers-12"
)
STUDIES: dict[str, tuple[str, ...]] = {
    "keynorm": ("--variants", "Baseline,KNA,CosA-logn"),
    "window": (),
    "reading": (),
    "continue": (),
    "retrofit": (),
    "mechanism": (),
    "factors": ("--variants", CHANGES_RECORDED),
    "questions": (),
    "realformer": (),
    "qknorm": (),
    "rmsnorm": (),
}


def study_numbers(study: str, folder: Path, *more: str) -> dict[str, dict[str, dict[str, float]]]:
    """The numbers of the tables of a study's smoke preset: table, row, column."""
    out = folder / study
    options = ("--preset", "smoke", "--seeds", "1", "--out", out)
    run("reproduce", study, *options, *(more or STUDIES[study]))
    return {path.stem: numbers(path) for path in sorted(out.glob("*.csv"))}


def numbers(path: Path) -> dict[str, dict[str, float]]:
    """A table's numbers by row and column, without the time of a step, which is the machine's."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        "|".join(value for value in row.values() if not is_number(value)): {
            name: float(value)
            for name, value in row.items()
            if is_number(value) and not name.startswith("step_ms")
        }
        for row in rows
    }


def is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def record_studies() -> dict[str, Any]:
    """Every study's; Python's version beside them, whose library is the text."""
    with tempfile.TemporaryDirectory() as folder:
        tables = {study: study_numbers(study, Path(folder)) for study in STUDIES}
    return {"python": sys.version.split()[0], "tables": tables}


PARTS: dict[str, Callable[..., Any]] = {
    "scores": record_scores,
    "families": record_families,
    "losses": record_losses,
    "studies": record_studies,
}


def main(asked: list[str]) -> None:
    torch.set_num_threads(1)
    scores = [word for word in asked if word not in PARTS]
    for name in [word for word in asked if word in PARTS] or PARTS:
        made = PARTS[name](*scores if name == "scores" else ())
        text = json.dumps(made, separators=(",", ":"))
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

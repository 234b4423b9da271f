"""Every kind of training: it learns, resumes to the byte, costs what it says, and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from data.helpers import multi_layout, write_relations
from normattn.errors import InputError
from normattn.lab.data.batches import Masking, TrainingBatches
from normattn.lab.data.images import ImageBatches
from normattn.lab.evaluation.classification import predict, tune_threshold
from normattn.lab.runs import read_metrics
from normattn.lab.training import StepReport, TrainingConfig
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.classification import ClassificationConfig, VisionTrainingConfig
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.lab.training.tasks.translation import TranslationConfig
from normattn.models.flops import flops_per_image
from normattn.models.pretrained import load_as

from .group import go, together
from .settings import NGPT, SMALL, losses, run, stop

Settings = Callable[..., Any]
GAU = {"block": "gau", "heads": 1, "score": "Baseline", "placement": "DeepNorm"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The settings of a small training of a kind, with changes."""
    place = tmp_path_factory.mktemp("corpora")
    write_relations(place / "relations", count=24)
    pairs = str(multi_layout(place / "pairs", train=61))
    base = {"steps": 12, "device": "cpu", "schedule": {"warmup_steps": 2}}
    sizes = {"dim": 16, "layers": 1, "heads": 2}
    encoder = {**SMALL["model"], "score": "Baseline", "placement": "PostLN", "exits": True}
    patches = {**sizes, "layers": 2, "patch": 4, "score": "KNA-NoPE"}
    labels = {**sizes, "labels": 3, "dropout": 0.1}
    digits = {"source": "digits", "max_images": 300}
    relations = {"corpus": str(place / "relations"), "vocab_size": 120, "max_tokens": 16}
    translated = {"corpus": pairs, "vocab_size": 300}
    whole: dict[str, tuple[Any, dict[str, Any]]] = {
        "causal": (TrainingConfig, SMALL),
        "masked": (MaskedConfig, {**SMALL, "model": encoder}),
        "vision": (VisionTrainingConfig, {"batch_size": 16, "model": patches, "data": digits}),
        "classification": (
            ClassificationConfig,
            {"batch_size": 4, "model": labels, "data": relations},
        ),
        "translation": (
            TranslationConfig,
            {"batch_tokens": 1200, "model": sizes, "data": translated},
        ),
    }

    def settings(kind: str, **changes: Any) -> Any:
        config, fields = whole[kind]
        model = {**fields["model"], **changes.pop("model", {})}
        return config.parse({**base, **fields, "model": model, **changes})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMATTN_CACHE", str(place / "cache"))
        yield settings


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("causal", {"model": {"dropout": 0.1}, "accumulate": 2}),
        ("causal", {"optimiser": {"name": "tiger", "lr": 1e-2}, "activation_checkpointing": True}),
        ("causal", {"optimiser": {"name": "muon", "lr": 1e-2}}),
        ("causal", {"qk_clip": 0.02, "accumulate": 2, "model": {"score": "Baseline"}}),
        ("causal", {"model": GAU, "precision": "bf16"}),
        ("causal", {"model": NGPT, "unit_weights": True}),
        ("masked", {"model": {"dropout": 0.1}, "accumulate": 2}),
        ("vision", {"model": {"dropout": 0.1}, "accumulate": 2, "shift": 1}),
        # Running statistics of a BatchNorm among what is kept.
        ("vision", {"model": {"score": "QKBatchNorm-NoPE", "pool": "mean"}}),
        ("classification", {}),
        ("translation", {}),
    ],
)
def test_interrupted_and_resumed_is_the_same_run(
    tmp_path: Path, made: Settings, kind: str, changes: dict[str, Any]
) -> None:
    config = made(kind, steps=7, **changes)
    whole = run(config, tmp_path / "whole")
    for _ in range(2):
        stop(config, tmp_path / "cut", 3)
    cut = run(config, tmp_path / "cut")
    assert (cut.loss, cut.metrics) == (whole.loss, whole.metrics)
    for name in ("metrics.jsonl", "model/model.safetensors", "model/config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def first_loss(kind: str, config: Any) -> float:
    """The loss before any step, from the batch that the seed says, whole logits and torch."""
    torch.manual_seed(derive_seed(config.seed, "initialisation"))
    model, seed = config.model_class(config.model), derive_seed(config.seed, "batches")
    data, rows = config.prepare(), config.batch_size
    if kind == "vision":
        images, labels = ImageBatches(data.train, rows, seed).batch(1)
        logits, targets = model(torch.from_numpy(images)), torch.from_numpy(labels)
    elif kind == "causal":
        windows = TrainingBatches(data.train, 16, rows, seed, config.data.tiling)
        ids = torch.from_numpy(windows.batch(1))
        logits, targets = model(ids[:, :-1]), ids[:, 1:]
    else:
        tokens = TrainingBatches(data.train, 15, rows, seed, config.data.tiling).batch(1)
        masked = Masking().rows(tokens, config.model.vocab_size, seed, 1)
        places, targets = torch.from_numpy(masked.positions), torch.from_numpy(masked.targets)
        logits = torch.take_along_dim(model(torch.from_numpy(masked.ids)), places[..., None], 1)
    return float(F.cross_entropy(logits.flatten(0, -2), targets.flatten()).detach())


@pytest.mark.parametrize(
    ("kind", "metrics", "changes", "tokens"),
    [
        ("causal", {"accuracy"}, {"steps": 60}, 60 * 8 * 16),
        ("masked", {"accuracy", "accuracy_exit_1"}, {"steps": 80, "batch_size": 16}, 80 * 16 * 16),
        ("vision", {"accuracy"}, {"steps": 60}, 60 * 16 * 5),
    ],
)
def test_a_run_learns_and_leaves_its_model(
    tmp_path: Path,
    made: Settings,
    kind: str,
    metrics: set[str],
    changes: dict[str, Any],
    tokens: int,
) -> None:
    reports: list[StepReport] = []
    config = made(kind, optimiser={"lr": 1e-2}, **changes)
    result = run(config, tmp_path, on_step=reports.append)
    assert [report.step for report in reports] == list(range(1, config.steps + 1))
    assert reports[0].loss == pytest.approx(first_loss(kind, config), rel=1e-5)
    assert result.loss < reports[0].loss - 0.2
    assert (result.tokens, set(result.metrics)) == (tokens, metrics)
    assert reports[-1].metrics == result.metrics
    assert load_as(config.model_class, tmp_path / "model").config == config.model
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == config.steps


def test_a_classifier_learns_what_the_words_say(tmp_path: Path, made: Settings) -> None:
    settings = made("classification", steps=40, optimiser={"lr": 1e-2})
    assert (settings.model.vocab_size, settings.model.train_length) == (120, 16)
    assert run(settings, tmp_path).loss < 0.2
    model, data = load_as(settings.model_class, tmp_path / "model"), settings.prepare()
    assert tune_threshold(predict(model, data.split("validation"), data.pad_id))[1] == 1.0
    assert model.config == settings.model
    assert '"unseen"' in (tmp_path / "labels.json").read_text()


def test_a_translator_learns(tmp_path: Path, made: Settings) -> None:
    config = made("translation", steps=25, optimiser={"lr": 1e-2})
    run(config, tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines[-1]["nll"] < 0.8 * lines[0]["nll"]
    assert lines[-1]["accuracy"] > lines[0]["accuracy"]
    assert load_as(config.model_class, tmp_path / "model").config == config.model
    assert (tmp_path / "tokeniser.json").is_file()


def test_sharded_processes_translate_like_one(tmp_path: Path, made: Settings) -> None:
    """A decoder's keys of the source are computed outside its blocks' forward passes."""
    config = made("translation", steps=3, parallel="fsdp")
    one, two = tmp_path / "1", tmp_path / "2"
    run(config, one)
    together(2, go, two, config)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


def test_a_translation_s_loss_is_the_mean_over_its_batch_and_its_shards(made: Settings) -> None:
    config = made("translation", label_smoothing=0.2)
    data = config.prepare()
    whole, sharded = (config.task(data, torch.device("cpu"), shards) for shards in (1, 8))
    whole.model.double()
    sharded.model.double().load_state_dict(whole.model.state_dict())
    batch = whole.batch(1, 0, 1)
    loss, metrics = whole.loss(batch)
    logs = torch.log_softmax(whole.model(batch.source, batch.target[:, :-1]), -1)
    wanted = batch.target[:, 1:]
    real = wanted != 0
    assert int(real.sum()) == int(batch.targets)
    nll = -logs.gather(-1, wanted[..., None]).squeeze(-1)[real].mean()
    torch.testing.assert_close(loss, 0.8 * nll - 0.2 * logs.mean(-1)[real].mean())
    hits = ((logs.argmax(-1) == wanted) & real).sum() / real.sum()
    expected = {"nll": nll.detach().float(), "accuracy": hits}
    torch.testing.assert_close(metrics, expected, check_dtype=False)
    parts = [sharded.loss(sharded.batch(1, shard, 8)) for shard in range(8)]
    added = sum(part for part, _ in parts) / 8
    torch.testing.assert_close(added, loss, rtol=1e-9, atol=0)
    for name, value in metrics.items():
        shares = torch.stack([means[name].double() for _, means in parts])
        torch.testing.assert_close(shares.mean(), value, rtol=1e-6, atol=0, check_dtype=False)
    embeddings = [task.model.source_embedding.weight for task in (sharded, whole)]
    ours, theirs = map(torch.autograd.grad, (added, loss), embeddings)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)


def test_vocabularies_follow_the_data(made: Settings) -> None:
    config = made("translation")
    model = config.model
    assert (model.source_vocab, model.target_vocab, model.shared_vocabulary) == (300, 300, True)
    assert model.train_length == config.data.max_length


def test_the_cost_of_each_kind(made: Settings) -> None:
    # 2 layers of 16 × (3 · 16 + 16) and SwiGLU's 3 · 16 · hidden; 2 of 16 tokens see the head.
    config = made("masked", model={"exits": False, "hidden": 40}, steps=4, batch_size=4)
    per_row = 16 * (2 * 2 * (16 * 64 + 3 * 16 * 40) + 2 * 2 * 2 * 16 * 16) + 2 * 2 * 32 * 16
    cost = config.cost()
    assert (cost.trained, cost.flops) == (4 * 4 * 16, 4 * 4 * 3 * per_row)
    assert made("classification", data={"corpus": "nowhere"}).cost().trained > 0
    for config in (made("vision"), made("translation")):
        cost, model = config.cost(), config.model_class(config.model)
        assert cost.parameters == sum(each.numel() for each in model.parameters())
    config = made("vision")
    cost = config.cost()
    assert cost.trained == 12 * 16 * 5
    assert cost.flops == 12 * 16 * 3 * flops_per_image(config.model).forward


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("masked", {"masking": {"masked": 0.9, "random": 0.2}}, "more than 1 together"),
        ("masked", {"model": {"vocab_size": 31}}, "leave it out"),
        ("vision", {"model": {"patch": 3}}, "cannot be cut into patches of 3"),
        ("vision", {"data": {"sauce": 1}}, "data.sauce; did you mean data.source"),
        ("vision", {"data": {"source": "nothing"}}, "'nothing': there are mnist5k, digits"),
        ("classification", {"model": {"vocab_size": 99}}, r"model\.vocab_size is 99 .* 120"),
        ("translation", {"model": {"source_vocab": 5}}, "source_vocab"),
        ("translation", {"batch_size": 3}, "batch_size"),
        ("translation", {"label_smoothing": 1.0}, "label_smoothing"),
        ("causal", {"data": {"corpus": "absent.txt", "vocab_size": 300}}, r"absent\.txt"),
        ("vision", {"model": {"height": 4}}, "model.height is 4 but the data makes it 8"),
        ("vision", {"model": {"classes": 7}}, "model.classes is 7 but .* 10"),
        ("vision", {"shift": 8}, "a shift of 8"),
        ("causal", {"inspect_every": 5}, "inspect_every=5 needs a probe"),
        ("classification", {"model": {"labels": 4}}, "model.labels is 4, but .* has 3 labels"),
        ("classification", {"batch_size": 64}, "24 documents, fewer than one batch of 64"),
        ("translation", {"batch_tokens": 16}, "more than batch_tokens"),
    ],
)
def test_trainings_that_cannot_be_leave_nothing_behind(
    tmp_path: Path, made: Settings, kind: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        run(made(kind, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""Every kind of training: it learns, resumes to the byte, costs what it says, and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from data.helpers import multi_layout, write_relations
from normattn.errors import InputError, Interrupted
from normattn.lab.data.batches import Masking, TrainingBatches
from normattn.lab.data.images import ImageBatches, prepare_images
from normattn.lab.data.pairs import prepare_pairs
from normattn.lab.data.relations import prepare_relations
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.evaluation.classification import predict, tune_threshold
from normattn.lab.runs import read_metrics
from normattn.lab.training import StepReport
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.base import train_model
from normattn.lab.training.tasks.classification import ClassificationConfig, VisionTrainingConfig
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.lab.training.tasks.translation import TranslationConfig
from normattn.models import CausalLM
from normattn.models.classifier import Classifier
from normattn.models.flops import flops_per_image
from normattn.models.masked_lm import MaskedLM
from normattn.models.pretrained import load_as
from normattn.models.translator import Translator
from normattn.models.vision_transformer import VisionTransformer

from .group import go_with, together
from .settings import SMALL, small
from .test_weights import NGPT

Settings = Callable[..., Any]
GAU = {"dim": 16, "layers": 2, "train_length": 16, "block": "gau", "placement": "DeepNorm"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Settings]]:
    """The settings of a small training of each kind, with changes."""
    place = tmp_path_factory.mktemp("corpora")
    write_relations(place / "relations", count=24)
    pairs = str(multi_layout(place / "pairs", train=61))
    base = {"steps": 12, "device": "cpu", "schedule": {"warmup_steps": 2}}
    sizes = {"dim": 16, "layers": 1, "heads": 2}
    encoder = {**SMALL["model"], "score": "Baseline", "placement": "PostLN", "exits": True}
    relations = {"corpus": str(place / "relations"), "vocab_size": 120, "max_tokens": 16}
    whole: dict[str, tuple[Any, dict[str, Any]]] = {
        "masked": (MaskedConfig, {**SMALL, "model": encoder}),
        "vision": (
            VisionTrainingConfig,
            {
                **base,
                "batch_size": 16,
                "model": {**sizes, "layers": 2, "patch": 4, "score": "KNA-NoPE"},
                "data": {"source": "digits", "max_images": 300},
            },
        ),
        "classification": (
            ClassificationConfig,
            {
                **base,
                "batch_size": 4,
                "model": {**sizes, "labels": 3, "dropout": 0.1},
                "data": relations,
            },
        ),
        "translation": (
            TranslationConfig,
            {
                **base,
                "batch_tokens": 1200,
                "model": sizes,
                "data": {"corpus": pairs, "vocab_size": 300},
            },
        ),
    }

    def settings(kind: str) -> Settings:
        config, fields = whole[kind]

        def changed(**changes: Any) -> Any:
            model = {**fields["model"], **changes.pop("model", {})}
            return config.parse({**fields, "model": model, **changes})

        return changed

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMATTN_CACHE", str(place / "cache"))
        yield {"causal": small, **{kind: settings(kind) for kind in whole}}


def train(config: Any, out: Path, **choices: Any) -> Any:
    return train_model(config, out, show_progress=False, **choices)


def test_an_inspection_without_a_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="inspect_every=5 needs a probe"):
        train(small(inspect_every=5), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def stop_after(steps: int) -> Callable[[], bool]:
    left = iter(range(steps - 1))
    return lambda: next(left, None) is None


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("causal", {"model": {**SMALL["model"], "dropout": 0.1}, "accumulate": 2}),
        ("causal", {"optimiser": {"name": "tiger", "lr": 1e-2}, "activation_checkpointing": True}),
        ("causal", {"optimiser": {"name": "muon", "lr": 1e-2}}),
        (
            "causal",
            {"qk_clip": 0.02, "accumulate": 2, "model": {**SMALL["model"], "score": "Baseline"}},
        ),
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
    tmp_path: Path, made: dict[str, Settings], kind: str, changes: dict[str, Any]
) -> None:
    config = made[kind](steps=7, **changes)
    whole = train(config, tmp_path / "whole")
    for _ in range(2):
        with pytest.raises(Interrupted):
            train(config, tmp_path / "cut", should_stop=stop_after(3))
    cut = train(config, tmp_path / "cut")
    assert (cut.loss, cut.metrics) == (whole.loss, whole.metrics)
    for name in ("metrics.jsonl", "model/model.safetensors", "model/config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def first_loss(kind: str, config: Any) -> float:
    """The loss before any step, from the batch that the seed says, whole logits and torch."""
    torch.manual_seed(derive_seed(config.seed, "initialisation"))
    seed = derive_seed(config.seed, "batches")
    if kind == "vision":
        split = prepare_images(config.data).train
        images, labels = ImageBatches(split, config.batch_size, seed).batch(1)
        logits = VisionTransformer(config.model)(torch.from_numpy(images))
        return float(F.cross_entropy(logits.detach(), torch.from_numpy(labels)))
    data, tiling, rows = prepare_tokens(config.data), config.data.tiling, config.batch_size
    if kind == "causal":
        model = CausalLM(config.model)
        ids = torch.from_numpy(TrainingBatches(data.train, 16, rows, seed, tiling).batch(1))
        logits = model(ids[:, :-1]).flatten(0, 1)
        return float(F.cross_entropy(logits, ids[:, 1:].flatten()).detach())
    encoder = MaskedLM(config.model)
    tokens = TrainingBatches(data.train, 15, rows, seed, tiling).batch(1)
    masked = Masking().rows(tokens, config.model.vocab_size, seed, 1)
    logits = encoder(torch.from_numpy(masked.ids))
    wanted = torch.take_along_dim(logits, torch.from_numpy(masked.positions)[..., None], 1)
    targets = torch.from_numpy(masked.targets).flatten()
    return float(F.cross_entropy(wanted.flatten(0, 1), targets).detach())


@pytest.mark.parametrize(
    ("kind", "model", "metrics", "changes", "tokens"),
    [
        ("causal", CausalLM, {"accuracy"}, {"steps": 60}, 60 * 8 * 16),
        (
            "masked",
            MaskedLM,
            {"accuracy", "accuracy_exit_1"},
            {"steps": 80, "batch_size": 16},
            80 * 16 * 16,
        ),
        ("vision", VisionTransformer, {"accuracy"}, {"steps": 60}, 60 * 16 * 5),
    ],
)
def test_a_run_learns_and_leaves_its_model(
    tmp_path: Path,
    made: dict[str, Settings],
    kind: str,
    model: Any,
    metrics: set[str],
    changes: dict[str, Any],
    tokens: int,
) -> None:
    reports: list[StepReport] = []
    config = made[kind](optimiser={"lr": 1e-2}, **changes)
    result = train(config, tmp_path / "run", on_step=reports.append)
    assert [report.step for report in reports] == list(range(1, config.steps + 1))
    assert reports[0].loss == pytest.approx(first_loss(kind, config), rel=1e-5)
    assert result.loss < reports[0].loss - 0.2
    assert (result.tokens, set(result.metrics)) == (tokens, metrics)
    assert reports[-1].metrics == result.metrics
    assert load_as(model, tmp_path / "run" / "model").config == config.model
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == config.steps


def test_a_classifier_learns_what_the_words_say(tmp_path: Path, made: dict[str, Settings]) -> None:
    settings = made["classification"](steps=40, optimiser={"lr": 1e-2})
    assert (settings.model.vocab_size, settings.model.train_length) == (120, 16)
    assert train(settings, tmp_path).loss < 0.2
    model, data = load_as(Classifier, tmp_path / "model"), prepare_relations(settings.data)
    assert tune_threshold(predict(model, data.split("validation"), data.pad_id))[1] == 1.0
    assert model.config == settings.model
    assert '"unseen"' in (tmp_path / "labels.json").read_text()


def test_a_translator_learns(tmp_path: Path, made: dict[str, Settings]) -> None:
    config = made["translation"](steps=25, optimiser={"lr": 1e-2})
    train(config, tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines[-1]["nll"] < 0.8 * lines[0]["nll"]
    assert lines[-1]["accuracy"] > lines[0]["accuracy"]
    assert load_as(Translator, tmp_path / "model").config == config.model
    assert (tmp_path / "tokeniser.json").is_file()


def test_sharded_processes_translate_like_one(tmp_path: Path, made: dict[str, Settings]) -> None:
    """A decoder's keys of the source are computed outside its blocks' forward passes."""
    config = made["translation"](steps=3, parallel="fsdp")
    one, two = tmp_path / "1", tmp_path / "2"
    go_with(0, config, one)
    together(2, go_with, config, two)
    curves = [[line["loss"] for line in read_metrics(out / "metrics.jsonl")] for out in (one, two)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def translating(config: Any, shards: int) -> Any:
    task = config.task(prepare_pairs(config.data), torch.device("cpu"), shards)
    task.model.double()
    return task


def test_shards_of_sentences_add_up_to_the_batch(made: dict[str, Settings]) -> None:
    config = made["translation"]()
    weights = translating(config, 1).model.state_dict()
    found = []
    for shards in (1, 8):
        task = translating(config, shards)
        task.model.load_state_dict(weights)
        for step in range(1, 4):
            task.model.zero_grad()
            sums: dict[str, float] = {}
            for shard in range(shards):
                loss, metrics = task.loss(task.batch(step, shard, shards))
                (loss / shards).backward()
                for name, value in {"loss": loss.detach(), **metrics}.items():
                    sums[name] = sums.get(name, 0.0) + float(value) / shards
            found.append((sums, task.model.source_embedding.weight.grad))
    for (one, gradient), (eight, gradients) in zip(found[:3], found[3:], strict=True):
        assert one == pytest.approx(eight, rel=1e-9)
        torch.testing.assert_close(gradient, gradients, rtol=1e-7, atol=1e-12)


def test_the_loss_of_a_translation_is_the_mean_over_the_tokens_of_the_batch(
    made: dict[str, Settings],
) -> None:
    task = translating(made["translation"](label_smoothing=0.2), 1)
    batch = task.batch(1, 0, 1)
    loss, metrics = task.loss(batch)
    logs = torch.log_softmax(task.model(batch.source, batch.target[:, :-1]), -1)
    wanted = batch.target[:, 1:]
    real = wanted != 0
    assert int(real.sum()) == int(batch.targets)
    nll = -logs.gather(-1, wanted[..., None]).squeeze(-1)[real].mean()
    smooth = 0.8 * nll - 0.2 * logs.mean(-1)[real].mean()
    torch.testing.assert_close(loss, smooth)
    torch.testing.assert_close(metrics["nll"], nll, check_dtype=False)
    hits = ((logs.argmax(-1) == wanted) & real).sum() / real.sum()
    assert float(metrics["accuracy"]) == pytest.approx(float(hits))


def test_vocabularies_follow_the_data(made: dict[str, Settings]) -> None:
    config = made["translation"]()
    model = config.model
    assert (model.source_vocab, model.target_vocab, model.shared_vocabulary) == (300, 300, True)
    assert model.train_length == config.data.max_length
    # What a run's config.json says is read back.
    assert TranslationConfig.parse(config.model_dump(mode="json")) == config


def test_the_cost_of_each_kind(made: dict[str, Settings]) -> None:
    # 2 layers of 16 × (3 · 16 + 16) and SwiGLU's 3 · 16 · hidden; 2 of 16 tokens see the head.
    config = made["masked"](model={"exits": False, "hidden": 40}, steps=4, batch_size=4)
    per_row = 16 * (2 * 2 * (16 * 64 + 3 * 16 * 40) + 2 * 2 * 2 * 16 * 16) + 2 * 2 * 32 * 16
    cost = config.cost()
    assert (cost.trained, cost.flops) == (4 * 4 * 16, 4 * 4 * 3 * per_row)
    config = made["vision"]()
    cost = config.cost()
    assert cost.trained == 12 * 16 * 5
    assert cost.flops == 12 * 16 * 3 * flops_per_image(config.model).forward
    assert cost.parameters == sum(p.numel() for p in VisionTransformer(config.model).parameters())
    cost = made["classification"](data={"corpus": "nowhere"}).cost()
    assert cost.trained > 0
    config = made["translation"]()
    cost = config.cost()
    assert cost.parameters == sum(p.numel() for p in Translator(config.model).parameters())


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
        ("classification", {"model": {"labels": 4}}, "model.labels is 4, but .* has 3 labels"),
        ("classification", {"batch_size": 64}, "24 documents, fewer than one batch of 64"),
        ("translation", {"batch_tokens": 16}, "more than batch_tokens"),
    ],
)
def test_trainings_that_cannot_be_leave_nothing_behind(
    tmp_path: Path, made: dict[str, Settings], kind: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        train(made[kind](**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""What a training to translate counts: shares add up to the batch, vocabularies follow the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from data.helpers import multi_layout
from normattn.lab.data.pairs import PairData, prepare_pairs
from normattn.lab.training.tasks.translation import TranslationConfig


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    place = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMATTN_CACHE", str(place / "cache"))
        yield {
            "steps": 25,
            "batch_tokens": 1200,
            "model": {"dim": 16, "layers": 1, "heads": 2},
            "data": {"corpus": str(multi_layout(place / "corpus", train=61)), "vocab_size": 300},
            "schedule": {"warmup_steps": 2},
        }


def made(settings: dict[str, Any], **changes: Any) -> tuple[TranslationConfig, PairData]:
    config = TranslationConfig.parse({**settings, **changes})
    return config, prepare_pairs(config.data)


def task_of(config: TranslationConfig, data: PairData, shards: int) -> Any:
    task = config.task(data, torch.device("cpu"), shards)
    task.model.double()
    return task


def test_shards_add_up_to_the_batch(settings: dict[str, Any]) -> None:
    config, data = made(settings)
    weights = task_of(config, data, 1).model.state_dict()
    found = []
    for shards in (1, 8):
        task = task_of(config, data, shards)
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


def test_the_loss_is_the_mean_over_the_tokens_of_the_batch(settings: dict[str, Any]) -> None:
    config, data = made(settings, label_smoothing=0.2)
    task = task_of(config, data, 1)
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


def test_vocabularies_follow_the_data(settings: dict[str, Any]) -> None:
    config = TranslationConfig.parse(settings)
    model = config.model
    assert (model.source_vocab, model.target_vocab, model.shared_vocabulary) == (300, 300, True)
    assert model.train_length == config.data.max_length
    # What a run's config.json says is read back.
    assert TranslationConfig.parse(config.model_dump(mode="json")) == config

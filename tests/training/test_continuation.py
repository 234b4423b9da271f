"""Training that goes on from a saved model: its weights, the method, the length, what it keeps."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from normattn.errors import InputError, Interrupted
from normattn.lab.data.batches import TrainingBatches
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.runs import read_metrics
from normattn.lab.training import TrainingConfig, train_model
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.base import kept_model
from normattn.models.pretrained import load_model

from .settings import small

METHOD = "PI(factor=4)"


def run(config: TrainingConfig, out: Path, stop: int | None = None) -> Path:
    left = iter(range(stop - 1 if stop else config.steps))
    train_model(config, out, show_progress=False, should_stop=lambda: next(left, None) is None)
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small(steps=5, seed=3), tmp_path_factory.mktemp("base") / "run") / "model"


def longer(start: Path, method: str = METHOD, steps: int = 6) -> TrainingConfig:
    continued = Continuation.from_model(start, method, length=64)
    fields = {"steps": steps, "keep": (2, 5), "continued": continued.model_dump()}
    schedule = {"name": "constant", "warmup_steps": 2}
    return small(**fields, seed=3, batch_size=4, schedule=schedule)


def test_it_begins_with_the_saved_weights_under_the_method_and_keeps_models(
    trained: Path, tmp_path: Path
) -> None:
    config = longer(trained)
    out = run(config, tmp_path / "run")
    data = prepare_tokens(config.data)
    seed = derive_seed(config.seed, "batches")
    ids = torch.from_numpy(TrainingBatches(data.train, 64, 4, seed, config.data.tiling).batch(1))
    model = load_model(trained)
    with model.using(METHOD), torch.no_grad():
        logits = model(ids[:, :-1]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    first = read_metrics(out / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert first["tokens"] == 4 * 64
    # The models that are kept are those of their steps, without the method.
    assert sorted(path.name for path in (out / "kept").iterdir()) == [
        *("step-00000002", "step-00000005"),
    ]
    short = TrainingConfig.parse({**config.model_dump(), "steps": 2, "keep": ()})
    wanted = load_model(run(short, tmp_path / "short") / "model")
    kept = load_model(kept_model(out, 2))
    assert kept.config == wanted.config == model.config
    for name, value in wanted.state_dict().items():
        assert torch.equal(kept.state_dict()[name], value)


def test_stopped_and_resumed_it_is_the_same(trained: Path, tmp_path: Path) -> None:
    whole = run(longer(trained), tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(longer(trained), tmp_path / "broken", stop=2)
    # What it started from may have moved meanwhile: the weights count.
    shutil.copytree(trained, tmp_path / "moved")
    broken = run(longer(tmp_path / "moved"), tmp_path / "broken")
    weights = "model.safetensors"
    kept = [f"kept/step-0000000{step}/{weights}" for step in (2, 5)]
    for name in ("metrics.jsonl", f"model/{weights}", *kept):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_bad_input(trained: Path, tmp_path: Path) -> None:
    config = longer(trained).model_dump()
    config["continued"]["start"] = str(run(small(steps=4), tmp_path / "other" / "run") / "model")
    with pytest.raises(InputError, match="holds other weights than"):
        run(TrainingConfig.parse(config), tmp_path / "a")
    config = longer(trained).model_dump()
    config["model"]["layers"] = 1
    with pytest.raises(InputError, match="has other settings than `model` says"):
        run(TrainingConfig.parse(config), tmp_path / "b")
    with pytest.raises(InputError, match="training-time"):
        longer(trained, method="NoPE")
    with pytest.raises(InputError, match=re.escape("keep names steps from 1 to 3")):
        longer(trained, steps=3)
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        Continuation.from_model(tmp_path / "nowhere")


def test_a_text_of_another_tokeniser(tmp_path: Path) -> None:
    def on(name: str) -> dict[str, object]:
        lines = (f"{name} {n} of {name} times {n * n}" for n in range(4000))
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        corpus = str(tmp_path / f"{name}.txt")
        return {"corpus": corpus, "vocab_size": 300, "test_fraction": 0.3}

    first, other = on("first"), on("other")
    changes = {"steps": 2, "keep": (1,), "schedule": {"warmup_steps": 1}}
    out = run(small(**changes, data=first), tmp_path / "run")
    for start in (out / "model", kept_model(out, 1)):
        changes["continued"] = Continuation.from_model(start).model_dump()
        with pytest.raises(InputError, match=re.escape(f"tokeniser {out / 'tokeniser.json'}")):
            run(small(**changes, data=other), tmp_path / "b")
    assert not (tmp_path / "b").exists()
    run(small(**changes, data=first), tmp_path / "c")

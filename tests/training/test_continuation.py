"""Training that goes on from a saved model: its weights, the method, the length, what it keeps."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from normattn.errors import InputError, Interrupted
from normattn.lab.data import TrainingBatches, prepare_tokens
from normattn.lab.runs import read_metrics
from normattn.lab.training import TrainingConfig, train_causal
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.workload import kept_model
from normattn.models.pretrained import load_model

from .settings import small

METHOD = "PI(factor=4)"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    train_causal(base(), run, show_progress=False)
    return run / "model"


def base() -> TrainingConfig:
    return small(steps=5, seed=3)


def longer(start: Path, method: str = METHOD, steps: int = 6) -> TrainingConfig:
    continued = Continuation.of(start, method, length=64)
    fields = {"steps": steps, "keep": (2, 5), "continued": continued.model_dump()}
    return small(**fields, seed=3, batch_size=4, schedule={"warmup_steps": 2})


def test_the_first_step_reads_the_saved_weights_under_the_method(
    trained: Path, tmp_path: Path
) -> None:
    config = longer(trained)
    train_causal(config, tmp_path / "run", show_progress=False)
    data = prepare_tokens(config.data)
    seed = derive_seed(config.seed, "batches")
    ids = torch.from_numpy(TrainingBatches(data.train, 64, 4, seed, config.data.tiling).batch(1))
    model = load_model(trained)
    with model.using(METHOD), torch.no_grad():
        logits = model(ids[:, :-1]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert first["tokens"] == 4 * 64


def test_kept_models_are_those_of_their_steps(trained: Path, tmp_path: Path) -> None:
    run, short = tmp_path / "run", tmp_path / "short"
    config = longer(trained)
    train_causal(config, run, show_progress=False)
    schedule = {"name": "constant", "warmup_steps": 2}
    fields = {**config.model_dump(), "schedule": schedule}
    train_causal(TrainingConfig.parse(fields), tmp_path / "flat", show_progress=False)
    fields |= {"steps": 2, "keep": ()}
    train_causal(TrainingConfig.parse(fields), short, show_progress=False)
    kept = load_model(kept_model(tmp_path / "flat", 2)).state_dict()
    for name, value in load_model(short / "model").state_dict().items():
        assert torch.equal(kept[name], value)
    assert sorted(path.name for path in (run / "kept").iterdir()) == [
        "step-00000002",
        "step-00000005",
    ]
    # The method is no part of the saved model.
    assert load_model(kept_model(run, 5)).config == load_model(trained).config


def test_stopped_and_resumed_it_is_the_same(trained: Path, tmp_path: Path) -> None:
    config = longer(trained)
    train_causal(config, tmp_path / "whole", show_progress=False)
    steps = 0

    def asked() -> bool:
        nonlocal steps
        steps += 1
        return steps == 2

    with pytest.raises(Interrupted):
        train_causal(config, tmp_path / "broken", should_stop=asked, show_progress=False)
    # What it started from may have moved meanwhile: the weights count.
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    train_causal(longer(moved), tmp_path / "broken", show_progress=False)
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    for step in config.keep:
        both = [kept_model(tmp_path / run, step) for run in ("broken", "whole")]
        contents = [(place / "model.safetensors").read_bytes() for place in both]
        assert contents[0] == contents[1]


def test_bad_input(trained: Path, tmp_path: Path) -> None:
    config = longer(trained).model_dump()
    other = tmp_path / "other" / "run"
    train_causal(small(steps=4), other, show_progress=False)
    config["continued"]["start"] = str(other / "model")
    with pytest.raises(InputError, match="holds other weights than this run began with"):
        train_causal(TrainingConfig.parse(config), tmp_path / "a", show_progress=False)
    config = longer(trained).model_dump()
    config["model"]["layers"] = 1
    with pytest.raises(InputError, match="has other settings than `model` says"):
        train_causal(TrainingConfig.parse(config), tmp_path / "b", show_progress=False)
    with pytest.raises(InputError, match="trained in"):
        longer(trained, method="NoPE")
    with pytest.raises(InputError, match=re.escape("keep names steps from 1 to 3")):
        longer(trained, steps=3)
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        Continuation.of(tmp_path / "nowhere")


def test_a_text_of_another_tokeniser(tmp_path: Path) -> None:
    def on(name: str) -> dict[str, object]:
        lines = (f"{name} {n} of {name} times {n * n}" for n in range(4000))
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        corpus = str(tmp_path / f"{name}.txt")
        return {"corpus": corpus, "vocab_size": 300, "test_fraction": 0.3}

    first, other = on("first"), on("other")
    changes = {"steps": 2, "keep": (1,), "schedule": {"warmup_steps": 1}}
    train_causal(small(**changes, data=first), tmp_path / "run", show_progress=False)
    for start in (tmp_path / "run" / "model", kept_model(tmp_path / "run", 1)):
        changes["continued"] = Continuation.of(start).model_dump()
        left = tmp_path / "run" / "tokeniser.json"
        with pytest.raises(InputError, match=re.escape(f"the tokeniser {left}, and this corpus")):
            train_causal(small(**changes, data=other), tmp_path / "b", show_progress=False)
    assert not (tmp_path / "b").exists()
    train_causal(small(**changes, data=first), tmp_path / "c", show_progress=False)

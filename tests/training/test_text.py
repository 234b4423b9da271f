"""Training of text models: settings, output files, and initial weights from a saved model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.errors import InputError, Interrupted
from normattn.lab.data.batches import TrainingBatches
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.runs import read_metrics
from normattn.lab.training import AdamWConfig, TigerConfig, TrainingConfig, train_model
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.base import kept_model
from normattn.models import CausalLM
from normattn.models.pretrained import load_model

from .settings import SMALL, small


def changed(path: str, value: object) -> dict[str, Any]:
    """SMALL with one dotted field set."""
    values: dict[str, Any] = json.loads(json.dumps(SMALL))
    *groups, last = path.split(".")
    place = values
    for group in groups:
        place = place.setdefault(group, {})
    place[last] = value
    return values


def test_the_vocabulary_comes_from_the_data() -> None:
    assert small().model.vocab_size == 32
    with pytest.raises(InputError, match=r"model\.vocab_size is 33 .* 32"):
        TrainingConfig.parse(changed("model.vocab_size", 33))


def test_the_resolved_whole_reads_back_as_itself() -> None:
    config = small(optimiser={"name": "tiger"})
    assert TrainingConfig.parse(config.model_dump(mode="json")) == config
    assert isinstance(config.optimiser, TigerConfig)
    assert isinstance(small().optimiser, AdamWConfig)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("stepz", 3, r"unknown field stepz; did you mean steps\?"),
        ("model.layer", 3, r"unknown field model\.layer; did you mean model\.layers\?"),
        ("lr", 0.1, r"unknown field lr; did you mean optimiser\.lr\?"),
        ("data.qqqqq", 0.1, r"unknown field data\.qqqqq; there are .*data\.corpus"),
        ("steps", 0, r"steps: .*greater than or equal to 1, got 0"),
        ("optimiser.lr", 0.0, r"lr: .*greater than 0"),
        ("optimiser.lr", float("nan"), r"lr: "),
        ("precision", "fp8", "precision: .*'fp16'"),
        ("schedule.warmup_steps", 13, "warmup_steps is 13, more than the 12 steps"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_field(
    path: str, value: object, expected: str
) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        TrainingConfig.parse(changed(path, value), "mine.toml")
    message = str(caught.value)
    assert message.startswith("mine.toml: ")
    assert len(message.splitlines()) == 1


def test_json_toml_and_a_runs_own_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(SMALL))
    (tmp_path / "c.toml").write_text(
        'steps = 12\nbatch_size = 8\ndevice = "cpu"\n'
        '[model]\ndim = 16\nlayers = 2\nheads = 2\ntrain_length = 16\nscore = "KNA-logn"\n'
        '[data]\ncorpus = "synthetic:copy?low=3&high=6"\nvocab_size = 32\n'
        "[optimiser]\nlr = 3e-3\n[schedule]\nwarmup_steps = 4\n"
    )
    whole = {"format": 1, "kind": "causal-lm", "config": small().model_dump(mode="json")}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for name in ("c.json", "c.toml", "config.json"):
        assert TrainingConfig.load(tmp_path / name) == small()


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_finished_run_is_returned_without_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(log_every=5)
    first = train_model(config, tmp_path / "run", show_progress=False)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 5, 10, 12]
    assert set(records[0]) == {
        *("step", "loss", "accuracy", "gradient_norm", "learning_rate", "tokens")
    }
    before = files(tmp_path / "run")

    def refuse(*_: object) -> None:
        raise AssertionError("data was prepared for a run that is done")

    monkeypatch.setattr(TrainingConfig, "prepare", refuse)
    assert train_model(config, tmp_path / "run", show_progress=False) == first
    assert files(tmp_path / "run") == before


def test_text_leaves_its_tokeniser_and_a_run_goes_on_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path / "cache"))
    corpus = tmp_path / "text"
    corpus.mkdir()

    def write(said: str) -> None:
        for i in range(40):
            (corpus / f"{i}.txt").write_text(f"document {i} {said} {i} times {i} is {i * i}\n" * 9)

    config = small(data={"corpus": str(corpus), "vocab_size": 300})
    write("says that")
    with pytest.raises(Interrupted):
        train_model(config, tmp_path / "run", should_stop=lambda: True, show_progress=False)
    write("holds another text, namely that")
    with pytest.raises(InputError, match=r"was begun on other data: .*corpus\.json"):
        train_model(config, tmp_path / "run", show_progress=False)
    write("says that")
    train_model(config, tmp_path / "run", show_progress=False)
    tokeniser = Tokeniser.load(tmp_path / "run" / "tokeniser.json")
    assert tokeniser.decode(tokeniser.encode("document 3 says")) == "document 3 says"
    assert isinstance(load_model(tmp_path / "run" / "model"), CausalLM)
    record = json.loads((tmp_path / "run" / "corpus.json").read_text())
    assert record == {"fingerprint": prepare_tokens(config.data).fingerprint, "sources": {}}
    assert "test split" not in capfd.readouterr().err
    config = small(data={"corpus": str(corpus), "vocab_size": 300, "test_fraction": 0.0})
    train_model(config, tmp_path / "all", show_progress=False)
    assert "the test split has no document" in capfd.readouterr().err


# Initial weights from a saved model.
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
        *("step-00000002", "step-00000005")
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

"""Training of text models: settings, output files, and initial weights from a saved model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.errors import InputError
from normattn.lab.data.batches import TrainingBatches
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.runs import read_metrics
from normattn.lab.training import AdamWConfig, TigerConfig, TrainingConfig
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.base import kept_model
from normattn.models.pretrained import load_model

from .settings import SMALL, changed, run, small, stop


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"stepz": 3}, r"unknown field stepz; did you mean steps\?"),
        ({"model": {"layer": 3}}, r"unknown field model\.layer; did you mean model\.layers\?"),
        ({"lr": 0.1}, r"unknown field lr; did you mean optimiser\.lr\?"),
        ({"data": {"qqqqq": 0.1}}, r"unknown field data\.qqqqq; there are .*data\.corpus"),
        ({"steps": 0}, r"steps: .*greater than or equal to 1, got 0"),
        ({"optimiser": {"lr": 0.0}}, r"lr: .*greater than 0"),
        ({"optimiser": {"lr": float("nan")}}, r"lr: "),
        ({"precision": "fp8"}, "precision: .*'fp16'"),
        ({"schedule": {"warmup_steps": 13}}, "warmup_steps is 13, more than the 12 steps"),
        ({"model": {"vocab_size": 33}}, r"model\.vocab_size is 33 .* 32"),
    ],
)
def test_a_mistake_is_a_sentence_naming_its_field(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        TrainingConfig.parse(changed(**change), "mine.toml")
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
    assert small().model.vocab_size == 32
    config = small(optimiser={"name": "tiger"})
    assert TrainingConfig.parse(config.model_dump(mode="json")) == config
    assert [type(each.optimiser) for each in (small(), config)] == [AdamWConfig, TigerConfig]


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_finished_run_takes_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(log_every=5)
    first = run(config, tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 5, 10, 12]
    logged = ("loss", "accuracy", "gradient_norm", "learning_rate", "tokens")
    assert set(records[0]) == {"step", *logged}
    before = files(tmp_path / "run")
    monkeypatch.setattr(TrainingConfig, "prepare", None)  # Nothing is prepared once more.
    assert run(config, tmp_path / "run") == first
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
    stop(config, tmp_path / "run", 1)
    write("holds another text, namely that")
    with pytest.raises(InputError, match=r"was begun on other data: .*corpus\.json"):
        run(config, tmp_path / "run")
    write("says that")
    run(config, tmp_path / "run")
    tokeniser = Tokeniser.load(tmp_path / "run" / "tokeniser.json")
    assert tokeniser.decode(tokeniser.encode("document 3 says")) == "document 3 says"
    assert load_model(tmp_path / "run" / "model").config == config.model
    record = json.loads((tmp_path / "run" / "corpus.json").read_text())
    assert record == {"fingerprint": prepare_tokens(config.data).fingerprint, "sources": {}}
    assert "test split" not in capfd.readouterr().err
    config = small(data={"corpus": str(corpus), "vocab_size": 300, "test_fraction": 0.0})
    run(config, tmp_path / "all")
    assert "the test split has no document" in capfd.readouterr().err


# Initial weights from a saved model.
METHOD = "PI(factor=4)"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small(steps=5, seed=3), tmp_path_factory.mktemp("base") / "run").path / "model"


def longer(start: Path, method: str = METHOD, steps: int = 6) -> TrainingConfig:
    continued = Continuation.from_model(start, method, length=64)
    fields = {"steps": steps, "keep": (2, 5), "continued": continued.model_dump()}
    schedule = {"name": "constant", "warmup_steps": 2}
    return small(**fields, seed=3, batch_size=4, schedule=schedule)


def test_it_begins_with_the_saved_weights_and_the_method(trained: Path, tmp_path: Path) -> None:
    config = longer(trained)
    out = run(config, tmp_path / "run").path
    tokens, seed = prepare_tokens(config.data).train, derive_seed(config.seed, "batches")
    ids = torch.from_numpy(TrainingBatches(tokens, 64, 4, seed, config.data.tiling).batch(1))
    model = load_model(trained)
    with model.using(METHOD), torch.no_grad():
        logits = model(ids[:, :-1]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    first = read_metrics(out / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert first["tokens"] == 4 * 64
    # The models that are kept are those of their steps, without the method.
    kept_steps = sorted(path.name for path in (out / "kept").iterdir())
    assert kept_steps == ["step-00000002", "step-00000005"]
    short = TrainingConfig.parse({**config.model_dump(), "steps": 2, "keep": ()})
    wanted = load_model(run(short, tmp_path / "short").path / "model")
    kept = load_model(kept_model(out, 2))
    assert kept.config == wanted.config == model.config
    torch.testing.assert_close(kept.state_dict(), wanted.state_dict(), rtol=0, atol=0)


def test_stopped_and_resumed_it_is_the_same(trained: Path, tmp_path: Path) -> None:
    whole = run(longer(trained), tmp_path / "whole").path
    stop(longer(trained), tmp_path / "broken", 2)
    # What it started from may have moved meanwhile: the weights count.
    shutil.copytree(trained, tmp_path / "moved")
    broken = run(longer(tmp_path / "moved"), tmp_path / "broken").path
    weights = "model.safetensors"
    kept = [f"kept/step-0000000{step}/{weights}" for step in (2, 5)]
    for name in ("metrics.jsonl", f"model/{weights}", *kept):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_bad_input(trained: Path, tmp_path: Path) -> None:
    config = longer(trained).model_dump()
    config["continued"]["start"] = str(run(small(steps=4), tmp_path / "other").path / "model")
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
    out = run(small(**changes, data=first), tmp_path / "run").path
    for start in (out / "model", kept_model(out, 1)):
        changes["continued"] = Continuation.from_model(start).model_dump()
        with pytest.raises(InputError, match=re.escape(f"tokeniser {out / 'tokeniser.json'}")):
            run(small(**changes, data=other), tmp_path / "b")
    assert not (tmp_path / "b").exists()
    run(small(**changes, data=first), tmp_path / "c")

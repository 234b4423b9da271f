from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from torch import nn

from normattn.errors import DivergedError, InputError, Interrupted
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.runs import read_metrics, read_status
from normattn.lab.training import TrainingConfig, train_causal
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.models import CausalLM
from normattn.models.pretrained import load_model

from .settings import SMALL, small


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_finished_run_is_returned_without_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(log_every=5)
    first = train_causal(config, tmp_path / "run", show_progress=False)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 5, 10, 12]
    assert set(records[0]) == {
        *("step", "loss", "accuracy", "gradient_norm", "learning_rate", "tokens"),
    }
    before = files(tmp_path / "run")

    def refuse(*_: object) -> None:
        raise AssertionError("data was prepared for a run that is done")

    monkeypatch.setattr(CausalWorkload, "prepare", refuse)
    assert train_causal(config, tmp_path / "run", show_progress=False) == first
    assert files(tmp_path / "run") == before


def test_another_configuration_is_refused_and_threads_are_not(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train_causal(small(), tmp_path / "run", should_stop=lambda: True, show_progress=False)
    before = files(tmp_path / "run")
    other = small(model={**SMALL["model"], "score": "KNA"})
    with pytest.raises(InputError, match=r"model\.score is 'KNA-logn@16' there and 'KNA@16' here"):
        train_causal(other, tmp_path / "run", show_progress=False)
    assert files(tmp_path / "run") == before
    train_causal(small(checkpoint_seconds=0), tmp_path / "run", show_progress=False)


def test_a_divergence_names_the_layer_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = CausalWorkload.make_model

    def poisoned(self: CausalWorkload, config: TrainingConfig) -> nn.Module:
        model = build(self, config)
        hook = model.get_submodule("blocks.1.feed_forward").register_forward_hook
        hook(lambda m, i, out: out * float("nan"), prepend=True)
        return model

    monkeypatch.setattr(CausalWorkload, "make_model", poisoned)
    with pytest.raises(DivergedError) as caught:
        train_causal(small(), tmp_path / "run", show_progress=False)
    assert (caught.value.step, caught.value.checkpoint) == (1, None)
    assert caught.value.where.startswith("blocks.1.feed_forward")
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state == "diverged"
    assert not (tmp_path / "run" / "model").exists()


def test_text_leaves_its_tokeniser_and_a_run_goes_on_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        train_causal(config, tmp_path / "run", should_stop=lambda: True, show_progress=False)
    write("holds another text, namely that")
    with pytest.raises(InputError, match=r"was begun on other data: .*corpus\.json"):
        train_causal(config, tmp_path / "run", show_progress=False)
    write("says that")
    train_causal(config, tmp_path / "run", show_progress=False)
    tokeniser = Tokeniser.load(tmp_path / "run" / "tokeniser.json")
    assert tokeniser.decode(tokeniser.encode("document 3 says")) == "document 3 says"
    assert isinstance(load_model(tmp_path / "run" / "model"), CausalLM)
    record = json.loads((tmp_path / "run" / "corpus.json").read_text())
    assert record == {"fingerprint": prepare_tokens(config.data).fingerprint, "sources": {}}


def test_a_run_records_what_its_text_was_taken_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path / "cache"))
    data = {"corpus": "python-source", "vocab_size": 300, "max_bytes": 100_000}
    train_causal(small(data=data), tmp_path / "run", show_progress=False)
    record = json.loads((tmp_path / "run" / "corpus.json").read_text())
    assert record["sources"] == {"python": platform.python_version()}

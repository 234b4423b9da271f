"""lm-evaluation-harness: our tasks are solvable, and run without a network."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from cli.conftest import Command
from normattn import InputError
from normattn.cli.harness import TASKS, NormattnLM
from normattn.cli.harness_tasks import retrieval_documents, segment_documents
from normattn.lab.data.retrieval import TASKS as RETRIEVAL
from normattn.lab.data.tokeniser import Tokeniser

from .conftest import by_hand, logits_of


@pytest.mark.parametrize("task", RETRIEVAL)
def test_retrieval_can_be_solved_from_its_text(run: Path, task: str) -> None:
    """By looking up every asked name among the lines of the text."""
    tokeniser = Tokeniser.load(run / "tokeniser.json")
    documents = retrieval_documents(task, {"run": str(run), "lengths": [96, 160], "samples": 1})
    assert [each["depth"] for each in documents] == [0, 25, 50, 75, 100] * 2
    for each in documents:
        *lines, question = each["context"].split("\n")
        stated = dict(line.split("=") for line in lines if "=" in line)
        for place in range(0, len(each["pieces"]), 2):
            name = question.removesuffix("=")
            assert stated[name].startswith(each["pieces"][place])
            question = "".join(each["pieces"][place + 1 : place + 2]).strip("\n")
        size = len(tokeniser.encode(each["context"] + "".join(each["pieces"])))
        assert each["length"] - 8 <= size <= each["length"] + 8


def test_the_last_segment_stays_the_same(llama: Path, corpus: Path) -> None:
    named = {"pretrained": str(llama), "lengths": [64, 128], "samples": 3, "text": str(corpus)}
    documents = segment_documents(named)
    for one, other in zip(documents[:3], documents[3:], strict=True):
        assert (one["length"], other["length"]) == (64, 128)
        assert one["pieces"] == other["pieces"]
        assert other["context"].endswith(one["context"])
        assert len(other["context"]) > len(one["context"])
    # Longer than any document: only when they are put together.
    with pytest.raises(InputError, match="no document of the test split"):
        segment_documents({**named, "lengths": [4096]})
    assert segment_documents({**named, "lengths": [4096], "join": True, "samples": 1})


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, "the tasks count tokens"),
        ({"run": "RUN", "length": [64]}, "did you mean 'lengths'"),
        ({"run": "RUN", "lengths": "64,128"}, "lengths"),
        ({"run": "RUN", "lengths": [1, 128]}, "lengths"),
        ({"run": "RUN", "lengths": [96, 100]}, "in whole segments of 48 tokens, got 100"),
        (
            {"run": "RUN", "samples": 0},
            "samples: Input should be greater than or equal to 1, got 0",
        ),
        ({"run": "RUN", "seed": -1}, "seed: Input should be greater than or equal to 0, got -1"),
        ({"run": "RUN", "join": "no"}, "join: "),
        ({"run": "RUN", "text": "gone.txt"}, "'gone.txt' does not exist"),
        ({"tokenizer": "/gone"}, "/gone does not exist"),
    ],
)
def test_metadata_that_cannot_be(run: Path, metadata: dict[str, Any], expected: str) -> None:
    given = {key: str(run) if value == "RUN" else value for key, value in metadata.items()}
    with pytest.raises(InputError, match=re.escape(expected)):
        segment_documents(given)


def test_the_tasks_run_without_a_network(
    named: dict[str, Any], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    metadata = {**named, "lengths": [96, 192], "samples": 1, "text": str(corpus)}
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    found = simple_evaluate(
        "normattn", model_args=named, tasks=["normattn"], task_manager=manager, limit=2
    )
    results = found["results"]
    assert results["normattn_passkey"]["acc_96_depth_25,none"] in (0.0, 1.0)
    assert set(results) >= {f"normattn_{task}" for task in RETRIEVAL}
    loss = results["normattn_last_segment"]["loss_96,none"]
    text = "".join(found["samples"]["normattn_last_segment"][0]["arguments"][0])
    tokens = NormattnLM(**named).tok_encode(text)
    scored = by_hand(logits_of({**named, "dtype": "float32"}), tokens, 48)
    assert loss == pytest.approx(-scored[0] / 48, abs=1e-4)


def test_the_command(command: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The harness has thousands of tasks of its own, which it would read first.
    ours = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", ours)
    said = command.done("lm-eval", "--tasks-path")
    assert (Path(said.out.strip()) / "normattn.yaml").is_file()
    assert command("lm-eval").code == 2
    model = ("lm-eval", "--model", "normattn", "--model_args", f"run={run}", "--tasks")
    assert command(*model, "normattn_passky").last == "Tasks not found: normattn_passky"
    metadata = ("--metadata", '{"lengths": [96], "samples": 1}')
    said = command.done(*model, "normattn_last_segment", *metadata)
    assert "loss_96" in said.out

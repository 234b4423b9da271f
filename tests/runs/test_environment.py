from __future__ import annotations

import json
from pathlib import Path

import torch

from normattn.lab.runs import describe_environment, record_environment


def test_what_the_digits_depend_on_is_described() -> None:
    described = describe_environment(precision="fp32")
    assert described["torch"] == torch.__version__
    assert described["threads"] == torch.get_num_threads()
    assert described["precision"] == "fp32"
    assert json.loads(json.dumps(described)) == described


def test_only_a_change_is_reported_and_each_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    assert record_environment(path, {"torch": "1", "threads": 1}, 0) == []
    assert record_environment(path, {"torch": "1", "threads": 1}, 5) == []
    assert record_environment(path, {"torch": "2", "threads": 1}, 7) == ["torch 1 → 2"]
    assert record_environment(path, {"torch": "2", "threads": 1}, 8) == []
    assert record_environment(path, {"torch": "2", "threads": 4}, 9) == ["threads 1 → 4"]
    stored = json.loads(path.read_text())
    assert stored["started"] == {"torch": "1", "threads": 1}
    assert [entry["step"] for entry in stored["resumed"]] == [7, 9]

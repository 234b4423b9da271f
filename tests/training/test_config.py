from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.lab.training import AdamWConfig, TigerConfig, TrainingConfig
from normattn.lab.training.config import LoopConfig

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
        ("accumulate", 3, "batch_size 8 does not divide into 3"),
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


def test_a_configuration_of_before_that_chose_kernels_loads_or_is_refused() -> None:
    """Kernels are no longer timed: "portable" is the only rule, and "fastest" is no setting."""
    assert LoopConfig.parse({"kernels": "portable"}) == LoopConfig()
    assert "kernels" not in LoopConfig().model_dump()
    with pytest.raises(InputError, match="kernels is 'fastest'"):
        LoopConfig.parse({"kernels": "fastest"})

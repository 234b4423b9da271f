"""Numbers that no machine holds, and those that a floating-point number would round."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.cli import values
from normattn.cli.extension_settings import parse_lengths
from normattn.errors import InputError
from normattn.io import expanded
from normattn.lab.sweep.settings import EvaluationSettings, validated
from normattn.lab.training import TrainingConfig
from normattn.score import ScoreSpec


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(min_value=1, max_value=(1 << 63) - 1))
def test_every_whole_number_survives_its_own_text(window: int) -> None:
    for text in (f"Baseline-ReRoPE(window={window})", f"Baseline@{max(window, 2)}"):
        spec = ScoreSpec.parse(text)
        assert ScoreSpec.parse(str(spec)) == spec
        assert str(window) in str(spec) or window == 1


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(min_value=1.0, allow_nan=False, allow_infinity=False))
def test_every_factor_survives_its_own_text(factor: float) -> None:
    spec = ScoreSpec.parse("Baseline-NTK", factor=factor)
    assert ScoreSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "KNA@" + "9" * 19,
        "KNA@" + "9" * 5000,
        "KNA-ReRoPE(window=" + "9" * 5000 + ")",
        "KNA-ReRoPE(window=9223372036854775808)",
        "KNA-NTK(factor=" + "9" * 5000 + ")",
        "KNA-NTK(factor=1e999)",
        "KNA-" * 100_000,
        "KNA" + "-ReRoPE(window=1)" * 1000,
        "(" * 100_000,
        "\ud800",
    ],
)
def test_a_name_beyond_bounds_is_refused_in_short(text: str) -> None:
    with pytest.raises(InputError) as caught:
        ScoreSpec.parse(text)
    assert len(str(caught.value)) < 2500


_NO_TEXT = """
from normattn.errors import InputError
from normattn.score import ScoreSpec

for value in (None, 3, 2.5, b"KNA", ["KNA"], {"KNA": 1}, object()):
    for given in (ScoreSpec.parse, ScoreSpec.parse("KNA").with_method):
        try:
            given(value)
        except InputError as error:
            print("a score is a ScoreSpec or its name" in str(error))
"""


def test_a_specification_that_is_no_text_is_refused() -> None:
    # In a process of its own: the run-time types of the tests would refuse it first.
    ran = subprocess.run([sys.executable, "-c", _NO_TEXT], capture_output=True, text=True)
    assert ran.stdout.split() == ["True"] * 14, ran.stderr


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 20, "1," + "9" * 30])
def test_typed_numbers_are_bounded(text: str) -> None:
    with pytest.raises(InputError, match="--lengths"):
        values.integers(text, "--lengths")
    with pytest.raises(InputError, match="--seeds"):
        values.seeds(text)
    with pytest.raises(InputError, match="--lengths"):
        parse_lengths(text)


def test_a_count_of_seeds_is_bounded_and_a_list_of_them_is_not_a_count() -> None:
    with pytest.raises(InputError, match=r"--seeds.*at most 100"):
        values.seeds("101")
    assert values.seeds("100000000,") == (100000000,)


@pytest.mark.parametrize("multiples", [[999999999999], [1, 1 << 63], [10**40]])
def test_a_multiple_beyond_every_text_is_refused(multiples: list[int]) -> None:
    with pytest.raises(InputError, match="multiples"):
        validated(EvaluationSettings, {"multiples": multiples}, "evaluation settings")


BASE: dict[str, Any] = {
    "model": {"dim": 16, "layers": 1, "train_length": 8, "vocab_size": 300},
    "data": {"corpus": "python-source", "vocab_size": 300},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("checkpoint_seconds", float("inf")),
        ("checkpoint_seconds", float("nan")),
        ("clip", float("inf")),
        ("log_every", 10**30),
        ("inspect_every", 1 << 63),
        ("batch_size", 10**30),
        ("optimiser.lr", float("inf")),
        ("optimiser.weight_decay", float("nan")),
        ("schedule.final_fraction", float("nan")),
        ("model.layers", 99_999_999),
        ("model.dim", 10**12),
        ("model.dropout", float("nan")),
        ("data.max_bytes", 10**30),
        ("data.seed", 1 << 63),
        ("data.tiled_high", 10**30),
        ("data.test_fraction", float("nan")),
    ],
)
def test_a_setting_beyond_bounds_is_refused_by_name(name: str, value: Any) -> None:
    fields: dict[str, Any] = {key: dict(inner) for key, inner in BASE.items()}
    group, _, last = name.rpartition(".")
    target = fields.setdefault(group, {}) if group else fields
    target[last] = value
    with pytest.raises(InputError, match=last):
        TrainingConfig.parse(fields)


def test_a_home_of_nobody_whose_name_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="it is no text"):
        expanded("~nobody\ud800/x")

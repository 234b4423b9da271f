"""The evaluation that is measured is that of the presets, and its texts are counted as it says."""

from __future__ import annotations

import pytest

from normattn.bench.scoring import MULTIPLES, Scoring, Training
from normattn.bench.settings import Settings
from normattn.bench.suites.scoring import METHODS, SUITE
from normattn.bench.training import BATCHES, MODELS, PresetName
from normattn.lab.stats.frame import joined
from normattn.lab.sweep.measuring import set_lengths
from normattn.lab.sweep.presets import load
from normattn.models.flops import flops_per_token


@pytest.mark.parametrize("name", MODELS)
def test_protocols_and_lengths_are_the_presets(name: PresetName) -> None:
    settings = load(name).evaluation
    assert settings.multiples == MULTIPLES
    length = MODELS[name].train_length
    sets = Scoring(name).sets()
    assert [chosen.length for chosen in sets] == [n * length for n in set_lengths(settings)]
    assert tuple(dict.fromkeys(chosen.protocol for chosen in sets)) == settings.protocols
    assert {len(chosen) for chosen in sets} == {Scoring(name).windows}


@pytest.mark.parametrize("name", MODELS)
def test_training_has_as_many_tokens(name: PresetName) -> None:
    scoring, length = Scoring(name), MODELS[name].train_length
    assert scoring.tokens == scoring.windows * 32 * length
    assert Training(scoring).steps * BATCHES[name] * length == scoring.tokens


def test_windows_in_common_are_work_once_and_the_head_where_tokens_count() -> None:
    scoring = Scoring("laptop", windows=4)
    config = MODELS["laptop"]
    length = config.train_length
    # The longest text is that of the last segment too; one short text is of neither.
    passed = [1, 8, 8, 1, 2, 4]
    flops = (flops_per_token(config, n * length).forward * n * length for n in passed)
    left_out = (1 + 3) * length
    head = 2 * config.dim * config.vocab_size
    assert scoring.work().flops == pytest.approx(4 * (sum(flops) - left_out * head))
    assert scoring.work().exps == 4 * (24 * length - left_out) * config.vocab_size


def test_every_method_is_scored_in_its_own_way() -> None:
    case = SUITE.cases(Settings(quick=True))[0]
    frames = [joined(case.entries[f"scoring, {name}"].build()()) for name in METHODS]  # type: ignore[arg-type]
    assert [frame["method"].unique().to_list() for frame in frames] == [
        [method] for method in ("", "YaRN", "ReRoPE")
    ]
    losses = [frame.filter(statistic="loss")["sum"].sum() for frame in frames]
    assert len(set(losses)) == 3

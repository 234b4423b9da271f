"""Trained-in and post-hoc parts: taking a name apart, adding a method, filling what is open."""

from __future__ import annotations

import pytest

from normattn import InputError, Score, ScoreSpec

parse = ScoreSpec.parse


@pytest.mark.parametrize(
    ("text", "variant", "method"),
    [
        ("KNA@512", "KNA", ""),
        ("KNA-logn@512", "KNA-logn", ""),
        ("KNA-logn+@512", "KNA", "logn+"),
        ("CosA-logn-YaRN(factor=8)@512", "CosA-logn", "YaRN"),
        ("CosA-NTK(factor=8)-logn+@512", "CosA", "NTK-logn+"),
        ("Baseline-NoPE@512", "Baseline-NoPE", ""),
        ("QNA-RoPE(base=50)-ReRoPE@512", "QNA-RoPE(base=50)", "ReRoPE"),
    ],
)
def test_what_was_trained_and_what_came_after(text: str, variant: str, method: str) -> None:
    spec = parse(text)
    assert spec.variant_name == variant
    assert spec.method == method
    assert spec.trained.method == ""
    assert spec.trained.trained == spec.trained
    assert spec.trained.train_length == 512


@pytest.mark.parametrize(
    ("method", "parameters", "result"),
    [
        ("", {}, "KNA@512"),
        ("as is", {}, "KNA@512"),
        ("YaRN", {"factor": 8}, "KNA-YaRN(factor=8)@512"),
        ("YaRN(factor=8)", {}, "KNA-YaRN(factor=8)@512"),
        ("YaRN(factor=8)@512", {}, "KNA-YaRN(factor=8)@512"),
        ("ReRoPE", {}, "KNA-ReRoPE(window=128)@512"),
        ("ReRoPE", {"window": 64}, "KNA-ReRoPE(window=64)@512"),
        ("logn+", {}, "KNA-logn+@512"),
        ("ReRoPE-logn+", {}, "KNA-ReRoPE(window=128)-logn+@512"),
        ("NTK-mixed(factor=2)", {}, "KNA-NTKMixed(factor=2)@512"),
    ],
)
def test_adding_a_method(method: str, parameters: dict[str, float], result: str) -> None:
    spec = parse("KNA@512")
    added = spec.with_method(method, **parameters)
    assert str(added) == result
    assert added.trained == spec
    assert spec.with_method(added.method, **_open(added)).name == added.name


def _open(spec: ScoreSpec) -> dict[str, float]:
    stretched = spec.rope_scaling is not None
    return {"factor": 8.0} if stretched else {}


@pytest.mark.parametrize(
    ("spec", "method", "reason"),
    [
        ("KNA@512", "logn", "logn is trained in; it cannot be added to KNA"),
        ("KNA@512", "CosA", "CosA is trained in; it cannot be added to KNA"),
        ("KNA@512", "NoPE", "NoPE is trained in"),
        ("KNA-NoPE@512", "RoPE", "RoPE is trained in; it cannot be added to KNA-NoPE"),
        ("KNA-NoPE@512", "YaRN", "YaRN on NoPE makes no sense"),
        ("KNA-logn@512", "logn+", r"logn and logn\+ cannot be combined"),
        ("KNA-YaRN(factor=2)@512", "NTK", "YaRN and NTK cannot be combined"),
        ("KNA-YaRN(factor=2)@512", "ReRoPE", "ReRoPE and YaRN cannot be combined"),
        ("KNA@512", "YaRN(factor=2)@1024", "says a training length of 1024, but KNA@512"),
        ("KNA@512", "Yarn", "did you mean YaRN"),
        ("KNA@512", "YaRN(window=3)", "YaRN has no parameter 'window'"),
    ],
)
def test_methods_that_cannot_be_added(spec: str, method: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse(spec).with_method(method)


def test_an_unused_parameter_of_a_method() -> None:
    with pytest.raises(InputError, match="no part of 'ReRoPE' takes the parameter 'factor'"):
        parse("KNA@512").with_method("ReRoPE", factor=8)


def test_filling_what_is_open() -> None:
    spec = parse("CosA-logn-YaRN")
    assert str(spec) == "CosA-logn-YaRN"
    assert str(spec.resolve(512, 8)) == "CosA-logn-YaRN(factor=8)@512"
    assert str(parse("KNA-YaRN(factor=4)").resolve(512, 8)) == "KNA-YaRN(factor=4)@512"
    assert str(parse("KNA-ReRoPE").resolve(512)) == "KNA-ReRoPE(window=128)@512"
    assert str(parse("KNA-ReRoPE(window=9)").resolve(512)) == "KNA-ReRoPE(window=9)@512"
    assert str(parse("QKNorm2020").resolve(64)) == "QKNorm2020(length=64)@64"
    done = parse("KNA-logn@512")
    assert done.resolve() == done.resolve(512) == done.resolve(factor=8) == done


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        ("KNA-YaRN@512", "YaRN in .* needs factor"),
        ("KNA-NTK@512", "NTK in .* needs factor"),
        ("KNA-PI", "PI in .* needs factor"),
        ("KNA-ReRoPE", "ReRoPE in .* needs window"),
        ("KNA-logn", "logn in .* needs train_length"),
        ("KNA-logn+", r"logn\+ in .* needs train_length"),
        ("CosA", "CosA in .* needs train_length"),
        ("QKNorm2020", "QKNorm2020 in .* needs length"),
        ("KNA-YaRN(factor=8)", "YaRN in .* needs train_length"),
    ],
)
def test_what_stays_open_is_refused(text: str, lack: str) -> None:
    spec = parse(text)
    with pytest.raises(InputError, match=lack):
        spec.resolve()
    with pytest.raises(InputError, match=lack):
        Score(spec, 1, 4)


def test_two_training_lengths_contradict() -> None:
    with pytest.raises(InputError, match="KNA@512 is for a training length of 512, but 256"):
        parse("KNA@512").resolve(256)


def test_a_score_takes_only_methods_of_its_own_training() -> None:
    score = Score("KNA-logn@512", 2, 8)
    trained = score.spec
    score.use(trained.with_method("YaRN", factor=8))
    assert str(score.spec) == "KNA-logn-YaRN(factor=8)@512"
    score.use(trained)
    assert score.spec == trained
    for other in ("KNA@512", "QNA-logn@512", "KNA-logn-NoPE@512", "KNA-logn-RoPE(base=50)@512"):
        with pytest.raises(InputError, match="the trained parts differ"):
            score.use(parse(other))
    with pytest.raises(InputError, match="training length of 256, but 512"):
        score.use(parse("KNA-logn@256"))
    with pytest.raises(InputError, match="needs factor"):
        score.use(trained.with_method("YaRN"))
    assert score.spec == trained
    assert "KNA-logn@512" in repr(score)

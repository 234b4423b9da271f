"""Names are specifications: reading them, printing them, refusing what means nothing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from normattn import InputError, ScoreSpec
from normattn.score.parts import parts


def parse(text: str, **parameters: Any) -> ScoreSpec:
    return ScoreSpec.parse(text, **parameters)


@pytest.mark.parametrize(
    ("text", "name", "printed"),
    [
        ("Baseline", "Baseline", "Baseline"),
        ("Baseline-RoPE", "Baseline", "Baseline"),
        ("Baseline-RoPE(base=10000,layout=half)@64", "Baseline", "Baseline@64"),
        ("KNA-RoPE(base=5e5)", "KNA-RoPE", "KNA-RoPE(base=500000)"),
        ("KNA-logn@512", "KNA-logn", "KNA-logn@512"),
        ("CosA-logn-YaRN(factor=8)@512", "CosA-logn-YaRN", "CosA-logn-YaRN(factor=8)@512"),
        ("CosA-YaRN(factor=8)-logn@512", "CosA-logn-YaRN", "CosA-logn-YaRN(factor=8)@512"),
        ("KNA-logn+@512", "KNA-logn+", "KNA-logn+@512"),
        ("KNA-logn+-ReRoPE@512", "KNA-ReRoPE-logn+", "KNA-ReRoPE(window=128)-logn+@512"),
        ("CosA(c=3.5)", "CosA", "CosA(c=3.5)"),
        ("CosA(c=4)", "CosA", "CosA"),
        ("QNA-ReRoPE", "QNA-ReRoPE", "QNA-ReRoPE"),
        ("QNA-ReRoPE@512", "QNA-ReRoPE", "QNA-ReRoPE(window=128)@512"),
        ("QNA-ReRoPE( window = 128 )", "QNA-ReRoPE", "QNA-ReRoPE(window=128)"),
        ("QKRMSNorm(gain=false)", "QKRMSNorm", "QKRMSNorm(gain=false)"),
        ("KLayerNorm(across=all,eps=1e-5)", "KLayerNorm", "KLayerNorm(across=all,eps=1e-05)"),
        ("Baseline-NTK-mixed(factor=2)", "Baseline-NTKMixed", "Baseline-NTKMixed(factor=2)"),
        (" KNA-NoPE ", "KNA-NoPE", "KNA-NoPE"),
        ("QKNorm2020@8", "QKNorm2020", "QKNorm2020(length=8)@8"),
    ],
)
def test_reading_and_printing(text: str, name: str, printed: str) -> None:
    spec = parse(text)
    assert spec.name == name
    assert str(spec) == printed
    assert parse(printed) == spec
    assert hash(parse(printed)) == hash(spec)


def test_parameters_may_stand_beside_the_text() -> None:
    spec = parse("CosA-logn-YaRN", train_length=512, factor=8)
    assert spec == parse("CosA-logn-YaRN(factor=8)@512")
    assert parse("KNA-ReRoPE", window=128) == parse("KNA-ReRoPE(window=128)")
    assert parse("KNA-RoPE", layout="interleaved") == parse("KNA-RoPE(layout=interleaved)")
    assert parse("QKRMSNorm", gain=False) == parse("QKRMSNorm(gain=false)")
    assert parse("KNA@512", train_length=512) == parse("KNA@512")


def test_the_defaults_of_the_literature() -> None:
    spec = parse("CosA-YaRN(factor=8)@512")
    assert (spec.variant.base(64, 512)) == pytest.approx(4 * 5.545177444479562)
    assert parse("KNA-ReRoPE", train_length=512) == parse("KNA-ReRoPE(window=128)@512")
    assert parse("KNA-ReRoPE", train_length=2) == parse("KNA-ReRoPE(window=1)@2")


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("KNB", "KNA"),
        ("kna", "KNA"),
        ("Baselin", "Baseline"),
        ("Baseline-Yarn(factor=8)", "YaRN"),
        ("Baseline-ReROPE", "ReRoPE"),
        ("Baseline-log", "logn"),
        ("QKRMSnorm", "QKRMSNorm"),
    ],
)
def test_an_unknown_name_gets_its_nearest(text: str, near: str) -> None:
    with pytest.raises(InputError, match=f"unknown score part .*did you mean .*{near}"):
        parse(text)


def test_a_name_near_nothing() -> None:
    with pytest.raises(InputError, match=r"unknown score part 'Zzzzzzzz'; `normattn list`"):
        parse("Zzzzzzzz")


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "-", "KNA-", "-KNA", "KNA--YaRN", "KNA YaRN", "KNA@", "KNA@x", "@512"),
        *("KNA(", "KNA)", "CosA(c=4", "CosA(c=4))", "CosA((c=4))", "KNA@512-YaRN", "KNA@-5", "1"),
    ],
)
def test_what_is_not_a_score_at_all(text: str) -> None:
    with pytest.raises(InputError, match="is not a score: expected names joined by hyphens"):
        parse(text)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # combinations
    ("Baseline-KNA", {}, "Baseline and KNA cannot be combined: both choose the variant"),
    ("KNA-logn-logn+", {}, r"logn and logn\+ cannot be combined: both choose the logn"),
    ("KNA-YaRN-NTK", {}, "YaRN and NTK cannot be combined: both choose the rope scaling"),
    ("KNA-RoPE-NoPE", {}, "RoPE and NoPE cannot be combined: both choose the position"),
    ("KNA-NoPE-ReRoPE", {}, "ReRoPE on NoPE makes no sense: ReRoPE changes rotary positions"),
    ("KNA-NoPE-YaRN(factor=2)", {}, "YaRN on NoPE makes no sense"),
    ("KNA-NoPE-PI(factor=2)", {}, "PI on NoPE makes no sense"),
    ("KNA-ReRoPE-YaRN", {}, "ReRoPE and YaRN cannot be combined: .*nothing is left to stretch"),
    ("QKBatchNorm-ReRoPE", {}, "statistics across the sequence .* causal attention only"),
    ("YaRN(factor=2)", {}, "needs a variant first, e.g. Baseline"),
    ("logn", {}, "needs a variant first"),
    # parameters
    ("KNA", {"factor": 8}, "no part of 'KNA' takes the parameter 'factor'"),
    ("KNA-YaRN(factor=2)", {"factor": 8}, "takes the parameter 'factor', or it has it already"),
    ("KNA-RoPE-ABF", {"base": 1e6}, "two parts of 'KNA-RoPE-ABF' take 'base'"),
    ("KNA(c=4)", {}, "KNA has no parameter 'c'; it has no parameters"),
    ("CosA(d=4)", {}, "CosA has no parameter 'd'; it has c"),
    ("CosA(c)", {}, "'c' is not one new field=value"),
    ("CosA(c=4,c=4)", {}, "'c=4' is not one new field=value"),
    # values
    ("CosA(c=four)", {}, "CosA: c must be a number, but it is 'four'"),
    ("CosA(c=0)", {}, "CosA: c must be a number above 0, but it is 0"),
    ("CosA(c=nan)", {}, "CosA: c must be a number above 0"),
    ("CosA", {"c": None}, "CosA: c must be a number, but it is None"),
    ("CosA", {"c": True}, "CosA: c must be a number, but it is True"),
    ("KNA-YaRN(factor=0.5)", {}, "YaRN: factor must be a number of at least 1, but it is 0.5"),
    ("KNA-NTK(factor=inf)", {}, "NTK: factor must be a number of at least 1, but it is inf"),
    ("KNA-YaRN(beta_fast=inf)", {}, "beta_fast must be"),
    ("KNA-YaRN(beta_slow=0)", {}, "beta_slow must be a number above 0"),
    ("KNA-YaRN(beta_fast=1,beta_slow=2)", {}, "beta_fast must be"),
    ("KNA-NTKMixed(b=0)", {}, "b must be a number above 0"),
    ("KNA-ReRoPE(window=0)", {}, "window must be a number (of )?at least 1, but it is 0"),
    ("KNA-ReRoPE(window=2.5)", {}, "window must be a whole number, but it is '2.5'"),
    ("KNA-RoPE(base=1)", {}, "base must be a number above 1"),
    ("KNA-ABF(base=inf)", {}, "base must be a number above 1"),
    ("KNA-RoPE(layout=third)", {}, "layout must be 'half' or 'interleaved', but it is 'third'"),
    ("QKRMSNorm(gain=1)", {}, "gain must be true or false, but it is '1'"),
    ("QKRMSNorm(eps=-1)", {}, "eps must be a number of at least 0, but it is -1"),
    ("QKBatchNorm(eps=inf)", {}, "eps must be a number of at least 0, but it is inf"),
    (
        "QKLayerNorm(across=heads)",
        {},
        "across must be 'head' or 'all' or 'each', but it is 'heads'",
    ),
    ("QKNorm2020(length=1)", {}, "length must be a number (of )?at least 2"),
    # the training length
    ("KNA@1", {}, "training length must be a whole number of at least 2, but it is 1"),
    ("KNA", {"train_length": 0}, "training length must be a whole number of at least 2"),
    ("KNA@512", {"train_length": 256}, "says a training length of 512, but 256 was given"),
]


@pytest.mark.parametrize(("text", "parameters", "reason"), REFUSED)
def test_refusals_say_why(text: str, parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse(text, **parameters)


def test_the_registry_describes_every_part() -> None:
    for name, part in parts().items():
        assert part.name == name
        assert "-" not in name
        assert part.when in ("trained-in", "post-hoc", "either")
        assert part.summary
        assert part.equation
        assert part.source
        assert part.__doc__


def test_a_specification_can_be_pickled() -> None:
    for text in ("KNA-logn@512", "QKLayerNorm", "KInstanceNorm(gain=false)", "QNA-ReRoPE@8"):
        spec = parse(text)
        assert pickle.loads(pickle.dumps(spec)) == spec


class _Config(BaseModel):
    score: ScoreSpec


def test_a_field_of_a_configuration() -> None:
    spec = parse("CosA-logn-YaRN(factor=8)@512")
    for value in (spec, str(spec)):
        assert _Config.model_validate({"score": value}).score == spec
    text = _Config(score=spec).model_dump_json()
    assert text == '{"score":"CosA-logn-YaRN(factor=8)@512"}'
    assert _Config.model_validate_json(text).score == spec


@pytest.mark.parametrize("value", ["KNB", 3, None, ["KNA"]])
def test_a_field_of_a_configuration_that_is_no_score(value: Any) -> None:
    with pytest.raises(ValidationError, match="score"):
        _Config.model_validate({"score": value})

"""Names are specifications: reading, printing, filling, taking apart, layers, and refusals."""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from normattn import InputError, Score, ScoreSpec
from normattn.score.parts import Variant, base, parts, register

parse = ScoreSpec.parse
# What is typed, and how it is printed.
PRINTED = {
    "Baseline-RoPE(base=10000,layout=half)@64": "Baseline@64",
    "KNA-RoPE(base=5e5)": "KNA-RoPE(base=500000)",
    "CosA-YaRN(factor=8)-logn@512": "CosA-logn-YaRN(factor=8)@512",
    "KNA-logn+-ReRoPE@512": "KNA-ReRoPE(window=128)-logn+@512",
    "KNA-ReRoPE@2": "KNA-ReRoPE(window=1)@2",
    "CosA(c=4)": "CosA",
    "QNA-ReRoPE( window = 128 )": "QNA-ReRoPE(window=128)",
    "KLayerNorm(across=all,eps=1e-5)": "KLayerNorm(across=all,eps=1e-05)",
    " KNA-NoPE ": "KNA-NoPE",
    "QKNorm2020@8": "QKNorm2020(length=8)@8",
    "Baseline-NTK-mixed(factor=2)": "Baseline-NTKMixed(factor=2)",
    "Baseline-NTK-old(factor=2)": "Baseline-NTKOld(factor=2)",
    "Baseline-NTK-fixed(factor=2)": "Baseline-NTK(factor=2)",
    "Baseline-KERPLE-log": "Baseline-KERPLELog",
    "Baseline-KERPLE-power-Sink": "Baseline-KERPLEPower-Sink",
    "KNA-LongRoPE(factors=1:1.5:4)": "KNA-LongRoPE(factors=1:1.5:4)",
    "Baseline-ALiBi-RoPE": "Baseline-RoPE-ALiBi",
    "Baseline-NoPE-ALiBi": "Baseline-ALiBi",
    "KNA-StreamingLLM@512": "KNA-StreamingLLM(window=508)@512",
    "KNA-StreamingLLM@3": "KNA-StreamingLLM(window=1)@3",
    "KNA-Temperature@512": "KNA-Temperature(length=512)@512",
    "KNA-FullEvery@512": "KNA-FullEvery(window=128)@512",
    "KNA-DualChunk@512": "KNA-DualChunk(size=384,local=128)@512",
    "KNA-Gate(per=head)-Sink": "KNA-Sink-Gate(per=head)",
    "QKRMSNorm-Packed-Sink-NoPEEvery-RotateFirst": "QKRMSNorm-RotateFirst-Sink-Packed-NoPEEvery",
}


@pytest.mark.parametrize("text", PRINTED)
def test_reading_and_printing(text: str) -> None:
    spec = parse(text)
    assert str(spec) == PRINTED[text]
    assert spec.name == re.sub(r"\([^)]*\)|@\d+", "", PRINTED[text])
    again = parse(PRINTED[text])
    assert again == spec
    assert hash(again) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_parameters_may_stand_beside_the_text() -> None:
    whole = parse("CosA-logn-YaRN(factor=8)@512")
    assert parse("CosA-logn-YaRN", train_length=512, factor=8) == whole
    assert parse("KNA-RoPE", layout="interleaved") == parse("KNA-RoPE(layout=interleaved)")
    assert parse("QKRMSNorm", gain=False) == parse("QKRMSNorm(gain=false)")
    assert parse("KNA@512", train_length=512) == parse("KNA@512")


def test_a_part_is_described_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, part in parts().items():
        assert part.name == name
        assert all((part.summary, part.equation, part.source, part.__doc__))
    monkeypatch.setattr(base, "_PARTS", dict(base._PARTS))

    @register
    class Halved(Variant):
        """Scores are halved.

        For a test.
        """

        equation, source = "s = ⟨q, k⟩/2√d", "a test"

    assert (Halved.name, Halved.summary) == ("Halved", "Scores are halved")
    assert parse("Halved-logn@8").name == "Halved-logn"
    with pytest.raises(InputError, match="Halved is registered already"):
        register(Halved)


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "-", "KNA-", "-KNA", "KNA--YaRN", "KNA YaRN", "KNA@", "KNA@x", "@512", "1"),
        *("KNA(", "KNA)", "CosA(c=4", "CosA(c=4))", "CosA((c=4))", "KNA@512-YaRN", "KNA@-5"),
    ],
)
def test_what_is_not_a_score_at_all(text: str) -> None:
    with pytest.raises(InputError, match="is not a score"):
        parse(text)


NEAREST = {"KNB": "KNA", "kna": "KNA", "Baselin": "Baseline", "QKRMSnorm": "QKRMSNorm"}
NEAREST |= {"Baseline-Yarn(factor=8)": "YaRN", "Baseline-ReROPE": "ReRoPE"}


@pytest.mark.parametrize(
    ("text", "parameters", "named"),
    [
        *((text, {}, f"unknown component .*mean .*{near}") for text, near in NEAREST.items()),
        ("YaRN(factor=2)", {}, "variant"),
        ("Zzzzzzzz", {}, "Zzzzzzzz"),
        ("KNA", {"factor": 8}, "factor"),
        ("KNA-YaRN(factor=2)", {"factor": 8}, "factor"),
        ("KNA-RoPE-ABF", {"base": 1e6}, "base"),
        ("KNA(c=4)", {}, "no parameter 'c'"),
        ("CosA(d=4)", {}, "no parameter 'd'; it has c"),
        ("CosA(c)", {}, "'c'"),
        ("CosA(c=4,c=4)", {}, "c=4"),
        ("CosA", {"c": None}, "None"),
        ("CosA", {"c": True}, "True"),
        ("KNA@1", {}, "at least 2"),
        ("KNA", {"train_length": 0}, "at least 2"),
        ("KNA@512", {"train_length": 256}, "512.*256"),
    ],
)
def test_parameters_that_cannot_be(text: str, parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse(text, **parameters)


OUT_OF_RANGE = (
    "CosA(c=four) CosA(c=0) CosA(c=nan) Baseline(scale=0) QKRMSNorm(scale=-1) "
    "QKRMSNorm(gain=1) QKRMSNorm(eps=-1) QKBatchNorm(eps=inf) QKLayerNorm(across=heads) "
    "QKNorm2020(length=1) SSMax(bias=2) Temperature(beta=-1) Temperature(shift=2) "
    "Temperature(length=0) RoPE(base=1) RoPE(layout=third) RoPE(direction=up) XPos(gamma=0) "
    "XPos(scale=-1) PartialRoPE(fraction=0) PartialRoPE(fraction=1.5) PartialRoPE(side=left) "
    "PRoPE(fraction=0) ABF(base=inf) NTK(factor=inf) NTKMixed(b=0) YaRN(factor=0.5) "
    "YaRN(beta_fast=inf) YaRN(beta_slow=0) YaRN(beta_fast=0.5) YaRN(sharpness=-1) "
    "Llama3(high=1) Llama3(low=0) LongRoPE(factors=1:0) LongRoPE(factors=1:x) "
    "ClippedRoPE(clip=-1) DynamicNTK(factor=0) ReRoPE(window=0) ReRoPE(window=2.5) "
    "T5Bias(buckets=1) T5Bias(max_distance=4) "
    "LeakyReRoPE(s=0.5) LeakyReRoPE(window=0) SelfExtend(group=0) SelfExtend(window=0) "
    "StreamingLLM(sinks=-1) StreamingLLM(window=0) DualChunk(size=0) DualChunk(local=0) "
    "FIRE(threshold=0) FIRE(width=0) CoPE(positions=1) SoftCap(cap=0) Sigmoid(tokens=0) "
    "Differential(init=1) Differential(eps=-1) Gate(per=row) Gate(act=tanh) "
    "SlidingWindow(window=0) Chunked(size=0) Packed(separator=-1) HWFA(window=0) "
    "NoPEEvery(every=1) FullEvery(every=1) FullEvery(window=0) FullEvery(base=1) "
    "FullEvery(stretch=0.5) IRoPE(every=1) IRoPE(beta=-1) IRoPE(length=0)"
)
SENSELESS = (
    "Baseline-KNA KNA-logn-logn+ KNA-YaRN-NTK KNA-RoPE-NoPE KNA-ALiBi-KERPLELog "
    "KNA-XPos-PartialRoPE KNA-HWFA-NoPEEvery KNA-NTKOld-NTKMixed KNA-PRoPE-PartialRoPE "
    "KNA-logn-SSMax KNA-Chunked-SlidingWindow KNA-FoX-ALiBi KNA-Sigmoid-Selective "
    "KNA-NoPE-ReRoPE KNA-NoPE-YaRN KNA-NoPE-PI KNA-ReRoPE-YaRN KNA-SelfExtend-DynamicNTK "
    "KNA-DualChunk-PI QKBatchNorm-ReRoPE KBatchNorm-DynamicNTK KBatchNorm-StreamingLLM "
    "KBatchNorm-FoX QInstanceNorm-StickBreaking Baseline-RotateFirst KNA-NoPE-RotateFirst "
    "KNA-XPos-RotateFirst KNA-PoPE-RotateFirst KNA-SlidingWindow-YaRN KNA-SlidingWindow-ReRoPE "
    "KNA-ALiBi-YaRN KNA-HWFA-SlidingWindow KNA-RoPE-ALiBi-HWFA KNA-RoPE-ALiBi-NoPEEvery "
    "KNA-RoPE-ALiBi-IRoPE KNA-RoPE-FoX-NoPEEvery KNA-HWFA-YaRN KNA-HWFA-logn+ "
    "KNA-NoPE-NoPEEvery KNA-NoPE-IRoPE KNA-FullEvery-SlidingWindow "
    "KNA-YaRN-FullEvery(stretch=8) KNA-NoPE-FullEvery(base=50) KNA-logn-IRoPE KNA-XPos-DroPE "
    "KNA-NoPE-ClippedRoPE KNA-Chunked-Packed KNA-Chunked-ReRoPE KNA-FoX-SoftCap "
    "KNA-FoX-RealFormer KNA-RealFormer-ReRoPE KNA-ResidualQK-DynamicNTK "
    "KNA-RealFormer-FullEvery KNA-Sigmoid-Sink KNA-Selective-DualChunk "
    "KNA-RealFormer-DualChunk KNA-SlidingWindow-DualChunk KNA-Chunked-DualChunk "
    "KBatchNorm-CoPE Baseline-CoPE-YaRN KNA-NoPE-DualChunk KBatchNorm-DualChunk "
    "CoPE-QKRMSNorm-RotateFirst Baseline-NEZHA-Differential Baseline-NEZHA-XSA "
    "Baseline-NEZHA-VORoPE KNA-XSA-Differential KNA-VORoPE-Differential KNA-XSA-ValueResidual "
    "Baseline-Differential-DifferentialV2"
)


@pytest.mark.parametrize("text", OUT_OF_RANGE.split())
def test_values_out_of_their_range(text: str) -> None:
    """The sentence names the part, the parameter and the value."""
    name, field, value = re.fullmatch(r"(\w+)\((\w+)=(.*)\)", text).groups()  # type: ignore[union-attr]
    own = parts()[name].slot == "variant"
    with pytest.raises(InputError) as refused:
        parse(text if own else f"KNA-{text}")
    said = str(refused.value)
    assert said.startswith(f"{name}: {field} must be ")
    assert value.split(":")[-1].removesuffix(".0") in said


@pytest.mark.parametrize("text", SENSELESS.split())
def test_combinations_without_a_sense(text: str) -> None:
    """The sentence names two of the parts and says that they do not go together."""
    names = re.sub(r"\([^)]*\)", "", text).split("-")
    with pytest.raises(InputError, match=r"cannot be combined|is not possible") as refused:
        parse(text)
    assert sum(name in str(refused.value) for name in names) >= 2


# What each lacks when it is resolved.
OPEN = {
    "train_length": (
        "KNA-DynamicNTK KNA-LongRoPE(factor=2) KNA-Llama3(factor=2) KNA-YaRN(factor=8) KNA-HWFA "
        "KNA-SSMax KNA-SqrtLogN KNA-logn KNA-logn+ CosA KNA-LeakyReRoPE(window=9,s=2)-logn"
    ),
    "factor": "KNA-LongRoPE@8 KNA-YaRN@512 KNA-NTK@512 KNA-PI",
    "window": "KNA-StreamingLLM KNA-SlidingWindow KNA-FullEvery KNA-ReRoPE",
    "s": "KNA-LeakyReRoPE@8",
    "group": "KNA-SelfExtend@8",
    "size": "KNA-Chunked KNA-DualChunk",
    "length": "KNA-Temperature QKNorm2020",
    "clip": "KNA-ClippedRoPE",
    "threshold": "KNA-FIRE",
    "tokens": "KNA-Sigmoid",
}


@pytest.mark.parametrize("lack", OPEN)
def test_what_stays_open_is_refused(lack: str) -> None:
    for text in OPEN[lack].split():
        for use in (ScoreSpec.resolve, lambda spec: Score(spec, 1, 4)):
            with pytest.raises(InputError, match=f"needs {lack}="):
                use(parse(text))


def test_filling_what_is_open_and_adding_a_method() -> None:
    assert str(parse("CosA-logn-YaRN").resolve(512, 8)) == "CosA-logn-YaRN(factor=8)@512"
    assert str(parse("KNA-YaRN(factor=4)").resolve(512, 8)) == "KNA-YaRN(factor=4)@512"
    assert str(parse("KNA-ReRoPE(window=9)").resolve(512)) == "KNA-ReRoPE(window=9)@512"
    assert parse("KNA-LeakyReRoPE").resolve(64, 4).text == "KNA-LeakyReRoPE(window=16,s=5)"
    done = parse("KNA-logn@512")
    assert done.resolve() == done.resolve(512) == done.resolve(factor=8) == done
    with pytest.raises(InputError, match="512, but 256"):
        done.resolve(256)
    assert done.with_method("") == done.with_method("as is") == done
    assert str(done.with_method("YaRN", factor=8)) == "KNA-logn-YaRN(factor=8)@512"


@pytest.mark.parametrize(
    ("text", "variant", "method"),
    [
        ("KNA-logn@512", "KNA-logn", ""),
        ("KNA-logn+@512", "KNA", "logn+"),
        ("CosA-logn-YaRN(factor=8)@512", "CosA-logn", "YaRN"),
        ("CosA-NTK(factor=8)-logn+@512", "CosA", "NTK-logn+"),
        ("QNA-NoPE@512", "QNA-NoPE", ""),
        ("QNA-RoPE(base=50)-ReRoPE@512", "QNA-RoPE(base=50)", "ReRoPE"),
        ("KNA-ReRoPE(window=64)-logn+@512", "KNA", "ReRoPE(window=64)-logn+"),
        ("KNA-DualChunk(size=4)@16", "KNA", "DualChunk(size=4,local=12)"),
    ],
)
def test_what_was_trained_and_what_came_after(text: str, variant: str, method: str) -> None:
    spec = parse(text)
    assert (spec.variant_name, spec.method_name) == (variant, method)
    assert spec.method == re.sub(r"\([^)]*\)", "", method)
    assert spec.trained.method == ""
    for added in (spec.method_text, f"{spec.method_text}@{spec.train_length}"):
        if spec.method_text:
            assert spec.trained.with_method(added) == spec


@pytest.mark.parametrize(
    ("spec", "method", "named"),
    [
        ("KNA@512", "logn", "logn is a training-time component"),
        ("KNA@512", "CosA", "CosA is a training-time component"),
        ("KNA@512", "NoPE", "NoPE is a training-time component"),
        ("KNA-NoPE@512", "YaRN", "YaRN cannot be combined with NoPE"),
        ("KNA-logn@512", "logn+", "logn"),
        ("KNA-YaRN(factor=2)@512", "NTK", "NTK"),
        ("KNA@512", "YaRN(factor=2)@1024", "1024"),
        ("KNA@512", "Yarn", "did you mean YaRN"),
        ("KNA@512", "YaRN(window=3)", "window"),
    ],
)
def test_methods_that_cannot_be_added(spec: str, method: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse(spec).with_method(method)


def test_a_score_takes_only_methods_of_its_own_training() -> None:
    score = Score("KNA-logn@512", 2, 8)
    trained = score.spec
    score.use(trained.with_method("YaRN", factor=8))
    assert str(score.spec) == "KNA-logn-YaRN(factor=8)@512"
    score.use(trained)
    for other in ("KNA@512", "KNA-logn-NoPE@512", "KNA-logn@256"):
        with pytest.raises(InputError, match=r"differ|256"):
            score.use(parse(other))
    with pytest.raises(InputError, match="needs factor"):
        score.use(trained.with_method("YaRN"))
    assert score.spec == trained
    assert "KNA-logn@512" in repr(score)


def test_a_field_of_a_configuration() -> None:
    spec, field = parse("CosA-logn-YaRN(factor=8)@512"), TypeAdapter(ScoreSpec)
    for value in (spec, str(spec)):
        assert field.validate_python(value) == spec
    assert field.dump_json(spec) == b'"CosA-logn-YaRN(factor=8)@512"'
    for wrong in ("KNB", 3, None, ["KNA"]):
        with pytest.raises(ValidationError, match="1 validation error"):
            field.validate_python(wrong)


# Layouts, and the scores of their layers.
LAYERS = {
    "KNA-HWFA@512": ["KNA-SlidingWindow(window=128)@512"] * 3 + ["KNA-logn-NoPE@512"],
    "KNA-logn-HWFA(window=5)@512": ["KNA-logn-SlidingWindow(window=5)@512", "KNA-logn-NoPE@512"],
    "QKRMSNorm-RotateFirst-SoftCap-Packed-HWFA@512": ["QKRMSNorm-logn-NoPE-SoftCap-Packed@512"],
    "KNA-NoPEEvery(every=3)@64": ["KNA@64", "KNA@64", "KNA-NoPE@64"] * 2,
    "KNA-logn+-YaRN(factor=8)-SoftCap-NoPEEvery(every=2)@64": [
        "KNA-YaRN(factor=8)-SoftCap-logn+@64",
        "KNA-NoPE-SoftCap-logn+@64",
    ],
    "KNA-SlidingWindow(window=9)-NoPEEvery(every=2)@64": [
        "KNA-SlidingWindow(window=9)@64",
        "KNA-NoPE@64",
    ],
    "KNA-FullEvery(every=3)@64": [*["KNA-SlidingWindow(window=16)@64"] * 2, "KNA@64"],
    "QKRMSNorm-FullEvery(every=2,window=9,base=1000000,stretch=8)@64": [
        "QKRMSNorm-SlidingWindow(window=9)@64",
        "QKRMSNorm-RoPE(base=1000000)-PI(factor=8)@64",
    ],
    "KNA-YaRN(factor=8)-Sink-FullEvery(window=9)@64": [
        "KNA-Sink-SlidingWindow(window=9)@64",
        "KNA-YaRN(factor=8)-Sink@64",
    ],
    "KNA-YaRN(factor=8)-FullEvery(window=9,stretched=true)@64": [
        "KNA-YaRN(factor=8)-SlidingWindow(window=9,stretched=true)@64",
        "KNA-YaRN(factor=8)@64",
    ],
    "KNA-logn+-ReRoPE(window=5)-FullEvery(window=9)@64": [
        "KNA-SlidingWindow(window=9)-logn+@64",
        "KNA-ReRoPE(window=5)-logn+@64",
    ],
    "QKRMSNorm(gain=false)-RotateFirst-RoPE(layout=interleaved)-IRoPE(every=2,length=64)": [
        "QKRMSNorm(gain=false)-RotateFirst-RoPE(layout=interleaved)",
        "Baseline-Temperature(length=64,shift=1)-NoPE",
    ],
    "QKRMSNorm(scale=0.5)-IRoPE(every=2,beta=0)": [
        "QKRMSNorm(scale=0.5)",
        "Baseline(scale=0.5)-NoPE",
    ],
    "KNA-Differential@64": [
        f"KNA-Differential(init={0.8 - 0.6 * math.exp(-0.3 * layer)})@64" for layer in range(3)
    ],
    "KNA-Differential(init=0.8)@64": ["KNA-Differential(init=0.8)@64"] * 3,
}


@pytest.mark.parametrize("text", LAYERS)
def test_the_scores_of_layers(text: str) -> None:
    spec, layers = parse(text).resolve(), len(LAYERS[text])
    assert [str(spec.layer(layer, layers)) for layer in range(layers)] == LAYERS[text]


@pytest.mark.parametrize("layers", [2, 3, 8])
@pytest.mark.parametrize("length", [2, 3, 64, 100])
def test_the_largest_window_of_hwfa(layers: int, length: int) -> None:
    window, _ = parse("KNA-HWFA", train_length=length).layer(0, layers).window
    assert window is not None
    reaches = [(w - 1) * (layers - 1) + 1 for w in (window, window + 1)]
    assert reaches[0] <= 0.75 * length < reaches[1]
    wide = parse(f"KNA-HWFA(window={window + 1})@{length}")
    with pytest.raises(InputError, match=f"window at most {window}"):
        wide.layer(0, layers)


def test_a_layout_is_trained_in_and_a_method_reaches_its_layers() -> None:
    spec = parse("KNA-NoPEEvery(every=2)@64")
    added = spec.with_method("SelfExtend", group=2)
    assert added.trained == spec
    for layer in range(2):
        score = Score(spec.layer(layer, 2), 2, 8)
        score.use(added.layer(layer, 2))
        assert (score.spec.remapping is None) == (layer == 1)
    with pytest.raises(InputError, match="differs from layer to layer"):
        Score(spec, 2, 8)

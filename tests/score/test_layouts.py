"""Scores that differ from layer to layer, and combinations of new parts that make no sense."""

from __future__ import annotations

import pytest

from normattn import InputError, Score, ScoreSpec

parse = ScoreSpec.parse


def _layers(text: str, layers: int) -> list[str]:
    spec = parse(text).resolve()
    return [str(spec.layer(layer, layers)) for layer in range(layers)]


def test_hwfa_has_windows_below_and_one_full_layer_on_top() -> None:
    below = "KNA-SlidingWindow(window=128)@512"
    assert _layers("KNA-HWFA@512", 4) == [below] * 3 + ["KNA-logn-NoPE@512"]
    assert _layers("KNA-logn-HWFA(window=5)@512", 2) == [
        "KNA-logn-SlidingWindow(window=5)@512",
        "KNA-logn-NoPE@512",
    ]
    assert _layers("KNA-HWFA@512", 1) == ["KNA-logn-NoPE@512"]
    top = _layers("QKRMSNorm-RotateFirst-SoftCap-Sink-Packed-HWFA@512", 3)[-1]
    assert top == "QKRMSNorm-logn-NoPE-SoftCap-Sink-Packed@512"


@pytest.mark.parametrize("layers", range(2, 9))
@pytest.mark.parametrize("length", [2, 3, 8, 64, 100, 512])
def test_the_largest_window_of_hwfa(layers: int, length: int) -> None:
    visible = parse("KNA-HWFA", train_length=length).layer(0, layers).window
    assert visible[0] is not None

    def fits(window: int) -> bool:
        return (window - 1) * (layers - 1) + 1 <= 0.75 * length

    assert fits(visible[0])
    assert not fits(visible[0] + 1)
    assert parse(f"KNA-HWFA(window={visible[0]})@{length}").layer(0, layers).window == visible
    wide = parse(f"KNA-HWFA(window={visible[0] + 1})@{length}")
    with pytest.raises(InputError, match=f"window at most {visible[0]}"):
        wide.layer(0, layers)


def test_nope_in_every_so_many_layers() -> None:
    assert _layers("KNA-NoPEEvery(every=3)@64", 6) == ["KNA@64", "KNA@64", "KNA-NoPE@64"] * 2
    assert _layers("KNA-NoPEEvery(every=7)@64", 6) == ["KNA@64"] * 6
    assert _layers("KNA-NoPEEvery", 4) == ["KNA"] * 3 + ["KNA-NoPE"]
    stretched = "KNA-logn+-YaRN(factor=8)-SoftCap-NoPEEvery(every=2)@64"
    assert _layers(stretched, 2) == [
        "KNA-YaRN(factor=8)-SoftCap-logn+@64",
        "KNA-NoPE-SoftCap-logn+@64",
    ]
    assert _layers("KNA-SlidingWindow(window=9)-NoPEEvery(every=2)@64", 2) == [
        "KNA-SlidingWindow(window=9)@64",
        "KNA-NoPE@64",
    ]


def test_full_attention_in_every_so_many_layers() -> None:
    local = "KNA-SlidingWindow(window=16)@64"
    assert _layers("KNA-FullEvery(every=3)@64", 4) == [local, local, "KNA@64", local]
    gemma = "QKRMSNorm-FullEvery(every=2,window=9,base=1000000,stretch=8)@64"
    assert _layers(gemma, 2) == [
        "QKRMSNorm-SlidingWindow(window=9)@64",
        "QKRMSNorm-RoPE(base=1000000)-PI(factor=8)@64",
    ]
    for stretched, below in ((False, ""), (True, "-YaRN(factor=8)")):
        text = f"KNA-YaRN(factor=8)-Sink-FullEvery(window=9,stretched={str(stretched).lower()})@64"
        window = (
            "SlidingWindow(window=9,stretched=true)" if stretched else "SlidingWindow(window=9)"
        )
        assert _layers(text, 2) == [f"KNA{below}-Sink-{window}@64", "KNA-YaRN(factor=8)-Sink@64"]
    regime = "KNA-logn+-ReRoPE(window=5)-FullEvery(window=9)@64"
    assert _layers(regime, 2) == [
        "KNA-SlidingWindow(window=9)-logn+@64",
        "KNA-ReRoPE(window=5)-logn+@64",
    ]


def test_layers_without_position_that_grow_sharper() -> None:
    text = "QKRMSNorm(gain=false)-RotateFirst-RoPE(layout=interleaved)-IRoPE(every=2,length=64)"
    assert _layers(text, 2) == [
        "QKRMSNorm(gain=false)-RotateFirst-RoPE(layout=interleaved)",
        "Baseline-Temperature(length=64,shift=1)-NoPE",
    ]
    assert _layers("KNA-SlidingWindow(window=3)-IRoPE(every=2,beta=0)", 2)[1] == "Baseline-NoPE"
    for variant in ("Baseline", "QKRMSNorm"):
        own = _layers(f"{variant}(scale=0.5)-IRoPE(every=2,beta=0)", 2)
        assert own == [f"{variant}(scale=0.5)", "Baseline(scale=0.5)-NoPE"]


def test_a_layout_is_trained_in_and_a_method_reaches_its_layers() -> None:
    spec = parse("KNA-NoPEEvery(every=2)@64")
    added = spec.with_method("SelfExtend", group=2)
    assert added.trained == spec
    for layer in range(2):
        score = Score(spec.layer(layer, 2), 2, 8)
        score.use(added.layer(layer, 2))
        assert (score.spec.remapping is None) == (layer == 1)
    with pytest.raises(InputError, match=r"differs from layer to layer: take spec\.layer"):
        Score(spec, 2, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Baseline-RotateFirst", "RotateFirst on Baseline makes no sense: .*normalises nothing"),
        ("KNA-NoPE-RotateFirst", "RotateFirst on NoPE makes no sense"),
        ("KNA-XPos-RotateFirst", "RotateFirst on XPos makes no sense: .*the distance alone"),
        ("KNA-SlidingWindow-YaRN", "SlidingWindow and YaRN cannot be combined"),
        ("KNA-SlidingWindow-ReRoPE", "SlidingWindow and ReRoPE cannot be combined"),
        ("KNA-ALiBi-YaRN", "YaRN on ALiBi makes no sense: YaRN changes rotary positions"),
        ("KNA-ALiBi-KERPLELog", "both choose the bias"),
        ("KNA-XPos-PartialRoPE", "both choose the position"),
        ("KNA-HWFA-SlidingWindow", "HWFA and SlidingWindow cannot be combined"),
        ("KNA-RoPE-ALiBi-HWFA", "HWFA and ALiBi cannot be combined: .*no position"),
        ("KNA-RoPE-ALiBi-NoPEEvery", "NoPEEvery and ALiBi cannot be combined"),
        ("KNA-HWFA-YaRN", "YaRN on HWFA makes no sense"),
        ("KNA-HWFA-logn+", r"logn\+ on HWFA makes no sense"),
        ("KNA-NoPE-NoPEEvery", "NoPEEvery on NoPE makes no sense"),
        ("KNA-HWFA-NoPEEvery", "both choose the layout"),
        ("KNA-SelfExtend-DynamicNTK", "SelfExtend and DynamicNTK cannot be combined"),
        ("KNA-NTK-old-NTK-mixed", "both choose the rope scaling"),
        ("KBatchNorm-DynamicNTK", "not causal, and DynamicNTK is defined for causal"),
        ("KBatchNorm-StreamingLLM", "not causal, and StreamingLLM is defined for causal"),
        ("KNA-FullEvery-SlidingWindow", "FullEvery and SlidingWindow cannot be combined"),
        ("KNA-YaRN-FullEvery(stretch=8)", "stretches the full layers too"),
        ("KNA-NoPE-FullEvery(base=50)", "without rotary positions makes no sense"),
        ("KNA-logn-IRoPE", "IRoPE and logn cannot be combined"),
        ("KNA-RoPE-ALiBi-IRoPE", "IRoPE and ALiBi cannot be combined"),
        ("KNA-NoPE-IRoPE", "IRoPE on NoPE makes no sense"),
        ("KNA-XPos-DroPE", "DroPE and XPos cannot be combined: .*by its decay"),
        ("KNA-NoPE-ClippedRoPE", "ClippedRoPE on NoPE makes no sense"),
        ("KNA-PRoPE-PartialRoPE", "both choose the position"),
        ("KNA-logn-SSMax", "both choose the logn"),
        ("KNA-Chunked-Packed", "Chunked and Packed cannot be combined: both cut a row"),
        ("KNA-Chunked-ReRoPE", "Chunked and ReRoPE cannot be combined"),
        ("KNA-Chunked-SlidingWindow", "both choose the window"),
        ("KNA-PoPE-RotateFirst", "PoPE and RotateFirst cannot be combined"),
        ("KNA-FoX-SoftCap", "FoX and SoftCap cannot be combined: the bias would be capped"),
        ("KNA-FoX-RealFormer", "FoX and RealFormer cannot be combined"),
        ("KNA-FoX-ALiBi", "both choose the bias"),
        (
            "KNA-FoX-NoPEEvery",
            "NoPEEvery and FoX cannot be combined|NoPEEvery on FoX makes no sense",
        ),
        ("KBatchNorm-FoX", "not causal, and FoX is defined for causal"),
        # values
        ("KNA-Chunked(size=0)", "Chunked: size must be a number (of )?at least 1"),
        ("KNA-SSMax(bias=2)", "SSMax: bias must be true or false"),
        ("KNA-Temperature(beta=-1)", "Temperature: beta must be a number of at least 0"),
        ("KNA-Temperature(shift=2)", "Temperature: shift must be 0 or 1"),
        ("KNA-Temperature(length=0)", "Temperature: length must be a number (of )?at least 1"),
        ("KNA-PRoPE(fraction=0)", "PRoPE: fraction must be a number above 0 and at most 1"),
        ("KNA-ClippedRoPE(clip=-1)", "ClippedRoPE: clip must be a number (of )?at least 0"),
        ("Baseline-Gate(per=row)", "Gate: per must be 'feature' or 'head'"),
        ("Baseline(scale=0)", "Baseline: scale must be a number above 0"),
        ("QKRMSNorm(scale=-1)", "QKRMSNorm: scale must be a number above 0"),
        ("KNA-YaRN(sharpness=-1)", "YaRN: sharpness must be a number (of )?at least 0"),
        ("KNA-FullEvery(every=1)", "FullEvery: every must be a number (of )?at least 2"),
        ("KNA-FullEvery(window=0)", "FullEvery: window must be a number (of )?at least 1"),
        ("KNA-FullEvery(base=1)", "FullEvery: base must be a number above 1"),
        ("KNA-FullEvery(stretch=0.5)", "FullEvery: stretch must be a number of at least 1"),
        ("KNA-IRoPE(every=1)", "IRoPE: every must be a number (of )?at least 2"),
        ("KNA-DynamicNTK(factor=0)", "DynamicNTK: factor must be a number above 0"),
        ("KNA-Llama3(low=4)", "Llama3: high must be a number above low"),
        ("KNA-Llama3(low=0)", "Llama3: low must be a number above 0"),
        ("KNA-LongRoPE(factors=1:0)", "LongRoPE: factors must be numbers above 0"),
        ("KNA-LongRoPE(factors=1:x)", "LongRoPE: factors must be a number, but it is 'x'"),
        ("KNA-LeakyReRoPE(s=0.5)", "LeakyReRoPE: s must be a number of at least 1"),
        ("KNA-LeakyReRoPE(window=0)", "LeakyReRoPE: window must be a number (of )?at least 1"),
        ("KNA-SelfExtend(group=0)", "SelfExtend: group must be a number (of )?at least 1"),
        ("KNA-SelfExtend(window=0)", "SelfExtend: window must be a number (of )?at least 1"),
        ("KNA-StreamingLLM(sinks=-1)", "StreamingLLM: sinks must be a number (of )?at least 0"),
        ("KNA-StreamingLLM(window=0)", "StreamingLLM: window must be a number (of )?at least 1"),
        ("KNA-XPos(gamma=0)", "XPos: gamma must be a number above 0"),
        ("KNA-XPos(scale=-1)", "XPos: scale must be a number above 0"),
        ("KNA-PartialRoPE(fraction=0)", "fraction must be a number above 0 and at most 1"),
        ("KNA-PartialRoPE(fraction=1.5)", "fraction must be a number above 0 and at most 1"),
        ("KNA-RoPE(direction=up)", "direction must be 'forward' or 'backward', but it is 'up'"),
        ("KNA-Gate(act=tanh)", "act must be 'sigmoid' or 'softplus', but it is 'tanh'"),
        ("KNA-PartialRoPE(side=left)", "side must be 'first' or 'last', but it is 'left'"),
        ("KNA-SoftCap(cap=0)", "SoftCap: cap must be a number above 0"),
        ("KNA-SlidingWindow(window=0)", "SlidingWindow: window must be a number (of )?at least 1"),
        ("KNA-Packed(separator=-1)", "Packed: separator must be a number (of )?at least 0"),
        ("KNA-HWFA(window=0)", "HWFA: window must be a number (of )?at least 1"),
        ("KNA-NoPEEvery(every=1)", "NoPEEvery: every must be a number (of )?at least 2"),
    ],
)
def test_refusals_say_why(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse(text)


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        ("KNA-DynamicNTK", "DynamicNTK in .* needs train_length"),
        ("KNA-LongRoPE@8", "LongRoPE in .* needs factor"),
        ("KNA-LongRoPE(factor=2)", "LongRoPE in .* needs train_length"),
        ("KNA-Llama3(factor=2)", "Llama3 in .* needs train_length"),
        ("KNA-LeakyReRoPE@8", "LeakyReRoPE in .* needs s="),
        ("KNA-LeakyReRoPE(window=9,s=2)-logn", "logn in .* needs train_length"),
        ("KNA-SelfExtend@8", "SelfExtend in .* needs group"),
        ("KNA-StreamingLLM", "StreamingLLM in .* needs window"),
        ("KNA-SlidingWindow", "SlidingWindow in .* needs window"),
        ("KNA-Chunked", "Chunked in .* needs size"),
        ("KNA-HWFA", "HWFA in .* needs train_length"),
        ("KNA-SSMax", "SSMax in .* needs train_length"),
        ("KNA-SqrtLogN", "SqrtLogN in .* needs train_length"),
        ("KNA-Temperature", "Temperature in .* needs length"),
        ("KNA-ClippedRoPE", "ClippedRoPE in .* needs clip"),
        ("KNA-FullEvery", "FullEvery in .* needs window"),
    ],
)
def test_what_stays_open_is_refused(text: str, lack: str) -> None:
    with pytest.raises(InputError, match=lack):
        parse(text).resolve()


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("Baseline-NTK-old(factor=2)", "Baseline-NTKOld(factor=2)"),
        ("Baseline-NTK-fixed(factor=2)", "Baseline-NTK(factor=2)"),
        ("Baseline-KERPLE-log", "Baseline-KERPLELog"),
        ("Baseline-KERPLE-power-Sink", "Baseline-KERPLEPower-Sink"),
        ("KNA-LongRoPE(factors=1:1.5:4)", "KNA-LongRoPE(factors=1:1.5:4)"),
        ("Baseline-ALiBi-RoPE", "Baseline-RoPE-ALiBi"),
        ("Baseline-NoPE-ALiBi", "Baseline-ALiBi"),
        ("KNA-StreamingLLM@512", "KNA-StreamingLLM(window=508)@512"),
        ("KNA-StreamingLLM@3", "KNA-StreamingLLM(window=1)@3"),
        ("KNA-Temperature@512", "KNA-Temperature(length=512)@512"),
        ("KNA-FullEvery@512", "KNA-FullEvery(window=128)@512"),
        ("KNA-Gate(per=head)-Sink", "KNA-Sink-Gate(per=head)"),
        ("KNA-SlidingWindow@512", "KNA-SlidingWindow(window=128)@512"),
        (
            "QKRMSNorm-Packed-Sink-SoftCap-NoPEEvery-RotateFirst",
            "QKRMSNorm-RotateFirst-SoftCap-Sink-Packed-NoPEEvery",
        ),
    ],
)
def test_reading_and_printing(text: str, printed: str) -> None:
    assert str(parse(text)) == printed
    assert parse(printed) == parse(text)


def test_sizes_that_do_not_turn() -> None:
    for text, d in (("KNA-PartialRoPE", 1), ("KNA-XPos", 3)):
        with pytest.raises(InputError, match="needs an even head dimension"):
            Score(text, 1, d)
    assert Score("KNA-PartialRoPE", 1, 5).head_dim == 5

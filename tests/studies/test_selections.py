"""What `--methods all` means for one trained score."""

from __future__ import annotations

from normattn.lab.studies.methods import left_out, post_hoc_methods, refusal
from normattn.score import ScoreSpec
from normattn.score.parts import base as registry


def test_every_post_hoc_part_stands_alone_and_some_with_logn() -> None:
    methods = post_hoc_methods(ScoreSpec.parse("KNA", train_length=64))
    parts = [name for name, part in registry.parts().items() if part.when != "trained-in"]
    refused = " ".join(left_out(ScoreSpec.parse("KNA", train_length=64)))
    assert all(name in methods or f"with {name} is left out" in refused for name in parts)
    assert {"logn+", "PI", "NTK", "YaRN", "ReRoPE"} <= {*methods}
    assert methods[-3:] == ("NTK-logn+", "YaRN-logn+", "ReRoPE-logn+")
    assert len(set(methods)) == len(methods)
    for method in methods:
        spec = ScoreSpec.parse("KNA", train_length=64).with_method(method).resolve(factor=8)
        assert spec.variant_name == "KNA"
        assert spec.method


def test_what_a_score_cannot_take_is_left_out_with_a_sentence() -> None:
    spec = ScoreSpec.parse("KNA-NoPE", train_length=64)
    assert "logn+" in post_hoc_methods(spec)
    assert "YaRN" not in post_hoc_methods(spec)
    said = [sentence for sentence in left_out(spec) if "YaRN is left out" in sentence]
    assert said
    assert "makes no sense" in said[0]
    logn = ScoreSpec.parse("KNA-logn", train_length=64)
    assert not [method for method in post_hoc_methods(logn) if "logn+" in method]
    assert refusal(logn, "logn+") is not None
    together = (*post_hoc_methods(logn), *left_out(logn))
    every = (*post_hoc_methods(spec), *left_out(spec))
    assert len(together) == len(every)


def test_an_unknown_length_leaves_out_what_needs_it() -> None:
    assert "ReRoPE" not in post_hoc_methods(ScoreSpec.parse("KNA"))
    assert "NTK" in post_hoc_methods(ScoreSpec.parse("KNA"))

"""`verify`: equal configurations are equal, and every usual mistake is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import normattn
from normattn import InputError
from normattn.cli.app import main
from normattn.hf.engines import ENGINES, Wanted, emit
from normattn.hf.gguf import write_gguf
from normattn.hf.llama_cpp import values
from normattn.hf.plan import plan

from .families import build, configuration
from .test_gguf import _write

LENGTH, BASE, YARN = 64, 50000.0, "YaRN(factor=4)"
YARN_WORDS = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": LENGTH,
    "rope_theta": BASE,
}
STATIC = "YaRN is static: it changes short prompts too"


def _config(**more: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": BASE}
    given = {"max_position_embeddings": LENGTH, "rope_parameters": rope, **more}
    return transformers.LlamaConfig(**sizes, **heads, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with plain positions."""
    place = tmp_path_factory.mktemp("models") / "plain"
    _config().save_pretrained(place)
    return place


def _told(tmp_path: Path, content: Any, name: str = "told.json") -> Path:
    place = tmp_path / name
    place.write_text(content if isinstance(content, str) else json.dumps(content))
    return place


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["YaRN(factor=4,sharpness=0)", "PI(factor=4)"])
def test_what_is_emitted_is_as_meant(
    engine: str, method: str, folder: Path, tmp_path: Path
) -> None:
    model = transformers.LlamaForCausalLM(_config())
    text = emit(Wanted("m", plan(model, method), 4 * LENGTH, "llama"), engine)
    verdict = normattn.verify(folder, _told(tmp_path, text, "told"), method)
    assert verdict.differences == ()
    assert verdict.equal
    assert str(verdict).startswith(f"as meant: {method.split('(')[0]}")
    assert not [each for each in verdict.mistakes if "static" not in each and "switch" not in each]
    plain = normattn.verify(folder, _told(tmp_path, text, "told"), train_length=LENGTH)
    assert not plain.equal


# What the engine was told; what differs; which mistake is named.
RAISED = {"max_position_embeddings": 4 * LENGTH}
MISTAKES: dict[str, tuple[Any, str, str]] = {
    "on a multiplied length": (
        {**RAISED, "rope_parameters": {**YARN_WORDS, "original_max_position_embeddings": 256}},
        "inverse frequencies: ",
        "YaRN stands on top of a length that was multiplied already: its turns are counted within "
        "256 tokens (original_max_position_embeddings), and the weights were trained to read 64",
    ),
    "no original length": (
        {
            **RAISED,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": BASE},
        },
        "inverse frequencies: ",
        "YaRN's factor 4 stands without original_max_position_embeddings: transformers, SGLang and "
        "llama.cpp take the longest length, 256, for it, and vLLM does not start",
    ),
    "no type": (
        {**RAISED, "rope_parameters": {"factor": 4.0, "rope_theta": BASE}},
        "inverse frequencies: ",
        "the factors are ignored (factor=4): with rope_type 'default' the frequencies are those of "
        "training",
    ),
    "another name": (
        {**RAISED, "rope_parameters": {**YARN_WORDS, "factor": 1.0, "scaling_factor": 4.0}},
        "attention factor: cos and sin times 1 instead of 1.1386",
        "scaling_factor is no rope parameter: it is ignored",
    ),
    "no base": (
        {**RAISED, "rope_scaling": {k: v for k, v in YARN_WORDS.items() if k != "rope_theta"}},
        "inverse frequencies: ",
        "rope_theta is missing beside the scaling, which replaces all there was: the base is "
        "10,000 instead of 50,000",
    ),
    "the factor of the logits switched off": (
        {**RAISED, "rope_parameters": {**YARN_WORDS, "attention_factor": 1.0}},
        "attention factor: cos and sin times 1 instead of 1.1386",
        "attention_factor=1 stands in place of the factor that YaRN makes of its stretch",
    ),
    "the length alone": (
        RAISED,
        "inverse frequencies: ",
        "the length alone was raised, to 256 tokens: the frequencies are those of training, which "
        "read 64",
    ),
    "flags without a length": (
        "llama-server -m m.gguf --rope-scaling yarn --rope-scale 4 \\\n"
        "  --override-kv llama.context_length=int:256",
        "inverse frequencies: ",
        "YaRN stands on top of a length that was multiplied already",
    ),
    "flags without a scale": (
        f"llama-server -m m.gguf --rope-scaling yarn --yarn-orig-ctx {LENGTH} --ctx-size 256",
        "attention factor: ",
        "",
    ),
    "too short": (
        f"vllm serve m --hf-overrides '{json.dumps({'rope_parameters': YARN_WORDS})}' "
        "--max-model-len 128",
        "longest text: 128 instead of 256 tokens",
        STATIC,
    ),
    "another method": (
        {**RAISED, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": BASE}},
        "inverse frequencies: ",
        "",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case: str, folder: Path, tmp_path: Path) -> None:
    content, difference, mistake = MISTAKES[case]
    place = _told(tmp_path, content, "told" if isinstance(content, str) else "told.json")
    verdict = normattn.verify(folder, place, YARN)
    assert not verdict.equal
    assert any(each.startswith(difference) for each in verdict.differences), verdict
    if mistake:
        assert any(each.startswith(mistake) for each in verdict.mistakes), verdict


def test_static_yarn_where_the_model_is_meant_as_trained(folder: Path, tmp_path: Path) -> None:
    place = _told(tmp_path, {**RAISED, "rope_parameters": YARN_WORDS})
    verdict = normattn.verify(folder, place)
    assert not verdict.equal
    assert any(each.startswith(f"{STATIC}, those within 64 tokens") for each in verdict.mistakes)
    equal = normattn.verify(folder, folder)
    assert (equal.differences, equal.mistakes) == ((), ())
    assert str(equal) == "as meant: LlamaForCausalLM as its configuration says"


def test_factors_beside_the_part_that_is_read(tmp_path: Path) -> None:
    text = build("Gemma3").config
    parts = transformers.Gemma3Config(text_config=text.to_dict())
    parts.save_pretrained(tmp_path / "parts")
    wide = {"full_attention": {**YARN_WORDS, "original_max_position_embeddings": 8}}
    verdict = normattn.verify(
        tmp_path / "parts", _told(tmp_path, {"rope_parameters": wide}), "YaRN(factor=4)"
    )
    assert not verdict.equal
    why = "they stand beside text_config, whose own rope parameters are the decoder's"
    assert any(each.endswith(why) for each in verdict.mistakes), verdict


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "Mistral"])
def test_layers_within_a_window_are_compared_too(family: str, tmp_path: Path) -> None:
    """A method leaves them as they are: an engine that is told it for all changes them."""
    config = configuration(family, sliding_window=6)
    config.save_pretrained(tmp_path / "plain")
    more: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
    more |= {"original_max_position_embeddings": 8}
    own = config.rope_parameters
    named = {key: {**own[key], **more} for key in own if isinstance(own[key], dict)}
    told: dict[str, Any] = {
        "rope_parameters": named or {**own, **more},
        "max_position_embeddings": 32,
    }
    method = None if family == "Mistral" else YARN  # all its layers attend within a window
    verdict = normattn.verify(tmp_path / "plain", _told(tmp_path, told), method)
    assert not verdict.equal
    found = [each.partition(":")[0] for each in verdict.differences]
    assert found[:2] == 2 * ["layers within a window"]
    if named:
        told["rope_parameters"] = {**named, "sliding_attention": own["sliding_attention"]}
        assert normattn.verify(tmp_path / "plain", _told(tmp_path, told), method).equal
    else:
        assert normattn.verify(tmp_path / "plain", tmp_path / "plain").equal


def test_a_saved_model_and_a_gguf_file(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(_config())
    with normattn.extend(model, "YaRN", factor=4):
        model.save_pretrained(tmp_path / "saved")
    assert normattn.verify(tmp_path / "saved", tmp_path / "saved").equal
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    raw["rope_parameters"]["factor"] = 2.0
    verdict = normattn.verify(tmp_path / "saved", _told(tmp_path, raw))
    assert [each.partition(":")[0] for each in verdict.differences] == [
        "inverse frequencies",
        "attention factor",
    ]
    with normattn.extend(model, "ReRoPE", window=16):
        model.save_pretrained(tmp_path / "rerope")
    with pytest.raises(InputError, match="no configuration of rotary positions says ReRoPE"):
        normattn.verify(tmp_path / "rerope", tmp_path / "rerope")
    source, longer = tmp_path / "tiny.gguf", tmp_path / "longer.gguf"
    _write(source, [*map(chr, range(33, 97)), '!"'])
    rope = {**YARN_WORDS, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    fields = {"rope_parameters": rope, "max_position_embeddings": 64}
    write_gguf(source, longer, values("llama", fields))
    assert normattn.verify(source, longer, YARN).equal
    usual = {"beta_fast": 32.0, "beta_slow": 1.0}
    fields["rope_parameters"] = rope | usual
    write_gguf(source, tmp_path / "usual.gguf", values("llama", fields))
    assert normattn.verify(source, tmp_path / "usual.gguf", YARN).equal
    fields["rope_parameters"] = rope | usual | {"beta_slow": 2.0}
    write_gguf(source, tmp_path / "betas.gguf", values("llama", fields))
    with pytest.raises(InputError, match=r"yarn_beta_slow in some .*: say --yarn-beta-slow"):
        normattn.verify(source, tmp_path / "betas.gguf", YARN)
    verdict = normattn.verify(source, longer, "YaRN(factor=8)")
    assert "longest text: 64 instead of 128 tokens" in verdict.differences


def test_a_model_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no layer of a gpt2 model shows rotary positions"):
        normattn.verify(tmp_path, tmp_path / "config.json")


def test_a_family_that_rejects_positions_further_on_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values at a short length do not stand in for those at a long one."""
    own = transformers.LlamaModel.forward

    def forward(self: Any, *args: Any, **more: Any) -> Any:
        if more.get("position_ids") is not None:
            raise TypeError("got an unexpected keyword argument 'position_ids'")
        return own(self, *args, **more)

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    with pytest.raises(InputError, match=f"computes at {LENGTH} tokens: its forward rejects"):
        normattn.verify(folder, folder / "config.json")


BAD: dict[str, tuple[str, str, str]] = {
    "nothing there": ("", "", "gone.json"),
    "no JSON": ("told.json", "{", "is not valid JSON"),
    "no flags": ("told", "echo hello", "tells of no positions"),
    "no number": ("told", "x --rope-scaling yarn --rope-scale four", "'four' is no number"),
    "no keys": ("told", "rope.scaling", "is no key=type:value"),
    "a list of kinds": ("told.json", '{"rope_scaling": {"rope_type": ["yarn"]}}', "must be a name"),
    "no decoder": ("told.json", '{"text_config": 3}', "the text model of a llama configuration"),
    "an endless length": ("told", "vllm serve m --max-model-len inf", "no finite number above 0"),
    "a scale of 0": ("told", "llama-server --rope-freq-scale 0", "no finite number above 0"),
    "a key that most architectures ignore": (
        "told",
        "llama.rope.scaling.type=str:yarn\nllama.rope.scaling.yarn_beta_fast=f32:16",
        "reads rope.scaling.yarn_beta_fast in some architectures and ignores it in most",
    ),
    "bytes": ("told", "\udcff", "not JSON, not GGUF, not text"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(
    case: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content, why = BAD[case]
    place = tmp_path / (name or "gone.json")
    if name:
        place.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(folder), "--against", str(place), "--method", YARN])
    said = capfd.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith("normattn: ")
    assert why in said.err
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize("record", [{}, [], {"method": 3, "train_length": 4}])
def test_a_record_that_is_damaged(record: Any, folder: Path, tmp_path: Path) -> None:
    saved = json.loads((folder / "config.json").read_text())
    place = tmp_path / "saved"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**saved, "normattn": record}))
    with pytest.raises(InputError, match="the field 'normattn' must hold a method"):
        normattn.verify(place, folder, YARN)


def test_the_command_ends_with_its_verdict(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, code in ((YARN_WORDS, 0), ({**YARN_WORDS, "factor": 2.0}, 1)):
        place = _told(tmp_path, {**RAISED, "rope_parameters": words})
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(folder), "--against", str(place), "--method", YARN, "--json"])
        record = json.loads(capfd.readouterr().out)
        assert ended.value.code == code
        assert record["equal"] == (code == 0)
        assert bool(record["differences"]) == (code == 1)

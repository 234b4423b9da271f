"""`verify`: equal configurations are equal, what differs is seen, and every mistake is named."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import normattn
from cli.conftest import Command
from normattn import InputError
from normattn.hf.engines import ENGINES, Deployment, emit
from normattn.hf.llama_cpp import gguf_keys, write_gguf
from normattn.hf.plan import plan

from . import tiny
from .families import build, configuration
from .test_gguf import SIZES, write

LENGTH, BASE, YARN = 64, 50000.0, "YaRN(factor=4)"
YARN_WORDS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
YARN_WORDS["rope_theta"] = BASE
RAISED = {"max_position_embeddings": 4 * LENGTH}
STATIC = "YaRN is static: it changes short prompts too (within 64 tokens)"


def _rope(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope}}


def _config(**more: Any) -> Any:
    given = {"max_position_embeddings": LENGTH, **_rope(rope_theta=BASE), **more}
    return tiny.configuration("llama", **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with plain positions."""
    place = tmp_path_factory.mktemp("models") / "plain"
    _config().save_pretrained(place)
    return place


def _verify(folder: Path, given: Any, place: Path, method: str | None = None, **more: Any) -> Any:
    file = place / ("given" if isinstance(given, str) else "given.json")
    file.write_text(given if isinstance(given, str) else json.dumps(given))
    return normattn.verify(folder, file, method, **more)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["YaRN(factor=4,sharpness=0)", "PI(factor=4)"])
def test_what_is_emitted_is_as_meant(
    engine: str, method: str, folder: Path, tmp_path: Path
) -> None:
    model = tiny.build_of(_config())
    text = emit(Deployment("m", plan(model, method), 4 * LENGTH, "llama"), engine)
    verdict = _verify(folder, text, tmp_path, method)
    assert verdict.differences == ()
    assert str(verdict).startswith(f"as intended: {method.split('(')[0]}")
    assert all("static" in each or "switch" in each for each in verdict.mistakes)
    assert not _verify(folder, text, tmp_path, train_length=LENGTH).equal


def _yarn(original: int | None = LENGTH, **changes: Any) -> dict[str, Any]:
    """A configuration with YaRN and these changes; None leaves a word out."""
    words = {**YARN_WORDS, "original_max_position_embeddings": original, **changes}
    return {**RAISED, "rope_parameters": {k: v for k, v in words.items() if v is not None}}


FREQUENCIES = "inverse frequencies: "
NO_GAIN = "attention factor: cos and sin times 1 instead of 1.1386"
MULTIPLIED = "YaRN is applied to a length that was multiplied already"
HALF = "longest text: 128 instead of 256 tokens"
SERVER = "llama-server -m m.gguf --rope-scaling yarn"
LONGER = "--rope-scale 4 --override-kv llama.context_length=int:256"
CTX = f"--yarn-orig-ctx {LENGTH} --ctx-size 256"
OVERRIDES = f"--hf-overrides '{json.dumps({'rope_parameters': YARN_WORDS})}'"
# What the engine was told; what differs; which mistake is named.
MISTAKES: dict[str, tuple[Any, str, str]] = {
    "on a multiplied length": (_yarn(original=256), FREQUENCIES, MULTIPLIED),
    "no original length": (
        *(_yarn(original=None), FREQUENCIES),
        "YaRN's factor 4 is given without original_max_position_embeddings",
    ),
    "no type": (
        *(_yarn(rope_type=None, original=None), FREQUENCIES),
        "the factors are ignored (factor=4)",
    ),
    "another name": (
        *(_yarn(factor=1.0, scaling_factor=4.0), NO_GAIN),
        "scaling_factor is no rope parameter: it is ignored",
    ),
    "no base": (
        {**RAISED, "rope_scaling": _yarn(rope_theta=None)["rope_parameters"]},
        *(FREQUENCIES, "rope_theta is missing next to the scaling"),
    ),
    "the factor of the logits switched off": (
        *(_yarn(attention_factor=1.0), NO_GAIN, "attention_factor=1 replaces the factor"),
    ),
    "the length alone": (RAISED, FREQUENCIES, "the length alone was raised, to 256 tokens"),
    "flags without a length": (f"{SERVER} \\\n  {LONGER}", FREQUENCIES, MULTIPLIED),
    "flags without a scale": (f"{SERVER} {CTX}", "attention factor: ", ""),
    "parallel requests": (f"{SERVER} {LONGER} {CTX} -np 2", f"{HALF}: 2", ""),
    "parallel requests without a length": (
        f"LLAMA_ARG_KV_UNIFIED=false {SERVER} {LONGER} --yarn-orig-ctx {LENGTH} -np 2",
        *(f"{HALF}: 2", ""),
    ),
    "too short": (f"vllm serve m {OVERRIDES} --max-model-len 128", HALF, STATIC),
    "another method": (_yarn(rope_type="linear", original=None), FREQUENCIES, ""),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case: str, folder: Path, tmp_path: Path) -> None:
    content, difference, mistake = MISTAKES[case]
    verdict = _verify(folder, content, tmp_path, YARN)
    assert not verdict.equal
    assert any(each.startswith(difference) for each in verdict.differences), verdict
    assert not mistake or any(x.startswith(mistake) for x in verdict.mistakes), verdict


def test_factors_beside_the_part_that_is_read(tmp_path: Path) -> None:
    text = build("Gemma3Text").config
    transformers.Gemma3Config(text_config=text.to_dict()).save_pretrained(tmp_path / "parts")
    wide = {"full_attention": {**YARN_WORDS, "original_max_position_embeddings": 8}}
    verdict = _verify(tmp_path / "parts", {"rope_parameters": wide}, tmp_path, YARN)
    assert not verdict.equal
    why = "they are outside of text_config, whose own rope parameters are the decoder's"
    assert any(each.endswith(why) for each in verdict.mistakes), verdict


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3Text", "Mistral"])
def test_layers_within_a_window_are_compared_too(family: str, tmp_path: Path) -> None:
    """A method leaves them as they are: an engine that is told it for all changes them."""
    config = configuration(family, sliding_window=6)
    config.save_pretrained(tmp_path / "plain")
    more: Any = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    own: Any = config.rope_parameters
    named = {key: {**own[key], **more} for key in own if isinstance(own[key], dict)}
    given = {"rope_parameters": named or {**own, **more}, "max_position_embeddings": 32}
    method = None if family == "Mistral" else YARN  # all its layers attend within a window
    verdict = _verify(tmp_path / "plain", given, tmp_path, method)
    found = [each.partition(":")[0] for each in verdict.differences]
    assert found[:2] == 2 * ["layers within a window"]
    if named:
        given["rope_parameters"] = {**named, "sliding_attention": own["sliding_attention"]}
        assert _verify(tmp_path / "plain", given, tmp_path, method).equal


def test_a_saved_model(tmp_path: Path) -> None:
    model = tiny.build_of(_config())
    with normattn.extend(model, "YaRN", factor=4):
        model.save_pretrained(tmp_path / "saved")
    assert normattn.verify(tmp_path / "saved", tmp_path / "saved").equal
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    raw["rope_parameters"]["factor"] = 2.0
    verdict = _verify(tmp_path / "saved", raw, tmp_path)
    kinds = [each.partition(":")[0] for each in verdict.differences]
    assert kinds == ["inverse frequencies", "attention factor"]
    with normattn.extend(model, "ReRoPE", window=16):
        model.save_pretrained(tmp_path / "rerope")
    with pytest.raises(InputError, match="no configuration of rotary positions expresses ReRoPE"):
        normattn.verify(tmp_path / "rerope", tmp_path / "rerope")


def test_a_gguf_file_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    """A factor without a type is linear; some keys are read by some architectures alone."""
    pytest.importorskip("gguf")
    source = tmp_path / "tiny.gguf"
    write(source)

    def copy_with(name: str, keys: dict[str, tuple[str, Any]]) -> Path:
        write_gguf(source, tmp_path / name, keys)
        return tmp_path / name

    rope = {**YARN_WORDS, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    for more in ({}, {"beta_fast": 32.0, "beta_slow": 1.0}):  # the usual ones
        fields = {"rope_parameters": rope | more, "max_position_embeddings": 64}
        longer = copy_with(f"longer{len(more)}.gguf", gguf_keys("llama", fields))
        assert normattn.verify(source, longer, YARN).equal
    verdict = normattn.verify(source, longer, "YaRN(factor=8)")
    assert "longest text: 64 instead of 128 tokens" in verdict.differences
    fields["rope_parameters"] = rope | {"beta_slow": 2.0}
    other = copy_with("betas.gguf", gguf_keys("llama", fields))
    with pytest.raises(InputError, match=r"yarn_beta_slow in some .*: say --yarn-beta-slow"):
        normattn.verify(source, other, YARN)
    keys = {"llama.rope.scaling.factor": ("f32", 4.0), "llama.context_length": ("u32", 64)}
    assert normattn.verify(source, copy_with("scaled.gguf", keys), "PI(factor=4)").equal
    length = "-c 64 --override-kv llama.context_length=int:64 --yarn-orig-ctx 16"
    command = f"llama-server {length} --rope-scaling yarn --rope-scale 4 --yarn-attn-factor 2"
    verdict = _verify(source, command, tmp_path, YARN)
    assert any(x.startswith("--yarn-attn-factor is ignored") for x in verdict.differences)


def test_other_scalings_of_a_gguf_file(tmp_path: Path) -> None:
    """llama3 is a tensor that divides frequencies; DeepSeek's mscale is a logarithm's factor."""
    pytest.importorskip("gguf")
    scaled = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8}
    rope = _rope(**scaled, low_freq_factor=1.0, high_freq_factor=4.0)
    config = tiny.configuration("llama", **SIZES, **rope)
    config.save_pretrained(tmp_path / "llama3")
    theta = tiny.build_of(config).model.rotary_emb.inv_freq
    divisors = (10000.0 ** -(torch.arange(0, 16, 2) / 16) / theta).tolist()
    for name, factors in (("divided", divisors), ("plain", None)):
        write(tmp_path / f"{name}.gguf", factors=factors)
        verdict = normattn.verify(tmp_path / "llama3", tmp_path / f"{name}.gguf")
        assert verdict.equal == (name == "divided"), verdict
    with pytest.raises(InputError, match="on top of llama3"):
        _verify(tmp_path / "llama3", "llama-server --rope-scale 4 -c 16", tmp_path)
    _saved("deepseek_v3", tmp_path)
    keys = {
        "llama.context_length": ("u32", 4096),
        "llama.rope.scaling.type": ("str", "yarn"),
        "llama.rope.scaling.factor": ("f32", 40.0),
        "llama.rope.scaling.original_context_length": ("u32", 4096),
    }
    for weight, equal in ((0.1, True), (0.0707, False)):
        file = tmp_path / f"{weight}.gguf"
        own = {"llama.rope.scaling.yarn_log_multiplier": ("f32", weight)}
        write_gguf(tmp_path / "plain.gguf", file, keys | own)
        found = [x.partition(":")[0] for x in normattn.verify(tmp_path, file).differences]
        assert ("softmax scale" in found) != equal, found


def test_a_model_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no layer of a gpt2 model passes rotary positions"):
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


DEEPSEEK = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK |= {"original_max_position_embeddings": 4096}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 4 * n for n in range(8)]}
MINISTRAL = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1}
MINISTRAL |= {"original_max_position_embeddings": 64}
LONG = {"max_position_embeddings": 131072}
PHI = {"original_max_position_embeddings": 4096, **LONG}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_rope(**DEEPSEEK), "qk_nope_head_dim": 48, **LONG},
    "internlm3": {**_rope(rope_type="dynamic", rope_theta=5e7, factor=6.0), **LONG},
    "phi3": {**_rope(rope_type="longrope", **FACTORS), **PHI},
    "hunyuan_v1_dense": {**_rope(rope_type="dynamic", alpha=1000.0, factor=1.0), **LONG},
    "ministral3": {**_rope(**MINISTRAL), **LONG},
    "gemma3_text": LONG,
    "phimoe": {"rope_parameters": None},
    "glm": _rope(partial_rotary_factor=0.5),
}
# What a changed setting changes. The softmax scale of DeepSeek-V3 is (0.1·ln 40 + 1)²/√64; of
# llama 4's temperature the growth at the end of the text counts.
CHANGED: dict[str, list[tuple[str, Any, str]]] = {
    "deepseek_v3": [
        ("mscale_all_dim", 0.0, r"softmax scale: 0\.125 instead of 0\.2342"),
        ("mscale_all_dim", 0.707, r"softmax scale: 0\.1987 instead of 0\.2342"),
    ],
    "internlm3": [("factor", 2.0, "inverse frequencies")],
    "phi3": [("long_factor", [1.0] * 8, "inverse frequencies")],
    "hunyuan_v1_dense": [("alpha", 1.0, "inverse frequencies")],
    "ministral3": [("llama_4_scaling_beta", 0.5, "softmax scale")],
    "gemma3_text": [("sliding_window", 5, "layers within a window: window: 5 instead of 6")],
    "glm": [("partial_rotary_factor", 1.0, "rotary width: 16 features rotate instead of 8")],
}


def _saved(family: str, folder: Path) -> dict[str, Any]:
    tiny.configuration(family, **copy.deepcopy(MODELS[family])).save_pretrained(folder)
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


@pytest.mark.parametrize("family", MODELS)
def test_an_unchanged_configuration_is_as_meant_and_a_changed_one_is_not(
    family: str, tmp_path: Path
) -> None:
    raw = _saved(family, tmp_path)
    verdict = _verify(tmp_path, raw, tmp_path)
    assert (verdict.differences, verdict.mistakes) == ((), ())
    for name, value, difference in CHANGED.get(family, []):
        changed = copy.deepcopy(raw)
        fields = changed if name in changed else changed["rope_parameters"]
        assert name in fields
        fields[name] = value
        verdict = _verify(tmp_path, changed, tmp_path)
        assert any(re.match(difference, each) for each in verdict.differences), verdict


TRAINED = 32768
WORDS = {**YARN_WORDS, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED}
ROPE = json.dumps(WORDS)
JSON = json.dumps({"rope_parameters": WORDS, "max_position_embeddings": 4 * TRAINED})
FLAGS = f"--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx {TRAINED}"
CONTEXT = f"--override-kv llama.context_length=int:{4 * TRAINED}"
SETTINGS = "environment: {LLAMA_ARG_ROPE_SCALE: 4, LLAMA_ARG_ROPE_SCALING_TYPE: yarn}"
VLLM = f"vllm serve m --rope-scaling '{ROPE}' --max-model-len 128K"
ALLOWED, OVERRIDE = "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "--hf-overrides.rope_parameters"
COMPOSE, FOUR = "services:\n  a:\n   ", f"llama-server -m m.gguf {FLAGS} {CONTEXT} -np 4"
AS_MEANT = {
    "vLLM": f"vllm serve m --hf-overrides '{JSON}' --max-model-len 128K",
    "vLLM, underscores": f"vllm serve m --hf_overrides='{JSON}' --max_model_len 131072",
    "vLLM, YAML": f"model: m\nhf-overrides: {JSON}\nmax-model-len: 131072\n",
    "vLLM, length allowed": f"{ALLOWED}=1 {VLLM}",
    "vLLM, allowed in a compose file": (
        f"{COMPOSE} environment:\n      - {ALLOWED}=TRUE\n"
        f"    command: {OVERRIDE} '{ROPE}' --max-model-len 128K\n"
    ),
    "vLLM, allowed in Kubernetes": (
        f"spec:\n  env: [{{name: {ALLOWED}, value: '1'}}]\n"
        f"  args: [{OVERRIDE}, '{ROPE}', --max-model-len, 128K]\n"
    ),
    "llama.cpp": f"llama-server -m m -c 131072 {FLAGS} {CONTEXT}",
    "llama.cpp, four requests": f"{FOUR} -c {16 * TRAINED}",
    "llama.cpp, four requests share": f"{FOUR} -c {4 * TRAINED} -kvu",
    "llama.cpp, quoted": f"bash -lc 'llama-server -c 131072 {FLAGS} {CONTEXT},a.b=bool:false'",
    "compose": f"{COMPOSE} command: >\n      -c 131072 {FLAGS} {CONTEXT}\n",
    "compose, quoted": (
        f"{COMPOSE} ports: {{8000: 8000}}\n    entrypoint: [/bin/sh, -c]\n"
        f"    command: ['llama-server -c 131072 {FLAGS} {CONTEXT}']\n"
    ),
    "environment": (
        f"{COMPOSE} command: -c 131072 --yarn-orig-ctx {TRAINED} {CONTEXT}\n    {SETTINGS}\n"
    ),
}
OTHERWISE = {
    "vLLM, beyond": f"vllm serve m --hf-overrides '{JSON}' --max-model-len 1000000",
    "vLLM, length not raised": VLLM,
    "vLLM, not allowed": f"{ALLOWED}=0 {VLLM}",
    "llama.cpp, no length": f"llama-server -m m -c 131072 {FLAGS}",
    "llama.cpp, no YaRN": f"llama-server {FLAGS} {CONTEXT} --yarn-ext-factor 0",
    "llama.cpp, none": f"llama-server {CONTEXT} --rope-scaling none --rope-scale 4",
}


@pytest.fixture
def long(tmp_path: Path) -> Path:
    config = _config(num_hidden_layers=1, max_position_embeddings=TRAINED, **_rope())
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", [*AS_MEANT, *OTHERWISE])
def test_commands_as_people_have_them(case: str, long: Path) -> None:
    verdict = _verify(long, {**AS_MEANT, **OTHERWISE}[case], long, YARN)
    assert verdict.equal == (case in AS_MEANT), verdict


def test_an_allowed_length(long: Path) -> None:
    """SGLang then serves any, vLLM what its table of cos and sin holds."""
    vllm = f"{ALLOWED}=1 vllm serve m --rope-theta 300000 --max-model-len 128K"
    sglang = "sglang serve m --context-length 131072"
    for command, method, refused in (
        (vllm, "ABF(base=300000)", True),
        (f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 {sglang}", None, False),
        (sglang, None, True),
    ):
        found = _verify(long, command, long, method).differences
        assert any("does not serve a length of 131," in each for each in found) == refused, found


BAD: dict[str, tuple[str | None, str]] = {
    "nothing there": (None, "told"),
    "no JSON": ("{", "is not valid JSON"),
    "no flags": ("echo hello", "has no position settings"),
    "no number": ("x --rope-scaling yarn --rope-scale four", "to float: 'four'"),
    "a list of kinds": ('{"rope_scaling": {"rope_type": ["yarn"]}}', "a small llama"),
    "no decoder": ('{"text_config": 3}', "the text model of a llama configuration"),
    "an endless length": ("vllm serve m --max-model-len inf", "no finite number above 0"),
    "no turns": ("x --rope-scaling yarn --yarn-beta-fast 0", "beta_fast must be a number above 0"),
    "a YAML in itself": ("a: &a [*a]\nctx-size: 5", "recursion"),
    "a date that is none": ("a: 2024-13-45\nctx-size: 5", "month must be in 1..12"),
    "a key that is a date": ("hf-overrides: {2024-01-01: 3}", "not datetime.date"),
    "a scaling that is a name": ('{"rope_scaling": "yarn"}', "are a JSON object, not 'yarn'"),
    "a key that is a name": ("x --override-kv llama.context_length=str:long", "cannot be compared"),
    "an open quote": ("command: vllm serve 'm", "No closing quotation"),
    "bytes": ("\udcff", "codec can't decode"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, folder: Path, tmp_path: Path, command: Command) -> None:
    content, why = BAD[case]
    place = tmp_path / ("told.json" if (content or "").startswith("{") else "told")
    if content is not None:
        place.write_bytes(content.encode("utf-8", "surrogateescape"))
    said = command("verify", folder, "--against", place, "--method", YARN)
    assert said.out == ""
    assert why in said.sentence


def test_the_command_ends_with_its_verdict(folder: Path, tmp_path: Path, command: Command) -> None:
    place = tmp_path / "told.json"
    for words, equal in ((YARN_WORDS, True), ({**YARN_WORDS, "factor": 2.0}, False)):
        place.write_text(json.dumps({**RAISED, "rope_parameters": words}))
        said = command("verify", folder, "--against", place, "--method", YARN, "--json")
        record = json.loads(said.out)
        assert said.code == (0 if equal else 1)
        assert (record["equal"], bool(record["differences"])) == (equal, not equal)

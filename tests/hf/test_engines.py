"""What engines are told of a method: held against each engine's own formulas, written here anew."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import Command
from normattn import InputError
from normattn.hf.engines import ENGINES, Deployment, emit
from normattn.hf.llama_cpp import architecture_of, read_gguf
from normattn.hf.native import native_fields
from normattn.hf.plan import Plan, plan

from . import tiny
from .test_gguf import write

gguf = pytest.importorskip("gguf")
LENGTH, LONGEST, FACTOR = tiny.LENGTH, 4 * tiny.LENGTH, 4.0
METHODS = {
    "YaRN": "YaRN(factor=4)",
    "YaRN of other turns": "YaRN(factor=4,beta_fast=4,beta_slow=0.5)",
    "YaRN without its factor": "YaRN(factor=4,sharpness=0)",
    "PI": "PI(factor=4)",
    "NTK": "NTK(factor=4)",
    "ABF": "ABF(base=300000)",
}
_MODELS: dict[str, Any] = {}


def _model(family: str, **more: Any) -> Any:
    name = f"{family} {more}"
    if name not in _MODELS:
        _MODELS[name] = tiny.build(family, **more)
    return _MODELS[name]


def _deployment(method: str, family: str = "llama") -> Deployment:
    planned = plan(_model(family), method)
    return Deployment("my model", planned, LONGEST, "llama")


def _meant(planned: Plan) -> tuple[torch.Tensor, float]:
    """The frequencies and the factor of cos and sin that the method's own formula gives."""
    spec = planned.spec
    assert spec.rope_scaling is not None
    theta = spec.rope_scaling.inverse_frequencies(16, 10000.0, LENGTH)
    return theta, spec.rope_scaling.gain(LENGTH) ** 0.5


def _ramp(size: int, base: float, length: float, fast: float, slow: float) -> torch.Tensor:
    """1 where a pair is divided by the factor; the paper's, as vLLM and llama.cpp write it."""
    low, high = (
        size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
    pairs = torch.arange(size // 2, dtype=torch.float64)
    return ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)


def _vllm(rope: dict[str, Any], size: int = 16) -> tuple[torch.Tensor, float]:
    """`get_rope` of vLLM: frequencies, and what cos and sin are multiplied with."""
    kind, base = rope.get("rope_type", "default"), rope.get("rope_theta", 10000)
    theta = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    if kind == "default":
        return theta, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return theta / factor, 1.0
    if kind == "ntk":
        b = rope["mixed_b"]
        a = math.log(factor) / (size / 2) ** b
        return theta / (a * torch.arange(1, size // 2 + 1, dtype=torch.float64) ** b).exp(), 1.0
    assert kind == "yarn"
    length = rope["original_max_position_embeddings"]
    ramp = _ramp(size, base, length, rope.get("beta_fast", 32), rope.get("beta_slow", 1))
    return (
        theta / factor * ramp + theta * (1 - ramp),
        rope.get("attention_factor", 0.1 * math.log(factor) + 1),
    )


def _llama_cpp(said: dict[str, str], size: int = 16) -> tuple[torch.Tensor, float]:
    """`ggml_rope_ext` of llama.cpp under these flags."""
    base = float(said["--rope-freq-base"])
    theta = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    scale = 1 / float(said.get("--rope-scale", 1))
    if said.get("--rope-scaling") != "yarn":
        return theta * scale, 1.0
    fast, slow = (float(said.get(f"--yarn-beta-{n}", v)) for n, v in (("fast", 32), ("slow", 1)))
    ramp = _ramp(size, base, float(said["--yarn-orig-ctx"]), fast, slow)
    own = float(said.get("llama.rope.scaling.attn_factor", 1))
    return theta * scale * ramp + theta * (1 - ramp), own * (1 + 0.1 * math.log(1 / scale))


def _options(text: str) -> dict[str, str]:
    words = shlex.split(text.replace("\\\n", " "))
    options = {a: b for a, b in itertools.pairwise(words) if a.startswith("-")}
    typed = [b.partition("=") for a, b in itertools.pairwise(words) if a == "--override-kv"]
    return options | {name: value.partition(":")[2] for name, _, value in typed}


def _assert_same(one: tuple[torch.Tensor, float], other: tuple[torch.Tensor, float]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    assert one[1] == pytest.approx(other[1], rel=1e-9)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_engine_computes_what_the_method_means(method: str) -> None:
    deployment = _deployment(method)
    meant = _meant(deployment.plan)
    hf = json.loads(emit(deployment, "hf"))
    assert hf["max_position_embeddings"] == LONGEST
    _assert_same(_vllm(hf["rope_parameters"]), meant)
    for engine, overrides, length in (
        ("vllm", "--hf-overrides", "--max-model-len"),
        ("sglang", "--json-model-override-args", "--context-length"),
    ):
        served = _options(emit(deployment, engine))
        given = json.loads(served[overrides])
        rope = given["rope_parameters"]
        if engine == "sglang" and "attn_factor" in rope:  # a multiple of 0.1·ln s + 1
            rope["attention_factor"] = rope.pop("attn_factor") * (0.1 * math.log(FACTOR) + 1)
        _assert_same(_vllm(rope), meant)
        # Both multiply the length by linear's factor, but not by yarn's.
        multiplied = rope["rope_type"] == "linear"
        assert given.get("max_position_embeddings") == (None if multiplied else LONGEST)
        assert served[length] == str(LONGEST)
    served = _options(emit(deployment, "llama.cpp"))
    _assert_same(_llama_cpp(served), meant)
    assert served["-m"] == "my model.gguf"
    assert served["--ctx-size"] == str(LONGEST)
    assert served["llama.context_length"] == str(LONGEST)
    assert "--yarn-attn-factor" not in served  # overwritten where YaRN is on


def test_ntk_mixed_is_vllms_alone() -> None:
    deployment = _deployment("NTK-mixed(factor=4)")
    given = json.loads(_options(emit(deployment, "vllm"))["--hf-overrides"])
    _assert_same(_vllm(given["rope_parameters"]), _meant(deployment.plan))
    for engine in ENGINES.keys() - {"vllm"}:
        with pytest.raises(InputError, match=f"^{engine} has no NTKMixed.*: only vLLM has"):
            emit(deployment, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["ReRoPE", "DualChunk", "YaRN(factor=4)-logn+", "DynamicNTK"])
def test_methods_that_an_engine_has_not(engine: str, method: str) -> None:
    with pytest.raises(InputError, match=f"^{engine} has no .*changes attention; normattn.extend"):
        emit(_deployment(method), engine)


def test_models_whose_configuration_cannot_say_it() -> None:
    def refused(why: str, family: str, engine: str = "hf", **more: Any) -> None:
        planned = plan(_model(family, **more), "YaRN(factor=4)", LENGTH)
        with pytest.raises(InputError, match=why):
            emit(Deployment("m", planned, LONGEST, "a"), engine)

    refused("within a window share their rope_parameters", "gemma2")
    refused("rotary module of Phimoe.* rope_parameters", "phimoe")
    refused("two kinds", "gemma3_text", "mlx")
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    refused("has linear frequencies already", "llama", rope_parameters=linear)
    for engine in ("ollama", "tgi", "exllama", "lmdeploy"):
        with pytest.raises(InputError, match=f"cannot write it for {engine}: "):
            emit(_deployment("PI(factor=4)"), engine)
    with pytest.raises(InputError, match=r"knows hf, vllm.*not 'nothing'"):
        emit(_deployment("PI(factor=4)"), "nothing")
    with pytest.raises(InputError, match="truncate=false"):
        emit(_deployment("YaRN(factor=4,truncate=false)"), "gguf")
    nameless = Deployment("m", plan(_model("llama"), "PI(factor=4)"), LONGEST)
    assert "llama.context_length" in emit(nameless, "llama.cpp")


def test_versions() -> None:
    def emitted(engine: str, version: str, method: str = "YaRN(factor=4)") -> str:
        planned = plan(_model("llama"), method)
        return emit(Deployment("m", planned, LONGEST, "llama", version=version), engine)

    old = json.loads(emitted("hf", "4.57.1"))
    assert old["rope_theta"] == 10000.0
    assert old["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    }
    assert json.loads(emitted("hf", "4.57", "NTK(factor=4)"))["rope_scaling"] is None
    assert "rope_parameters" in json.loads(emitted("hf", "5.1"))
    assert "rope_parameters" in emitted("vllm", "0.33.0")
    assert "rope_scaling" in emitted("hf", "4.100")  # a hundredth minor version is not 5.0
    for engine, version in (("vllm", "0.10.2"), ("sglang", "0.4"), ("vllm", "new")):
        with pytest.raises(InputError, match=f"--engine-version '?{version}"):
            emitted(engine, version)


def test_gemma_3_scales_the_layers_that_see_everything() -> None:
    """llama.cpp leaves layers within a window as they are; vLLM skips the factor."""
    planned = plan(_model("gemma3_text"), "YaRN(factor=4)")
    deployment = Deployment("m", planned, LONGEST, "gemma3", text_config_name="text_config")
    served = _options(emit(deployment, "llama.cpp"))
    rope = deployment.fields["rope_parameters"]["full_attention"]
    _assert_same(_llama_cpp(served), _vllm(rope))
    linear = Deployment("m", plan(_model("gemma3_text"), "PI(factor=4)"), LONGEST)
    given = json.loads(_options(emit(linear, "vllm"))["--hf-overrides"])
    assert given["max_position_embeddings"] == LONGEST
    given = json.loads(emit(deployment, "vllm").split("'")[1])
    rope = given["text_config"]["rope_parameters"]
    assert rope["full_attention"]["rope_type"] == "yarn"
    assert rope["sliding_attention"]["rope_type"] == "default"
    assert native_fields(planned.parts, planned.layers, planned.spec)["rope_parameters"] == rope


def test_architectures_of_gguf_files() -> None:
    kinds = ("llama", "mistral", "qwen3_moe", "gemma3_text", "gpt_oss", "no_such_model")
    names = ["llama", "llama", "qwen3moe", "gemma3", "gpt-oss", None]
    assert [architecture_of(kind) for kind in kinds] == names


def test_a_copy_of_a_gguf_file(tmp_path: Path, command: Command) -> None:
    source, place = tmp_path / "tiny.gguf", tmp_path / "longer.gguf"
    write(source, [*map(chr, range(33, 97)), '!"'])
    asked = ("--methods", "YaRN(factor=4)", "--emit", "gguf")
    said = command("extend", source, *asked)
    assert (said.code, sorted(said.out.splitlines())) == (
        0,
        [
            "llama.context_length=u32:64",
            "llama.rope.freq_base=f32:10000.0",
            "llama.rope.scaling.factor=f32:4.0",
            "llama.rope.scaling.original_context_length=u32:16",
            "llama.rope.scaling.type=str:yarn",
        ],
    )
    assert command("extend", source, *asked, "--out", place).code == 0
    before, after = gguf.GGUFReader(str(source)), gguf.GGUFReader(str(place))
    assert [each.name for each in before.tensors] == [each.name for each in after.tensors]
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert one.tensor_type == other.tensor_type
        assert (one.data == other.data).all()
    held = read_gguf(place).keys
    assert held["rope.scaling.type"] == "yarn"
    assert held["context_length"] == 64
    for name, field in before.fields.items():
        if not name.startswith(("GGUF.", "llama.context", "llama.rope")):
            assert after.fields[name].contents() == field.contents(), name
    for words, why in (
        ((source, *asked, "--out", place), f"{place} exists already"),
        ((place, *asked), "holds a yarn scaling"),
    ):
        said = command("extend", *words)
        assert said.code == 2
        assert why in said.sentence


def test_the_command_line(tmp_path: Path, command: Command) -> None:
    folder, out = tmp_path / "model", tmp_path / "flags"
    tiny.configuration("llama").save_pretrained(folder)
    base = ("extend", folder, "--emit", "vllm")
    said = command(*base, "--methods", "NTK", "--lengths", "48", "--out", out)
    assert (said.code, said.out) == (0, f"{out}: NTK(factor=3) for vllm, up to 48 tokens\n")
    assert "--max-model-len 48" in out.read_text()
    refusals = {
        ("--methods", "ReRoPE"): "vllm has no ReRoPE(window=4): ",
        ("--methods", "YaRN,PI"): "--emit needs one method",
        (): "--emit needs one method",
        ("--methods", "YaRN", "--window", "4"): "none of --methods takes a window",
        ("--methods", "YaRN", "--emit", "ollama"): "ollama",
        ("--methods", "YaRN", "--emit", "gguf", "--out", "a.gguf"): "of a GGUF file writes one",
        ("--methods", "YaRN(factor=2)", "--lengths", 4 * LENGTH): "reaches",
    }
    for more, why in refusals.items():
        said = command(*base, *more)
        assert (said.code, said.out) == (2, ""), more
        assert why in said.sentence

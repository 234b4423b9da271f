"""Compare what `--emit vllm` prints with vLLM's own code, from its wheel, for ten families.

    pip download vllm --no-deps -d WHEELS
    python scripts/vllm_rope.py WHEELS/vllm-*.whl

`get_rope` makes the table of cos and sin, and `_get_and_verify_max_len` decides the longest text.
Nothing else of vLLM runs; stubs replace the other modules that these files import. The script
prints the largest difference from the method's own cos and sin, and exits with 1 where it exceeds
1e-4 or where the longest text is not the requested one.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import itertools
import json
import re
import shlex
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from hf import tiny
from normattn.errors import InputError
from normattn.hf.engines import Deployment, emit
from normattn.hf.model_parts import layer_type, leaf_mappings
from normattn.hf.plan import plan
from normattn.hf.rotations import method_frequencies, method_gain

ROPE = "vllm.model_executor.layers.rotary_embedding"
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "olmo2", "granite", "glm4"),
    "smollm3",
)
METHODS = (
    "YaRN(factor=4)",
    "YaRN(factor=4,sharpness=0)",
    "YaRN(factor=4,beta_fast=16,beta_slow=2)",
    *("PI(factor=4)", "NTK(factor=4)", "NTK-mixed(factor=4)", "ABF(base=300000)"),
)
FACTOR, CLOSE = 4, 1e-4


class _Stub(types.ModuleType):
    """A module with a mock for every name."""

    def __getattr__(self, name: str) -> Any:
        if name in ("CustomOp", "PluggableLayer"):
            return _Layer
        return MagicMock(name=name)


class _Layer(torch.nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()

    @classmethod
    def register(cls, *_: Any, **__: Any) -> Any:
        return lambda kind: kind

    @classmethod
    def enabled(cls) -> bool:
        return False


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces every module of vLLM except those of rotary embeddings."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm" or name.startswith(ROPE):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        stub = _Stub(spec.name)
        folder = spec.name.replace(".", "/")
        stub.__path__ = [str(self.root / folder)]
        return stub

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root


def longest_rule(source: str, ropes: Any) -> Any:
    """`_get_and_verify_max_len` of vLLM's config/model.py, without the rest of the module."""
    tree = ast.parse(source)
    functions = [x for x in tree.body if getattr(x, "name", "") == "_get_and_verify_max_len"]
    names = dict.fromkeys(("logger", "current_platform"), MagicMock())
    names["current_platform"].check_max_model_len = lambda length: length
    envs = types.SimpleNamespace(VLLM_ALLOW_LONG_MAX_MODEL_LEN=False)
    namespace: dict[str, Any] = {**names, "envs": envs, "iter_rope_parameters": ropes, "Any": Any}
    types_used = dict.fromkeys(("PreTrainedConfig", "ModelArchitectureConfig"), object)
    namespace |= types_used
    exec(compile(ast.Module(functions, []), "model.py", "exec"), namespace)
    return namespace["_get_and_verify_max_len"]


def _options(text: str) -> dict[str, str]:
    words = shlex.split(text.replace("\\\n", " "))
    return dict(itertools.pairwise(words))


def off(get_rope: Any, longest: Any, family: str, method: str) -> str:
    """The largest error of vLLM's table; "another length" if its longest text differs.

    Raises `InputError` where vLLM cannot express the method for the family.
    """
    model = tiny.build(family, max_position_embeddings=64)
    planned = plan(model, method, 64)
    options = _options(emit(Deployment("m", planned, 64 * FACTOR, "a"), "vllm"))
    fields = json.loads(options["--hf-overrides"])
    config = copy.deepcopy(planned.parts.config)
    for name, value in fields.items():
        setattr(config, name, value)
    length = int(options["--max-model-len"])
    derived = types.SimpleNamespace(
        derived_max_model_len_and_key=(config.max_position_embeddings, "max_position_embeddings")
    )
    if longest(config, derived, None, length, False, None) != length:
        return "another length"
    largest = 0.0
    for layer in planned.layers:
        if layer.rotation is None:
            continue
        rope = dict(config.rope_parameters)
        rope = rope.get(layer_type(config, layer.index), rope)
        size = layer.rotation.head_dim
        table = get_rope(size, config.max_position_embeddings, True, rope, torch.float32)
        cos, sin = table.cos_sin_cache[:length].double().chunk(2, -1)
        theta = method_frequencies(planned.spec, layer.rotation).abs()
        angle = torch.arange(len(cos), dtype=torch.float64)[:, None] * theta
        gain = method_gain(planned.spec) * layer.rotation.amplitude
        both = (cos - angle.cos() * gain, sin - angle.sin() * gain)
        largest = max(largest, *(float(x.abs().max()) for x in both))
    return f"{largest:.0e}"


def main(wheel: str) -> int:
    """Print the table."""
    root = Path(tempfile.mkdtemp())
    with zipfile.ZipFile(wheel) as archive:
        folder = ROPE.replace(".", "/")
        names = [name for name in archive.namelist() if name.startswith(folder)]
        archive.extractall(root, names)
        source = archive.read("vllm/config/model.py").decode()
    sys.meta_path.insert(0, _Stubs(root))
    get_rope = importlib.import_module(ROPE).get_rope
    longest = longest_rule(source, lambda config: list(leaf_mappings(config.rope_parameters)))
    version = re.search(r"vllm-([0-9.]+)", Path(wheel).name)
    print(f"vLLM {version[1] if version else '?'}: the largest difference of cos and sin\n")
    print(f"| family | {' | '.join(METHODS)} |\n{'| --- ' * (len(METHODS) + 1)}|")
    wrong = ran = 0
    for family in FAMILIES:
        cells = []
        for method in METHODS:
            try:
                cells.append(off(get_rope, longest, family, method))
                ran += 1
                wrong += not (cells[-1][0].isdigit() and float(cells[-1]) < CLOSE)
            except InputError as error:
                cells.append(f"refused: {error}")
        print(f"| {family} | {' | '.join(cells)} |", flush=True)
    return int(wrong > 0 or ran == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

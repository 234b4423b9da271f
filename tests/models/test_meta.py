"""A model without memory costs next to nothing, and has the shapes of the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from normattn.models import CausalLM, CausalLMConfig
from normattn.models.utils import on_meta

_COUNTS = """
import sys
from normattn.models import CausalLM, CausalLMConfig
from normattn.models.flops import parameter_count
from normattn.models.pretrained import load_model, save_model

config = CausalLMConfig(vocab_size=32, dim=16, layers=1, heads=2, train_length=8)
parameter_count(config)
save_model(CausalLM(config), sys.argv[1])
load_model(sys.argv[1])
sys.exit("torch._dynamo" in sys.modules)
"""


def test_its_names_shapes_and_dtypes_are_those_of_the_model() -> None:
    config = CausalLMConfig(vocab_size=32, dim=16, layers=2, heads=2, train_length=8)
    with on_meta():
        made = CausalLM(config)
    assert all(each.is_meta for each in made.parameters())
    found = {name: (each.shape, each.dtype) for name, each in made.state_dict().items()}
    real = {name: (each.shape, each.dtype) for name, each in CausalLM(config).state_dict().items()}
    assert found == real


def test_counting_and_loading_do_not_load_the_compiler(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _COUNTS, str(tmp_path / "model")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr

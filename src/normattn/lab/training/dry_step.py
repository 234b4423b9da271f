"""One optimiser step of a training without its numbers: the real step on tensors of no storage.

Model, loss, backward pass, clipping and optimiser are those that train, run once through torch's
FakeTensorMode, which knows shapes, types and lifetimes, and nothing else: a model of any size takes
megabytes. So whatever changes what a step keeps (length, heads, score, precision, accumulate) is
counted as it is. Kernels are chosen as they are on a CPU or, asked for, as on a GPU, except for the
hand-written one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from normattn.kernels.place import as_on_gpu
from normattn.kernels.tiles import forget_corners
from normattn.lab.training.config import TrainingConfig
from normattn.lab.training.counting import Counted, Counting
from normattn.lab.training.distribution import World
from normattn.lab.training.step import Stepper
from normattn.lab.training.workload import rows_per_share
from normattn.layers.attend import forget_positions
from normattn.models import CausalLM
from normattn.models.transformer import Blocks
from normattn.models.utils import WithoutDraws
from normattn.score.fold import forget_tables


class DrawnTask:
    """Next-token prediction on tokens drawn at random: a step without a text."""

    def __init__(self, config: TrainingConfig, rows: int) -> None:
        self.model = CausalLM(config.model)
        if config.continued is not None:
            self.model.using(config.continued.method)
        self._words, self._shape = config.model.vocab_size, (rows, config.sequence_length + 1)
        self.tokens_per_step = config.batch_size * config.sequence_length

    def batch(self, step: int, share: int, shares: int) -> Tensor:
        """Whatever the share, by torch's own generator."""
        return torch.randint(self._words, self._shape)

    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """As `CausalTask` has it."""
        result = self.model.loss(batch)
        return result.loss, {"accuracy": result.correct / batch[:, 1:].numel()}


def dry_step(
    config: TrainingConfig, processes: int = 1, gpu: bool = False, gathered: bool = False
) -> Counted:
    """A step of one of `processes`, after another: what lasts are weights and moments.

    The process holds the whole model and sends nothing. `gathered`: the blocks' weights have come
    in the type of the products, and each of their gradients goes as soon as it is made, as under
    fsdp. Raises `InputError` where the batch does not divide.
    """
    rows = rows_per_share(config.batch_size, processes * config.accumulate)
    alone = config.model_copy(update={"compile": False})
    fake = FakeTensorMode()
    with _nothing_kept(), as_on_gpu(gpu), fake, Counting() as counting, WithoutDraws():
        task = DrawnTask(config, rows)
        if gathered:
            _let_go(task.model, config.precision == "bf16")
        # Nothing that was drawn is drawn again; from here on no weight is all zero.
        counting.truth = True
        stepper = Stepper(task, alone, World(0, 1, torch.device("cpu")), lambda: False)
        for parameter in task.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        stepper.optimiser.step()
        stepper.optimiser.zero_grad(set_to_none=True)
        counting.begin()
        stepper.step(1)
        counted: Counted = counting.counted
        return counted


def _let_go(model: nn.Module, half: bool) -> None:
    """Gradients of blocks are let go when they are made, their weights half precise if `half`."""
    blocks = [module for module in model.modules() if isinstance(module, Blocks)]
    for module in (module for stack in blocks for module in stack.modules()):
        for name, weight in module._parameters.items():
            # A single number is not gathered.
            if weight is None or weight.ndim == 0:
                continue
            if half:
                module._parameters[name] = weight = nn.Parameter(weight.detach().bfloat16())
            weight.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """Tables that are kept between calls are neither taken from others here nor left to them."""
    _forget_all()
    try:
        yield
    finally:
        _forget_all()


def _forget_all() -> None:
    forget_tables()
    forget_corners()
    forget_positions()

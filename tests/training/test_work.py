"""Operations counted as by hand: products, bytes, how long ago they were touched, how they lie."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from normattn.lab.training.counting import Counting
from normattn.lab.training.dry_step import dry_step
from normattn.lab.training.work import Touch, Work
from normattn.models.flops import flops_per_token

from .settings import small


def worked(run: Callable[[], object]) -> list[Work]:
    """What `run` did that is not free, in order, in torch's tensors without numbers."""
    with FakeTensorMode(), Counting() as counting, torch.no_grad():
        run()
        return [work for work in counting.counted.work if work != Work()]


def ones(*shape: int, half: bool = False) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16 if half else torch.float32)


def test_products_in_place_and_out_of_it() -> None:
    (out,) = worked(lambda: ones(3, 5) @ ones(5, 7))
    assert (out.flops, out.form, out.moved) == (2 * 3 * 5 * 7, "matrix", 4 * (15 + 35 + 21))
    assert not out.half
    assert out.side == pytest.approx(105 ** (1 / 3))
    (in_place,) = worked(lambda: ones(3, 7).addmm_(ones(3, 5), ones(5, 7)))
    assert in_place[:2] == out[:2]
    (half,) = worked(lambda: ones(3, 5, half=True) @ ones(5, 7, half=True))
    assert (half.half, half.flops, half.moved) == (True, out.flops, out.moved / 2)
    (many,) = worked(lambda: ones(4, 3, 7).baddbmm_(ones(4, 3, 5), ones(4, 5, 7)))
    assert (many.half, many.flops, many.form) == (False, 4 * 210, "batched")
    assert many.side == pytest.approx(out.side)


def test_attention_of_a_cpu_sees_half_of_the_pairs() -> None:
    def attend() -> None:
        q, k, v = ones(1, 2, 32, 8), ones(1, 2, 32, 8), ones(1, 2, 32, 8)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)

    (work,) = worked(attend)
    assert (work.form, work.flops) == ("attention", 2 * 2 * 2 * 32 * 16 * 8)
    assert work.side == pytest.approx((32 * 16 * 8) ** (1 / 3))


def test_bytes_were_touched_so_long_ago() -> None:
    def run() -> None:
        x, y = ones(1024), ones(4096)
        x.mul_(2)
        y.mul_(2)
        x.add_(1)

    first, other, again = worked(run)
    assert first.touched == (Touch(4096, math.inf),)
    assert other.touched == (Touch(16384, math.inf),)
    assert again.touched == (Touch(4096, 16384.0),)


def test_memory_that_is_given_back_is_given_out_again() -> None:
    def run() -> None:
        x = ones(1024)
        for _ in range(3):
            x + 1

    made = [work.touched[1].since for work in worked(run)]
    assert made == [math.inf, 4096.0]


def test_what_is_a_view_by_any_name_is_free() -> None:
    def run() -> None:
        x = ones(8, 8)
        x.view(64)[3:].detach()
        torch.ops.aten._unsafe_view(x, [64])
        x.copy_(x)

    assert worked(run) == []


def test_a_table_is_touched_where_it_is_looked_up() -> None:
    def run() -> None:
        torch.nn.functional.embedding(torch.zeros(3, dtype=torch.int64), ones(1000, 16))

    assert worked(run)[-1].moved == 3 * 8 + 2 * 3 * 16 * 4


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        (lambda: ones(64, 32) * ones(64, 32), "whole"),
        (lambda: ones(64, 32).T * ones(64, 32).T, "whole"),
        (lambda: ones(32, 64).T * ones(64, 32), "scattered"),
        (lambda: ones(64, 32)[:, :16] * ones(64, 16), "scattered"),
        (lambda: ones(64, 512)[:, :256] * ones(64, 256), "whole"),
        (lambda: ones(64, 32) * ones(64, 32, half=True), "mixed"),
        (lambda: ones(64, 32).bfloat16(), "whole"),
        (lambda: ones(64, 32) * ones(32), "whole"),
    ],
)
def test_how_tensors_lie(run: Callable[[], object], layout: str) -> None:
    assert [work.layout for work in worked(run)] == [layout]


def test_exponentials_are_those_of_the_result() -> None:
    assert [work.exponentials for work in worked(lambda: ones(8, 8).softmax(-1))] == [64]


def test_the_products_of_a_model_are_those_counted_by_hand() -> None:
    """Forward once, backward twice; of attention the backward makes the scores again."""
    model = {"dim": 64, "layers": 3, "heads": 4, "train_length": 64, "score": "KNA-logn"}
    config = small(model=model)
    by_form = {"matrix": 0.0, "batched": 0.0, "attention": 0.0}
    for work, times in dry_step(config).work.items():
        by_form[work.form] += times * work.flops / (config.batch_size * config.sequence_length)
    by_hand = flops_per_token(config.model, config.sequence_length)
    assert by_form["matrix"] == 3 * by_hand.weights
    # Half of all pairs, of which a text sees those with itself as well: 64 of 65.
    attention = 3.5 * by_hand.attention * 64 / 65
    assert by_form["batched"] + by_form["attention"] == pytest.approx(attention)

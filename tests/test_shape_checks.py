"""The quick checks of shapes and types refuse what jaxtyping's own refuse, and keep nothing."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Bool, Float, Float32, Int, Num, Shaped, TypeCheckError, config
from jaxtyping._storage import pop_shape_memo, push_shape_memo
from torch import Tensor
from torch.nn import Parameter

import shape_checks
from normattn.layers.norms import RMSNorm
from thorough import few

Wrapped = Callable[..., Any]
SQUARE, WIDE = torch.zeros(2, 2), torch.zeros(2, 3)


def wrapped(fn: Any) -> Any:
    return shape_checks.jaxtyped(typechecker=beartype)(fn)


def both(x: Float[Tensor, "a b"], y: Float[Tensor, "b a"]) -> Float[Tensor, "a a"]:
    return x


def count(number: int, names: dict[str, int] | None = None) -> str:
    return str(number) if number else 0  # type: ignore[return-value]


def numbers(last: int) -> Iterator[int]:
    yield from range(last)


def calls() -> dict[str, tuple[Any, tuple[Any, ...], bool]]:
    """A function, what it is given, and whether that is right."""

    @dataclass
    class Holder:
        number: int
        x: Float[Tensor, "a a"]

    return {
        "shapes": (both, (SQUARE, SQUARE), True),
        "a size that differs": (both, (WIDE, WIDE), False),
        "a result of another shape": (both, (WIDE, WIDE.T), False),
        "too few axes": (both, (SQUARE[0], SQUARE), False),
        "whole numbers": (both, (SQUARE.int(), SQUARE), False),
        "no tensor": (both, (1, SQUARE), False),
        "a type": (count, (1,), True),
        "another type": (count, ("1",), False),
        "another type within": (count, (1, {"a": "b"}), False),
        "a result of another type": (count, (0,), False),
        "a generator": (numbers, (2,), True),
        "a generator of another": (numbers, ("2",), False),
        "a dataclass": (Holder, (1, SQUARE), True),
        "a dataclass of another type": (Holder, ("1", SQUARE), False),
        "a dataclass of another shape": (Holder, (1, WIDE), False),
    }


@pytest.mark.parametrize("case", calls())
@pytest.mark.parametrize("by", [shape_checks.jaxtyped, shape_checks._whole], ids=["ours", "theirs"])
def test_what_is_refused(case: str, by: Any) -> None:
    fn, given, right = calls()[case]
    checked = by(fn, typechecker=beartype)
    if right:
        checked(*given)
    else:
        with pytest.raises(TypeCheckError):
            checked(*given)


ANNOTATIONS: tuple[Any, ...] = (
    *(Float[Tensor, "a b"], Float[Tensor, "a a"], Float[Tensor, "b a"], Float[Tensor, "a"]),
    *(Float[Tensor, "2 b"], Float[Tensor, "_ a"], Float[Tensor, ""], Float[Tensor, "*a b"]),
    *(Float[Tensor, "#a b"], Float[Tensor, "a a+1"], Float32[Tensor, "a b"]),
    *(Int[Tensor, "a b"], Bool[Tensor, "b a"], Shaped[Tensor, "a b"], Num[Tensor, "a b"]),
)
VALUES = (
    *(SQUARE, WIDE, WIDE.T, SQUARE[0], SQUARE[0, 0], torch.zeros(1, 2), torch.zeros(2, 2, 2)),
    *(SQUARE.double(), WIDE.int(), SQUARE.bool(), WIDE.bfloat16(), Parameter(WIDE)),
    *(SQUARE.numpy(), 1.0, None),
)


@pytest.mark.parametrize("first", few(ANNOTATIONS, ANNOTATIONS[::3].__contains__), ids=repr)
def test_an_instance_is_what_theirs_calls_one_and_binds_the_same(first: Any) -> None:
    """One value after another, as in a call: the second meets the sizes that the first bound."""
    judged = set()
    for one, second, two in itertools.product(VALUES, ANNOTATIONS, VALUES):
        found = []
        for check in (shape_checks._is_instance, shape_checks._whole_check):
            push_shape_memo({})
            try:
                said = (_said(check, first, one), _said(check, second, two))
                found.append((said, dict(shape_checks._memos()[0])))
            finally:
                pop_shape_memo()
        assert found[0] == found[1], (first, one, second, two)
        judged.add(found[0][0])
    assert len(judged) >= 3


def _said(check: Wrapped, annotation: Any, value: object) -> object:
    try:
        return check(annotation, value)
    except Exception as error:
        return type(error)


def test_the_hook_wraps_by_it() -> None:
    assert jaxtyping.jaxtyped is shape_checks.jaxtyped
    with pytest.raises(TypeCheckError):
        RMSNorm("4")  # type: ignore[arg-type]
    with pytest.raises(TypeCheckError):
        RMSNorm(4).forward(torch.zeros(3, 4).int())


def adding(more: Tensor) -> Wrapped:
    def add(x: Float[Tensor, "a b"], *, twice: Tensor = more) -> Float[Tensor, "a a"]:
        return x + more + twice

    checked: Wrapped = wrapped(add)
    return checked


def test_a_nested_function_is_checked_in_each_definition_and_let_go() -> None:
    before = len(shape_checks._made)
    for value in (1.0, 2.0):
        more = torch.full((2, 2), value)
        add = adding(more)
        assert torch.equal(add(SQUARE), 2 * more)
        with pytest.raises(TypeCheckError):
            add(SQUARE[0])
    assert len(shape_checks._made) == before + 1
    gone = weakref.ref(more)
    del more, add
    gc.collect()
    assert gone() is None


def test_functions_alike_on_one_line_have_checks_of_their_own() -> None:
    def made(annotation: str) -> Any:
        names: dict[str, Any] = {"wrapped": wrapped, "__name__": "made"}
        code = f"from __future__ import annotations\ndef f():\n    def g(x: {annotation}): return x"
        exec(f"{code}\n    return wrapped(g)\n", names)
        return names["f"]()

    whole, text = made("int"), made("str")
    assert (whole(1), text("1")) == (1, "1")
    for fn, wrong in ((whole, "1"), (text, 1)):
        with pytest.raises(TypeCheckError):
            fn(wrong)


def test_dimensions_are_those_of_one_call() -> None:
    def inner(x: Float[Tensor, "a"]) -> Float[Tensor, "a"]:
        return x

    inner = wrapped(inner)

    def outer(x: Float[Tensor, "a"]) -> Float[Tensor, "a"]:
        inner(torch.zeros(5))
        return inner(x)

    assert wrapped(outer)(torch.zeros(3)).shape == (3,)


def test_switched_off_nothing_is_checked() -> None:
    config.update("jaxtyping_disable", True)
    try:
        assert wrapped(count)("a") == "a"
        assert wrapped(both)(WIDE, 1) is WIDE
    finally:
        config.update("jaxtyping_disable", False)

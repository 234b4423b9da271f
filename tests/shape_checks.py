"""The checks of shapes and types at each call of src: jaxtyping's and beartype's, made cheap.

`--jaxtyping-packages` wraps every function of src by `jaxtyping.jaxtyped`. That decorator checks
the parameters twice and binds the arguments by hand at each call, and makes the checks of a nested
function anew in each call of the outer one: most of the time of a test. `jaxtyped` below checks
the same annotations by the same beartype, in the same scope of dimensions, once a call; a nested
function's checks are made once for all its definitions. And where a tensor is of an annotation's
type and shape, `_is_instance` sees it at once; what it does not, jaxtyping's own check judges.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, TypeCheckError, config
from jaxtyping._array_types import _anonymous_dim, _any_dtype, _FixedDim, _NamedDim
from jaxtyping._decorator import _destring_annotation
from jaxtyping._storage import (
    get_shape_memo,
    get_treeflatten_memo,
    pop_shape_memo,
    push_shape_memo,
    shape_str,
)
from torch import Tensor
from torch.nn import Parameter

Function = Callable[..., Any]
_whole: Function = jaxtyping.jaxtyped
_annotation: Any = type(AbstractArray)
_flattens: Function = get_treeflatten_memo
_memos: Function = get_shape_memo
_whole_check: Callable[[Any, Any], bool] = _annotation.__instancecheck__
_check: Any = beartype(conf=BeartypeConf(violation_type=TypeCheckError))


class _Place(NamedTuple):
    """Where a function is defined, and by which annotations; equal for each of its definitions."""

    code: CodeType
    module: str
    name: str
    annotations: tuple[tuple[str, Any], ...]

    @property
    def is_nested(self) -> bool:
        """Whether it is defined again and again, and its annotations are text."""
        return "<locals>" in self.name and all(isinstance(x, str) for _, x in self.annotations)


_made: dict[_Place, tuple[FunctionType, str, bool]] = {}
"""Of nested functions: the checks, the name under which they keep what they call, any shapes."""


_axes: dict[Any, tuple[str | int | None, ...] | None] = {}
"""Of annotations: the name, the size or nothing of each axis; none where they say more."""
_typed: dict[tuple[Any, Any], bool] = {}
"""Whether an annotation allows a dtype, of pairs that were seen."""


def install() -> None:
    """What the hook wraps from now on is wrapped by `jaxtyped`."""
    vars(jaxtyping)["jaxtyped"] = jaxtyped
    _annotation.__instancecheck__ = _is_instance


def _is_instance(annotation: Any, value: Any) -> bool:
    """As jaxtyping's own, which judges all that is not plainly an instance."""
    if type(value) is not Tensor and type(value) is not Parameter:
        return _whole_check(annotation, value)
    if annotation not in _axes:
        _axes[annotation] = _plain_axes(annotation)
    axes, shape, dtype = _axes[annotation], value.shape, value.dtype
    if axes is None or len(axes) != len(shape) or _flattens():
        return _whole_check(annotation, value)
    if (annotation, dtype) not in _typed:
        names: Any = annotation.dtypes
        _typed[annotation, dtype] = names is _any_dtype or str(dtype).rpartition(".")[2] in names
    bound: dict[str, int] = _memos()[0]
    new: dict[str, int] = {}
    for axis, size in zip(axes, shape, strict=True):
        if type(axis) is str:
            known = bound.get(axis)
            if (new.setdefault(axis, size) if known is None else known) != size:
                return _whole_check(annotation, value)
        elif axis is not None and axis != size:
            return _whole_check(annotation, value)
    if not _typed[annotation, dtype]:
        return _whole_check(annotation, value)
    bound.update(new)
    return True


def _plain_axes(annotation: Any) -> tuple[str | int | None, ...] | None:
    """Of an annotation of torch tensors by names, sizes and `_` alone."""
    if annotation is AbstractArray or annotation.array_type is not Tensor:
        return None
    if annotation.index_variadic is not None or annotation._skip_instancecheck:
        return None
    found: list[str | int | None] = []
    for each in annotation.dims:
        if each is _anonymous_dim:
            found.append(None)
        elif type(each) is _NamedDim and not each.treepath and not each.broadcastable:
            found.append(each.name)
        elif type(each) is _FixedDim and not each.broadcastable:
            found.append(each.size)
        else:
            return None
    return tuple(found)


def jaxtyped(fn: Any = None, *, typechecker: Any) -> Any:
    """As `jaxtyping.jaxtyped`, whose own wrapping serves what is not handled here."""
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(fn, type):
        made: Any = fn
        if dataclasses.is_dataclass(fn) and not hasattr(made.__init__, "__wrapped__"):
            made.__init__ = jaxtyped(made.__init__, typechecker=typechecker)
        return fn
    odd = inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn)
    if odd or not isinstance(fn, FunctionType):
        return _whole(fn, typechecker=typechecker)
    checks, shapes = _checks(fn)
    return _with_shapes(fn, checks) if shapes else _without_shapes(fn, checks)


def _checks(fn: FunctionType) -> tuple[Function, bool]:
    """`fn` between the checks of its parameters and its result; whether these have shapes."""
    place = _Place(fn.__code__, fn.__module__, fn.__qualname__, tuple(fn.__annotations__.items()))
    known = _made.get(place) if place.is_nested else None
    if known is None:
        copy = _annotated(fn)
        shapes = any(map(_has_shape, copy.__annotations__.values()))
        checks = _check(copy)
        keeps = [name for name, x in (checks.__kwdefaults__ or {}).items() if x is copy]
        if not place.is_nested or len(keeps) != 1:
            return checks, shapes
        known = _made[place] = (_calling(checks, keeps[0], None), keeps[0], shapes)
    checks, name, shapes = known
    return _calling(checks, name, fn), shapes


def _annotated(fn: FunctionType) -> FunctionType:
    """A copy of `fn` whose annotations are types."""
    copy = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    functools.update_wrapper(copy, fn)
    del copy.__wrapped__  # type: ignore[attr-defined]
    copy.__kwdefaults__, copy.__annotations__ = fn.__kwdefaults__, {}
    for name, each in fn.__annotations__.items():
        meant = _destring_annotation(each, fn.__globals__)  # type: ignore[no-untyped-call]
        copy.__annotations__[name] = meant
    return copy


def _calling(checks: FunctionType, name: str, fn: FunctionType | None) -> FunctionType:
    """Beartype's checks about another definition of the same code."""
    code, names = checks.__code__, checks.__globals__
    copy = FunctionType(code, names, checks.__name__, checks.__defaults__, checks.__closure__)
    copy.__kwdefaults__ = {**(checks.__kwdefaults__ or {}), name: fn}
    return copy


def _has_shape(annotation: Any) -> bool:
    if isinstance(annotation, list | tuple):
        return any(map(_has_shape, annotation))
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    return isinstance(annotation, TypeVar) or any(map(_has_shape, get_args(annotation)))


def _with_shapes(fn: Function, checks: Function) -> Function:
    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if config.jaxtyping_disable:
            return fn(*args, **kwargs)
        memos = push_shape_memo({})
        try:
            return checks(*args, **kwargs)
        except TypeCheckError as error:
            error.add_note(shape_str(memos))
            raise
        finally:
            pop_shape_memo()

    return checked


def _without_shapes(fn: Function, checks: Function) -> Function:
    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return fn(*args, **kwargs) if config.jaxtyping_disable else checks(*args, **kwargs)

    return checked

"""Operations of a graph on values: selection, splitting, joining, averaging, and building of arguments.

Pure, and imports neither NumPy nor torch: their values are recognised through `sys.modules`, because a process that
holds such a value has the module loaded. Used by actors for messages and arguments, by the driver for results. Errors
reach the caller of `get`: they describe the value and name the types that would work.

Kinds of values that can be split and joined (`split`, `gather`); the first that fits is used:

    batch     the type has shard(index, count), or slice(start, stop) and size; joined by its from_batches(list)
    dict      each of its values; subclasses keep their type
    array     NumPy, torch and types that behave like torch's (TensorDict), the array API standard (CuPy, JAX): any axis
    sequence  list, tuple, str, bytes, ...: along axis 0
"""

from __future__ import annotations

import copy
import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any

from raylane.graph.plan.ir import MUTABLE_CONTAINERS, Build, Const, Expression, Join, Ref, Select, Step


def evaluate(expression: Expression, values: Any, results: dict[int, Any] | None = None) -> Any:
    """Return the value of an expression; `values[index]` is the value with this index.

    Mutable containers among constants are copied, but not the objects in them. `results` holds the copies of the same
    call, so that one container in several arguments stays one object.
    """
    kind = type(expression)
    if kind is Ref:
        return values[expression.value]  # type: ignore[union-attr]
    if kind is Const:
        constant: Any = expression
        return copy_containers(constant.value, results) if constant.mutable else constant.value
    # Type checks in the order of frequency: most arguments are values or constants.
    if isinstance(expression, Build):
        items = [evaluate(item, values, results) for item in expression.items]
        if expression.kind == "dict":
            return dict(zip(expression.keys, items, strict=True))
        return tuple(items) if expression.kind == "tuple" else items
    if isinstance(expression, Select):
        return select(evaluate(expression.base, values, results), expression.steps)
    assert isinstance(expression, Join), expression
    return _join(expression, values, results)


def copy_containers(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Copy lists, dicts, sets, tuples and bytearrays at any depth. Other objects (arrays, tensors) are not copied."""
    kind = type(value)
    if kind is not tuple and kind not in MUTABLE_CONTAINERS:
        return value
    copies = {} if copies is None else copies
    if id(value) in copies:  # shared with another argument, or inside itself
        return copies[id(value)]
    new: Any
    if kind is list:
        new = copies[id(value)] = []
        new.extend([copy_containers(item, copies) for item in value])
    elif kind is dict:
        new = copies[id(value)] = {}
        new.update({key: copy_containers(item, copies) for key, item in value.items()})
    elif kind is tuple:
        new = copies[id(value)] = tuple([copy_containers(item, copies) for item in value])
    else:
        new = copies[id(value)] = kind(value)
    return new


def _join(expression: Join, values: Any, results: dict[int, Any] | None) -> Any:
    if expression.how == "first":
        return evaluate(expression.items[0], values, results)
    items = [evaluate(item, values, results) for item in expression.items]
    return gather(items, expression.axis) if expression.how == "gather" else mean(items)


def select(value: Any, steps: Sequence[Step]) -> Any:
    """Return the part of a value that the steps select: an item, an attribute, a part of a scatter, or None ("done").

    KeyError, IndexError, TypeError or AttributeError if the value has no such item or attribute; ValueError and
    TypeError like `split`.
    """
    for step in steps:
        how = step[0]
        if how == "item":
            try:
                value = value[step[1]]
            except (LookupError, TypeError) as error:
                kinds = (KeyError, IndexError, LookupError, TypeError)
                kind = next(known for known in kinds if isinstance(error, known))
                raise kind(f"[{step[1]!r}] of {_described(value)}: {error}") from error
        elif how == "part":
            value = split(value, step[1], step[2], step[3])
        elif how == "return":
            value = _returned(value, step[1], step[2])
        elif how == "attr":
            name = step[1]
            try:
                value = getattr(value, name)
            except AttributeError as error:
                hint = f"; for its key write node[{name!r}]" if isinstance(value, dict) and name in value else ""
                raise AttributeError(f".{name} of {_described(value)}: {error}{hint}", name=name, obj=value) from error
        else:
            assert how == "done", f"the step {step!r} is not for select"
            value = None
    return value


def _returned(value: Any, index: int, count: int) -> Any:
    """Return one of the results of a method that declares num_returns."""
    try:
        size = len(value)
    except TypeError as error:
        raise TypeError(f"the method declares num_returns={count} and returned {_described(value)}") from error
    if size != count:
        raise ValueError(f"the method declares num_returns={count} and returned {size} values")
    return value[index]


# Splitting


def split(value: Any, index: int, count: int, axis: int = 0) -> Any:
    """Return part `index` of `count` contiguous parts of a value along `axis`.

    Lengths differ by at most one; the first parts are the longer ones. Parts of arrays and tensors, and of types with a
    `slice` method, share the value's memory; lists, tuples and strings are copied. ValueError if the length along
    `axis` is below `count`, or the axis does not exist; TypeError if the value cannot be split.
    """
    kind: Any = type(value)  # Any: mypy does not take a type for hashable
    part = _splitter_of(kind)
    if part is not None:
        _only_axis_0("scatter", value, axis)
        return part(value, index, count)
    if isinstance(value, dict):
        return _same_dict(value, {key: _at(key, split, item, index, count, axis) for key, item in value.items()})
    if _is_array(value):
        place = _checked_axis("scatter", value, axis)
        start, stop = _bounds(value, value.shape[place], index, count, place)
        return value[(slice(None),) * place + (slice(start, stop),)]
    if isinstance(value, Sequence):
        _only_axis_0("scatter", value, axis)
        return value[slice(*_bounds(value, len(value), index, count, 0))]
    raise TypeError(
        f"scatter of {_described(value)}: cannot split it into {count} parts. Pass a list, tuple, string, array, "
        "tensor or a dict of those, or an object with a method shard(index, count)"
    )


def _bounds(value: Any, length: int, index: int, count: int, axis: int) -> tuple[int, int]:
    """Return start and stop of part `index`, as numpy.array_split does."""
    if length < count:
        raise ValueError(
            f"scatter of {_described(value)}: its length along axis {axis} is {length}, but {count} parts are "
            f"wanted. Pass at least {count}, or scatter into fewer parts"
        )
    size, longer = divmod(length, count)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


@functools.lru_cache(maxsize=256)
def _splitter_of(kind: type) -> Callable[[Any, int, int], Any] | None:
    """Return a function (value, index, count) that calls the type's own method, or None if the type has none.

    A parameter called `index` is passed by name, because some types have the two parameters in the other order
    (`datasets.Dataset.shard(num_shards, index)`).
    """
    required = _parameters(kind, "shard")
    # `datasets.Dataset.shard` takes (num_shards, index), others (index, count): the name decides.
    if "index" in required and len(required) == 2:
        other = next(name for name in required if name != "index")
        return lambda value, index, count: value.shard(**{"index": index, other: count})
    if len(required) == 2:
        return lambda value, index, count: value.shard(index, count)
    if _parameters(kind, "slice") == ["start", "stop"] and hasattr(kind, "size"):
        return lambda value, index, count: value.slice(*_bounds(value, value.size, index, count, 0))
    return None


def _parameters(kind: type, method: str) -> list[str]:
    """Return the required parameters of a type's method, without self; an empty list if there is no such method."""
    function = inspect.getattr_static(kind, method, None)
    if not inspect.isfunction(function):
        return []
    parameters = list(inspect.signature(function).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind in plain
    ]


# Joining


def gather(values: Sequence[Any], axis: int | None = None) -> Any:
    """Return a list of the values (`axis=None`), or the values joined along `axis`: the inverse of `split`.

    Arrays and tensors are copied into one. ValueError if shapes, keys or the axis do not fit, TypeError if the values
    are of different kinds or cannot be joined.
    """
    if axis is None:
        return list(values)
    first = values[0]
    _one_kind("gather", values)
    join = getattr(type(first), "from_batches", None)
    if join is not None:
        _only_axis_0("gather", first, axis)
        return join(list(values))
    if isinstance(first, dict):
        return _by_key("gather", values, lambda items: gather(items, axis))
    if _is_array(first):
        place = _checked_axis("gather", first, axis)
        try:
            if hasattr(first, "__torch_function__"):
                return sys.modules["torch"].cat(list(values), place)
            if _is_of("numpy", "ndarray", first):
                numpy = sys.modules["numpy"]
                # numpy.concatenate drops masks.
                masked = any(isinstance(value, numpy.ma.MaskedArray) for value in values)
                return (numpy.ma if masked else numpy).concatenate(values, place)
            return first.__array_namespace__().concat(list(values), axis=place)
        except (ValueError, TypeError, RuntimeError) as error:
            shown = ", ".join(_described(value) for value in values)
            raise ValueError(f"gather along axis {place} of {shown}: {error}") from error
    if isinstance(first, str | bytes):
        _only_axis_0("gather", first, axis)
        return first[:0].join(values)
    if isinstance(first, list | tuple):
        _only_axis_0("gather", first, axis)
        joined = [item for value in values for item in value]
        return joined if isinstance(first, list) else tuple(joined)
    raise TypeError(
        f"gather along axis {axis} of {_described(first)}: cannot join such values. Pass lists, tuples, strings, "
        "arrays, tensors or dicts of those, or objects whose type has from_batches(list); "
        "axis=None gives a list of the values"
    )


# Averaging


def mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, arrays or tensors, or of dicts, lists and tuples of those, item by item.

    Floats keep their dtype (16 bits and less are summed in 32), ints and bools give floats (float64 for NumPy, torch's
    default dtype for torch). Shapes are not broadcast: ValueError if shapes, lengths or keys differ. TypeError if the
    values are of different kinds, or have no mean.
    """
    first = values[0]
    if all(isinstance(value, numbers.Number) for value in values):
        if any(_is_of("numpy", "generic", value) for value in values):  # keep NumPy's rules for dtypes
            np = sys.modules["numpy"]
            return _mean_array([np.asarray(value) for value in values])[()]
        return sum(values[1:], values[0]) / len(values)
    _one_kind("mean", values)
    if isinstance(first, dict):
        return _by_key("mean", values, mean)
    if _is_array(first):
        shapes = [tuple(value.shape) for value in values]
        if len(set(shapes)) > 1:
            raise ValueError(f"mean of arrays of the shapes {', '.join(map(str, shapes))}: they must be equal")
        return _mean_array(values)
    if isinstance(first, list | tuple):
        lengths = [len(value) for value in values]
        if len(set(lengths)) > 1:
            raise ValueError(f"mean of {_kind(first)}s of the lengths {lengths}: they must be equal")
        items = [_at(index, mean, item) for index, item in enumerate(zip(*values, strict=True))]
        if isinstance(first, list):
            return items
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    raise TypeError(
        f"mean of {_described(first)}: such values have no mean. Pass numbers, arrays, tensors, or dicts, lists and "
        "tuples of those"
    )


def _mean_array(values: Sequence[Any]) -> Any:
    if _is_of("torch", "Tensor", values[0]):
        torch = sys.modules["torch"]
        common = functools.reduce(torch.promote_types, (value.dtype for value in values))
        inexact = common.is_floating_point or common.is_complex
        wide = (torch.float32 if common.itemsize < 4 else common) if inexact else torch.int64  # a sum of ints is exact
        total = values[0].to(wide, copy=True)
        for value in values[1:]:
            total += value.to(wide)
        return (total / len(values)).to(common) if inexact else torch.true_divide(total, len(values))
    if not _is_of("numpy", "ndarray", values[0]):
        return sum(values[1:], values[0]) / len(values)
    np = sys.modules["numpy"]
    masked = next((value for value in values if isinstance(value, np.ma.MaskedArray)), None)
    if masked is not None:
        raise TypeError(
            f"mean of {_described(masked)}: whether masked items count is not known. Pass array.filled(value), or use "
            "gather and numpy.ma"
        )
    dtype = np.result_type(*(value.dtype for value in values))
    if dtype.kind not in "biufc":
        raise TypeError(f"mean of {_described(values[0])}: only numbers have a mean")
    # The mean of ints is no int: float64, as numpy.mean gives.
    if dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    # Sum half precision in single precision: 65,504 is the largest float16.
    total = values[0].astype(np.promote_types(dtype, np.float32))
    for value in values[1:]:
        np.add(total, value, out=total)
    np.true_divide(total, len(values), out=total)
    return total.astype(dtype, copy=False)


# Kinds of values


def _is_of(module: str, name: str, value: Any) -> bool:
    """Return True if a value is an instance of `module.name`. Does not import the module."""
    kind = getattr(sys.modules.get(module), name, None)  # None too while another thread still imports the module
    return kind is not None and isinstance(value, kind)


def _is_array(value: Any) -> bool:
    """Return True if a value has a shape, can be indexed by tuples of slices, and its module can concatenate it."""
    if _is_of("numpy", "ndarray", value) or _is_of("torch", "Tensor", value):
        return True
    return hasattr(value, "__array_namespace__") or (hasattr(value, "__torch_function__") and hasattr(value, "shape"))


def _checked_axis(operation: str, array: Any, axis: int) -> int:
    rank = len(array.shape)
    if not -rank <= axis < rank:
        cause = "it has no dimensions" if rank == 0 else f"its axes are 0 to {rank - 1}"
        raise ValueError(f"{operation} along axis {axis} of {_described(array)}: {cause}")
    return axis % rank


def _only_axis_0(operation: str, value: Any, axis: int) -> None:
    if axis != 0:
        raise ValueError(
            f"{operation} along axis {axis} of {_described(value)}: only arrays and tensors have other axes than 0"
        )


def _one_kind(operation: str, values: Sequence[Any]) -> None:
    first = values[0]
    others = [value for value in values if _family(value) is not _family(first)]
    if others:
        raise TypeError(f"{operation} of {_kind(first)} and {_kind(others[0])}: the values must be of one kind")


def _family(value: Any) -> type:
    """Return the type that stands for all types that may be joined with this value.

    Subclasses of dicts, lists, tuples, tensors (such as Parameter) and arrays may be joined with each other.
    """
    # Parameter and Tensor may be mixed, and so may subclasses of ndarray.
    for module, name in (("torch", "Tensor"), ("numpy", "ndarray")):
        if _is_of(module, name, value):
            return sys.modules[module].__dict__[name]  # type: ignore[no-any-return]
    return next((kind for kind in (dict, list, tuple, str, bytes) if isinstance(value, kind)), type(value))


def _by_key(operation: str, dicts: Sequence[dict[Any, Any]], join: Callable[[list[Any]], Any]) -> Any:
    keys = set(dicts[0])
    for number, mapping in enumerate(dicts):
        if set(mapping) != keys:
            raise ValueError(
                f"{operation} of dicts with different keys: value 0 has {list(dicts[0])}, "
                f"value {number} has {list(mapping)}"
            )
    return _same_dict(dicts[0], {key: _at(key, join, [mapping[key] for mapping in dicts]) for key in dicts[0]})


def _same_dict(like: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in a dict of the same type as `like`, with its default factory and attributes."""
    if type(like) is dict:
        return items
    merged = copy.copy(like)
    merged.update(items)
    return merged


def _at(key: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; its error gets a note that names the item of the value."""
    try:
        return function(*args)
    except (ValueError, TypeError) as error:
        error.add_note(f"in the item [{key!r}] of the value")
        raise


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _described(value: Any) -> str:
    """Return the text of a value for errors: its type, and its shape, keys or length."""
    kind = _kind(value)
    if _is_array(value):
        return f"{kind} of shape {tuple(value.shape)} and dtype {getattr(value, 'dtype', None)}"
    if isinstance(value, dict):
        keys = list(value)
        return f"{kind} with the keys {keys if len(keys) <= 20 else [*keys[:20], '...']}"
    if isinstance(value, Sequence):
        return f"{kind} of length {len(value)}"
    return kind if value is not None else "None"

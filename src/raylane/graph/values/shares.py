"""Shares of a collective: the tensors of one member as bytes for the others, and the result from all of them. Pure.

    share()    tensors  ->  Share: what they are, and one array of bytes for each dtype
    combine()  the Shares of all members  ->  new tensors

Bytes, because NumPy knows no bfloat16, and because a message with NumPy arrays is read in place: the tensors of others
are added from the memory where their sender has written them. Many small tensors travel as one array. Bytes are in the
byte order of the machine, whatever the order of the array.

So a value must be nothing but its memory: masked arrays, subclasses, and sparse, quantised or nested tensors are
refused (`_refusal`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from raylane.core.memory.layout import bytes_at
from raylane.graph.collectives import Collective


class Spec(NamedTuple):
    """One tensor of a share, as the other members must have it too."""

    path: str
    """Place in the value: `['w'][0]`; empty for the value itself."""
    module: str
    """"torch" or "numpy"."""
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}{': ' if self.path else ''}{self.module}.{self.dtype} {self.shape}"


class Share:
    """Contribution of one member. In other processes without `like`."""

    __slots__ = ("arrays", "like", "specs")

    def __init__(self, specs: tuple[Spec, ...], arrays: Sequence[Any], like: Any = None) -> None:
        self.specs = specs
        self.arrays = arrays
        """Bytes of all tensors of one dtype, for each dtype in order of first use."""
        self.like = like
        """(values, tensors): the member's own."""

    def __reduce__(self) -> Any:
        return _received, (tuple(map(tuple, self.specs)), self.arrays)


def _received(specs: Sequence[Any], arrays: Sequence[Any]) -> Share:
    return Share(tuple(Spec(*spec) for spec in specs), arrays)


def share(collective: Collective, *values: Any) -> Any:
    """Return what this member gives: one Share for all, or for a reducescatter one for each member.

    TypeError if a value holds anything but tensors and arrays that are nothing but their memory, or has no such
    reduction; ValueError if it has no such parts.
    """
    several = len(values) > 1  # inputs are named in messages where there are several
    tensors = [
        array
        for place, value in enumerate(values)
        for array in _tensors(value, collective.name, f"input {place}" if several else "")
    ]
    specs = tuple(spec for spec, _ in tensors)
    for spec in specs:
        _check(collective, spec)
    array = [tensor for _, tensor in tensors]
    like = values, array
    if collective.kind != "reducescatter":
        return Share(specs, _packed(specs, array), like)
    # A part for each member, so that the planner sends it to that member alone.
    parts = ([_rows(tensor, rank, collective.size) for tensor in array] for rank in range(collective.size))
    return tuple(Share(specs, _packed(specs, part), like) for part in parts)


def combine(collective: Collective, names: Sequence[str], shares: Sequence[Share]) -> Any:
    """Return the result of a member from the shares of all, by rank. `names` are the members' names.

    ValueError, with the members and their shapes, if the shares do not fit together.
    """
    own_share = shares[collective.rank]
    _check_equal(collective, names, shares)
    values, tensors = own_share.like
    # Every dtype travels in an array of its own, so the tensors are made out of order.
    outputs: list[Any] = [None] * len(own_share.specs)
    for number, places in enumerate(_by_dtype(own_share.specs)):
        spec = own_share.specs[places[0]]
        shapes = [_part_shape(collective, own_share.specs[place].shape) for place in places]
        if collective.kind == "allgather":
            parts = [_cut(array, shapes) for array in _flat(spec, shares, number)]
            join = sys.modules["numpy"].concatenate if spec.module == "numpy" else sys.modules["torch"].cat
            results = [join(list(pieces)) for pieces in zip(*parts, strict=True)]
        else:
            results = _cut(_reduced(spec, collective.op, _flat(spec, shares, number)), shapes)
        for place, result in zip(places, results, strict=True):
            outputs[place] = result if spec.module == "numpy" else result.to(tensors[place].device)
    remaining = iter(outputs)
    answers = [_rebuilt(value, remaining) for value in values]
    return answers[0] if len(answers) == 1 else tuple(answers)


# Tensors in values


def _tensors(value: Any, name: str, path: str) -> Iterator[tuple[Spec, Any]]:
    """Yield the tensors and arrays in a value, in order."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if is_tensor or (numpy is not None and isinstance(value, numpy.ndarray)):
        refusal = _tensor_refusal(value) if is_tensor else _array_refusal(value)
        if refusal is not None:
            raise TypeError(f"{name} of a {refusal[0]}{f' at {path}' if path else ''}: {refusal[1]}")
        module, dtype = ("torch", _name_of(value.dtype)) if is_tensor else ("numpy", value.dtype.name)
        yield Spec(path, module, dtype, tuple(value.shape)), value
    elif type(value) in (list, tuple, dict):
        items = value.items() if type(value) is dict else enumerate(value)
        for key, item in items:
            yield from _tensors(item, name, f"{path}[{key!r}]")
    else:
        kind = type(value)
        shown = f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.")
        raise TypeError(
            f"{name} of a value of type {shown}{f' at {path}' if path else ''}: the inputs of a collective are tensors "
            "or arrays of numbers, and lists, tuples and dicts of those. Return such a value, or use "
            "raylane.graph.gather or mean"
        )


def _array_refusal(array: Any) -> tuple[str, str] | None:
    """Return (kind, cause and remedy) of an array that is more than its memory, or no numbers; else None."""
    numpy, kind = sys.modules["numpy"], type(array)
    if isinstance(array, numpy.ma.MaskedArray):
        return "masked array", "its mask would be lost. Return array.filled(value), and the mask as an array of its own"
    if kind not in (numpy.ndarray, numpy.memmap):
        return (
            f"subclass {kind.__module__}.{kind.__qualname__} of numpy.ndarray",
            "only the memory of an array travels. Return numpy.asarray(array)",
        )
    if array.dtype.kind not in "biufc":
        return f"numpy array of dtype {array.dtype}", "only numbers have a reduction. Convert it to a dtype of numbers"
    return None


def _tensor_refusal(tensor: Any) -> tuple[str, str] | None:
    """Return (kind, cause and remedy) of a tensor that is more than its memory, or has none; else None."""
    torch, kind = sys.modules["torch"], type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested:
        return (
            f"subclass {kind.__module__}.{kind.__qualname__} of torch.Tensor",
            "only the memory of a tensor travels. Return a plain tensor, such as to_local() of a DTensor",
        )
    from raylane.transport.value.leaf_memory import lacking_memory  # here: it needs torch

    lacking = lacking_memory(tensor)
    return None if lacking is None else ("tensor without memory of its own", lacking)


def _name_of(member: Any) -> str:
    """Return the name of a dtype or layout of torch."""
    return str(member).removeprefix("torch.")


def _rebuilt(value: Any, tensors: Iterator[Any]) -> Any:
    """Return the value with its tensors replaced, in order."""
    if type(value) in (list, tuple):
        return type(value)([_rebuilt(item, tensors) for item in value])
    if type(value) is dict:
        return {key: _rebuilt(item, tensors) for key, item in value.items()}
    return next(tensors)


# Checks


def _check(collective: Collective, spec: Spec) -> None:
    """Raise an error if a tensor has no such reduction, or cannot be split or joined."""
    text = f"{collective.name} of {spec}"
    if spec.dtype == "bool" and collective.op in ("sum", "prod", "avg"):
        raise TypeError(f"{text}: bools have no {collective.op}; use min, max, or convert them")
    if spec.dtype.startswith("complex") and collective.op in ("min", "max"):
        raise TypeError(f"{text}: complex numbers have no order; use sum, prod or avg")
    if collective.op == "avg" and not spec.dtype.startswith(("float", "bfloat", "complex")):
        raise TypeError(f"{text}: the mean of integers is none; convert them to a float dtype")
    if collective.op and not _is_reducible(spec.module, spec.dtype, collective.op):
        raise TypeError(f"{text}: {spec.module} has no {collective.op} of {spec.dtype}; convert it to another dtype")
    if collective.kind != "allreduce" and not spec.shape:
        raise ValueError(f"{text}: it has no dimensions; reshape it to (1,)")
    if collective.kind == "reducescatter" and spec.shape[0] % collective.size:
        raise ValueError(
            f"{text}: the length {spec.shape[0]} along axis 0 must be divisible by the number of actors, "
            f"{collective.size}; pad the tensor"
        )


@functools.cache
def _is_reducible(module: str, dtype: str, op: str) -> bool:
    """Return True if a reduction of this dtype can be computed; asked of NumPy or torch with one element."""
    if module == "numpy":
        array = sys.modules["numpy"].ones(1, dtype)
    else:
        torch = sys.modules["torch"]
        try:
            array = torch.ones(1, dtype=torch.float32, device="cpu").to(getattr(torch, dtype))
        except (RuntimeError, NotImplementedError):
            return False
    try:
        _reduced(Spec("", module, dtype, (1,)), op, [array, array])
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _check_equal(collective: Collective, names: Sequence[str], shares: Sequence[Share]) -> None:
    """Raise ValueError if the members gave different tensors."""
    first = shares[0].specs
    # All are compared with the first one, in every member: so all raise the same error.
    for rank, other in enumerate(shares):
        if other.specs == first:
            continue
        lengths = len(first), len(other.specs)
        # Name the first difference: hundreds of gradients would not fit into a message.
        place = next((i for i, pair in enumerate(zip(first, other.specs, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            detail = f"{names[0]} gave {lengths[0]} tensors, {names[rank]} {lengths[1]}"
        else:
            detail = f"{names[0]} gave {first[place]}, {names[rank]} gave {other.specs[place]}"
        raise ValueError(f"{collective.name}: all actors must give equal shapes and dtypes, but {detail}")


# Bytes


def _by_dtype(specs: Sequence[Spec]) -> list[list[int]]:
    """Return the places of the tensors of each dtype."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, spec in enumerate(specs):
        places.setdefault((spec.module, spec.dtype), []).append(place)
    return list(places.values())


def _packed(specs: Sequence[Spec], tensors: Sequence[Any]) -> list[Any]:
    """Return one array of bytes for each dtype; the memory of the tensor itself where it is the only one."""
    return [_bytes_of(specs[places[0]].module, [tensors[place] for place in places]) for places in _by_dtype(specs)]


def _bytes_of(module: str, tensors: Sequence[Any]) -> Any:
    if module == "numpy":
        numpy = sys.modules["numpy"]
        # No copy for one contiguous array: the encoder of the message copies it once, to its readers.
        flat = [numpy.ascontiguousarray(tensor, _native_dtype(tensor)).reshape(-1) for tensor in tensors]
        return (flat[0] if len(flat) == 1 else numpy.concatenate(flat)).view(numpy.uint8)
    torch = sys.modules["torch"]
    # Tensors of a GPU go through host memory.
    # By `as_strided`: one element has its old stride even after `contiguous`, and `view` refuses that.
    flat = [_plain(tensor).contiguous().as_strided((tensor.numel(),), (1,)).cpu() for tensor in tensors]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).view(torch.uint8).numpy()


def _native_dtype(array: Any) -> Any:
    """Return the dtype of a NumPy array in the byte order of the machine."""
    return array.dtype.newbyteorder("=")


def _plain(tensor: Any) -> Any:
    """Return a tensor without gradient and without lazy conjugation or negation, which are not in its memory."""
    return tensor.detach().resolve_conj().resolve_neg()


def _flat(spec: Spec, shares: Sequence[Share], number: int) -> list[Any]:
    """Return array `number` of each share as a flat tensor or array on the same memory, which must not be written."""
    arrays = [member_share.arrays[number] for member_share in shares]
    if spec.module == "numpy":
        return [data.view(spec.dtype) for data in arrays]
    torch = sys.modules["torch"]
    dtype = getattr(torch, spec.dtype)
    return [
        # By address: torch warns about memory that is read-only, as that of other members is. The shares outlive the
        # tensors.
        torch.frombuffer(bytes_at(data.ctypes.data, data.nbytes), dtype=dtype)
        if data.nbytes
        else torch.empty(0, dtype=dtype, device="cpu")  # the user may have set another default device
        for data in arrays
    ]


def _rows(tensor: Any, rank: int, size: int) -> Any:
    rows = tensor.shape[0] // size
    return tensor[rank * rows : (rank + 1) * rows]


def _part_shape(collective: Collective, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what one member gives another (allgather) or gets."""
    return shape if collective.kind != "reducescatter" else (shape[0] // collective.size, *shape[1:])


def _cut(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return the tensors that lie one after the other in a flat one."""
    start, parts = 0, []
    for shape in shapes:
        end = start + functools.reduce(lambda a, b: a * b, shape, 1)
        parts.append(flat[start:end].reshape(shape))
        start = end
    return parts


# Reductions


def _reduced(spec: Spec, op: str, flat: Sequence[Any]) -> Any:
    """Return a new flat tensor: the reduction in the order of the members, so that all get the same bits."""
    module: Any = sys.modules[spec.module]
    dtype = flat[0].dtype
    wide = _wide_dtype(module, dtype, op)
    # Own and foreign memory is only read; the first sum is new memory, into which the others are added.
    first, *others = [array if array.dtype == wide else _cast(array, wide) for array in flat]
    function: Callable[..., Any] = getattr(module, _FUNCTIONS[op])
    total = function(first, others[0]) if others else _cast(first, wide, copy=True)
    for array in others[1:]:
        function(total, array, out=total)
    if op == "avg":
        total /= len(flat)
    return total if wide == dtype else _cast(total, dtype)


_FUNCTIONS = {"sum": "add", "avg": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}
"""Function of NumPy and of torch for each reduction."""


def _wide_dtype(module: Any, dtype: Any, op: str) -> Any:
    """Return the dtype in which a reduction computes: single precision for halves, whose largest number is 65,504.

    Also for the order of floats of one byte, which torch does not compare.
    """
    least = 4 if op in ("sum", "prod", "avg") else 2
    halves = "float" in str(dtype) and dtype.itemsize < least
    return module.dtype("float32") if halves and module.__name__ == "numpy" else module.float32 if halves else dtype


def _cast(array: Any, dtype: Any, *, copy: bool = False) -> Any:
    return array.to(dtype, copy=copy) if hasattr(array, "to") else array.astype(dtype)

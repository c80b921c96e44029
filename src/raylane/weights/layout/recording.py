"""Records what a loader of weights does: from published names to regions of the reader's tensors.

The loader runs once, on tensors without memory. Each is a view of a published tensor, or of a *node*: a tensor that the
loader has made of published ones (a copy, a concatenation, a stack). What it copies into the reader's tensors, or puts
in their place, is kept as regions. What cannot be told exactly is refused.

    for name, tensor in tensors:                         q_proj [64, 64]  ->  rows 0 to 63 of qkv_proj
        qkv.weight.data[0:64].copy_(tensor)
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from raylane.core.listing import listed
from raylane.errors import WeightsLayoutError
from raylane.weights.layout.boxes import StoredLayout, View, have_overlap
from raylane.weights.layout.plan import SCALED
from raylane.weights.layout.regions import ViewPiece, contiguous_strides, pieces_of_view, regions_of, runs

_aten = torch.ops.aten
VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.diagonal.default,
    _aten.expand.default,
    _aten.lift_fresh.default,
    _aten.narrow.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.chunk.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unfold.default,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten._unsafe_view.default,
}
"""Operations whose results lie in the memory of their argument."""
COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default}
"""Operations whose result has the elements of their argument in memory of its own."""
NEW = {_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default}
"""Operations that make a tensor of which every element is still to be written."""
JOINS = {_aten.cat.default, _aten.stack.default}
"""Operations whose result has the elements of all tensors in a list."""
FILLS = {_aten.fill_.Scalar, _aten.zero_.default}
"""Operations that give a region of the reader's tensors one value."""
ALLOWED = "views (slices, narrow, view, transpose, permute, expand), clone, to, cat, stack, copy_"
EXACT = {
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}
"""Conversions that lose nothing."""
OWN_FOLDER = str(Path(__file__).resolve().parents[2])
TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__))
TensorStream = Iterable[tuple[str, torch.Tensor]]


class Constant(NamedTuple):
    """Region of a reader's tensor that the loader fills with one value, as the padding of a vocabulary."""

    target: str
    view: View
    value: float


class Record(NamedTuple):
    """Record of a loader: regions by published name, and constants."""

    regions: dict[str, tuple[ViewPiece, ...]]
    """Boxes of each published tensor, and the views of the reader's tensors into which they are written."""
    constants: tuple[Constant, ...]

    def targets(self) -> list[str]:
        """Return the names of the reader's tensors into which something is written."""
        names = [region.name for regions in self.regions.values() for region in regions]
        return list(dict.fromkeys([*names, *(constant.target for constant in self.constants)]))


@dataclass
class _MadeTensor:
    """Contiguous tensor without memory, and the pieces of published tensors in it."""

    shape: tuple[int, ...]
    pieces: list[ViewPiece] = field(default_factory=list)


class RecordedTensor(torch.Tensor):
    """Tensor without memory that tells the recorder what is done to it. Seems to lie in host memory."""

    meta_view: torch.Tensor
    """The same view on the meta device: torch computes its shape and strides."""
    node: _MadeTensor
    recorder: LoadRecorder
    casts: tuple[torch.dtype, ...]
    """Dtypes through which the elements have gone, the published one first."""

    @staticmethod
    def __new__(
        cls, inner: torch.Tensor, node: _MadeTensor, recorder: LoadRecorder, casts: tuple[torch.dtype, ...]
    ) -> RecordedTensor:
        """Wrap a view of a node."""
        self: RecordedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=int(inner.storage_offset()),
            dtype=inner.dtype,
            device=torch.device("cpu"),
        )
        self.meta_view, self.node, self.recorder, self.casts = inner, node, recorder, casts
        return self

    def __init__(self, *_: Any) -> None:
        """Everything is done by `__new__`."""

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"RecordedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, of={self.sources()})"

    def sources(self) -> list[str]:
        """Return the published tensors that are in the node."""
        return list(dict.fromkeys(piece.name for piece in self.node.pieces))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow an operation, or refuse it."""
        recorded = [each for each in _flat([*args, *(kwargs or {}).values()]) if isinstance(each, RecordedTensor)]
        return recorded[0].recorder.follow(func, args, kwargs or {}, recorded)


class LoadRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record of one run of a loader. While it is active, it also notes the constants that the loader writes."""

    def __init__(self, published: StoredLayout, targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failure: WeightsLayoutError | None = None
        """The first refused operation: some loaders catch all errors."""
        self._regions: defaultdict[str, list[ViewPiece]] = defaultdict(list)
        self._constants: list[Constant] = []
        self._published = published
        self._targets = targets
        self._home = {tensor.untyped_storage()._cdata: name for name, tensor in targets.items()}
        """Name of the reader's tensor that lies in each storage."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a tensor for each published name, as a folder of weights has them: tied ones once."""
        return self.tensors_of(list(self._published.tensors))

    def tensors_of(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of published names, which may be further names of tied ones."""
        for name in names:
            tensor = self._published.tensor(name)
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            view = View(tensor.shape, contiguous_strides(tensor.shape), 0)
            piece = ViewPiece((0,) * len(tensor.shape), self._published.name_of(name), view)
            yield name, self._wrap(torch.empty(tensor.shape, dtype=dtype, device="meta"), [piece], (dtype,))

    def _wrap(self, inner: torch.Tensor, pieces: list[ViewPiece], casts: tuple[torch.dtype, ...]) -> RecordedTensor:
        return RecordedTensor(inner, _MadeTensor(tuple(inner.shape), pieces), self, casts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a constant that is written into a tensor of the reader; let everything else happen."""
        if func in FILLS and not isinstance(args[0], RecordedTensor):
            target = self._target_of(args[0])
            if target is not None:
                value = float(args[1]) if len(args) > 1 else 0.0
                self._constants.append(Constant(target, self._view_in(target, args[0]), value))
                return args[0]
        return func(*args, **(kwargs or {}))

    def follow(self, func: Any, args: Any, kwargs: Any, recorded: list[RecordedTensor]) -> Any:
        """Return the result of an operation on recorded tensors."""
        first = recorded[0]
        if func in VIEWS:
            out = func(first.meta_view, *args[1:], **kwargs)
            if isinstance(out, list | tuple):
                return type(out)(RecordedTensor(each, first.node, self, first.casts) for each in out)
            return RecordedTensor(out, first.node, self, first.casts)
        if func in COPIES:
            # A tensor of its own: later views are views of it, not of what it was copied from.
            dtype = kwargs.get("dtype") or first.dtype
            inner = torch.empty(first.shape, dtype=dtype, device="meta")
            casts = first.casts if dtype == first.dtype else (*first.casts, dtype)
            return self._wrap(inner, self._pieces(first), casts)
        if func in NEW:
            out = func(first.meta_view, *args[1:], **{**kwargs, "device": "meta"})
            return self._wrap(torch.empty(out.shape, dtype=out.dtype, device="meta"), [], (out.dtype,))
        if func in JOINS and len(recorded) == len(args[0]):
            return self._joined(recorded, kwargs.get("dim", args[1] if len(args) > 1 else 0), func)
        if func is _aten.copy_.default and isinstance(args[1], RecordedTensor):
            self._write(args[0], args[1], func)
            return args[0]
        raise self._refusal(func, recorded)

    def _pieces(self, tensor: RecordedTensor) -> list[ViewPiece]:
        return pieces_of_view(tensor.node.shape, tensor.node.pieces, _view(tensor.meta_view))

    def _joined(self, parts: list[RecordedTensor], dim: int, func: Any) -> RecordedTensor:
        """Return the concatenation of tensors, or their stack along a new dimension."""
        if len({part.casts for part in parts}) > 1:
            raise self._refusal(func, parts, "joins tensors of several dtypes")
        views = [part.meta_view for part in parts]
        if func is _aten.stack.default:
            views = [view.unsqueeze(dim) for view in views]
        inner = torch.cat(views, dim)
        dim, begin, pieces = dim % inner.dim(), 0, []
        for part, view in zip(parts, views, strict=True):
            for start, name, elements in pieces_of_view(part.node.shape, part.node.pieces, _view(view)):
                pieces.append(ViewPiece((*start[:dim], start[dim] + begin, *start[dim + 1 :]), name, elements))
            begin += view.shape[dim]
        return self._wrap(inner.contiguous(), pieces, parts[0].casts)

    def _write(self, into: torch.Tensor, source: RecordedTensor, func: Any) -> None:
        """Note a copy into a tensor of the reader, or into a node."""
        # Broadcast as torch does: one source element may go to several places.
        expanded = source.meta_view.expand(into.shape)
        source = RecordedTensor(expanded, source.node, self, source.casts)
        if isinstance(into, RecordedTensor):
            if into.meta_view.is_contiguous() and into.meta_view.numel() == torch.Size(into.node.shape).numel():
                into.node.pieces[:] = self._pieces(source)
                into.casts = source.casts if source.casts[-1] == into.dtype else (*source.casts, into.dtype)
                return
            raise self._refusal(func, [source])
        target = self._target_of(into)
        if target is None:
            raise self._refusal(func, [source], "into a tensor that is none of the reader's")
        self.place(target, source, self._view_in(target, into), into.dtype)

    def place(self, target: str, source: RecordedTensor, written: View, dtype: torch.dtype) -> None:
        """Note that a recorded tensor is written into a view of a reader's tensor of this dtype."""
        self._check_casts(target, source, dtype)
        for piece in self._pieces(source):
            shape = self._published.tensors[piece.name].shape
            self._regions[piece.name] += regions_of(piece, shape, target, written)

    def place_parameters(self, loaded: Module) -> None:
        """Note the recorded tensors that a loader has put in the place of a module's parameters."""
        for name, tensor in loaded.state_dict(keep_vars=True).items():
            if name in self._targets and isinstance(tensor, RecordedTensor):
                target = self._targets[name]
                if tensor.shape != target.shape:
                    raise WeightsLayoutError(
                        f"the loader gives {name!r} the shape {tuple(tensor.shape)}, and the reader has "
                        f"{tuple(target.shape)}. Load with the reader's own config"
                    )
                self.place(name, tensor, _view(target)._replace(offset=0), target.dtype)

    def _check_casts(self, target: str, source: RecordedTensor, dtype: torch.dtype) -> None:
        """Refuse conversions of which a single one to the dtype of the target gives other values."""
        lossy = [b for a, b in zip(source.casts, source.casts[1:], strict=False) if (a, b) not in EXACT]
        floats = source.casts[0].is_floating_point and dtype.is_floating_point
        floats = floats and not str(dtype).removeprefix("torch.").startswith(SCALED)
        if (source.casts[0] != dtype and not floats) or [each for each in lossy if each != dtype]:
            chain = " -> ".join(str(each).removeprefix("torch.") for each in [*source.casts, dtype])
            raise self._failed(
                f"{listed(source.sources())} would be converted {chain} on the way to {target!r}, which a copy from "
                f"the first dtype to the last does not repeat. Publish with dtype={lossy[0] if lossy else dtype}"
            )

    def _target_of(self, tensor: torch.Tensor) -> str | None:
        return self._home.get(tensor.untyped_storage()._cdata)

    def _view_in(self, target: str, tensor: torch.Tensor) -> View:
        """Return where a view of a reader's tensor lies in it."""
        view = _view(tensor)
        return view._replace(offset=view.offset - int(self._targets[target].storage_offset()))

    def _refusal(self, func: Any, recorded: list[RecordedTensor], cause: str = "") -> WeightsLayoutError:
        names = listed(list(dict.fromkeys(name for each in recorded for name in each.sources())))
        return self._failed(
            f"the loader's operation {func} {cause or 'cannot be recorded'}, on {names or 'a new tensor'}, at "
            f"{_line()}. Recorded are {ALLOWED}. Publish the tensors as the reader has them, or declare what goes "
            "where with the rules of `weights.Mapping`"
        )

    def _failed(self, message: str) -> WeightsLayoutError:
        error = WeightsLayoutError(message)
        self.failure = self.failure or error
        return error

    def finish(self, *, subset: bool) -> Record:
        """Return the record. WeightsLayoutError unless each element of the reader's tensors is written once.

        With `subset`, tensors into which nothing is written are left alone.
        """
        if self.failure is not None:
            raise self.failure
        by_target: defaultdict[str, list[ViewPiece]] = defaultdict(list)
        for region in (region for regions in self._regions.values() for region in regions):
            by_target[region.name].append(region)
        filled: defaultdict[str, int] = defaultdict(int)
        for constant in self._constants:
            filled[constant.target] += torch.Size(constant.view.size).numel()
        untouched = [name for name in self._targets if name not in by_target and not filled[name]]
        parameters = {name for name, target in self._targets.items() if isinstance(target, torch.nn.Parameter)}
        if parameters:  # of a module, whose buffers are published or computed
            untouched = [name for name in untouched if name in parameters or name in self._published.tensors]
        if untouched and not subset:
            raise WeightsLayoutError(
                f"the loader writes nothing into {len(untouched)} tensors of the reader: {listed(untouched)}. It takes "
                f"them from names that are not published; published are {listed(list(self._published.tensors))}. Pass "
                "subset=True if they may stay as they are"
            )
        for name, regions in by_target.items():
            self._check_coverage(name, regions, filled[name])
        return Record({name: tuple(regions) for name, regions in self._regions.items()}, tuple(self._constants))

    def _check_coverage(self, name: str, regions: list[ViewPiece], filled: int) -> None:
        """Refuse a tensor of the reader of which elements are written twice or not at all."""
        target = self._targets[name]
        written, total = sum(region.box.elements for region in regions), target.numel()
        boxes = [run.box for region in regions for run in runs(tuple(target.shape), region.view)]
        # Counting finds gaps; only boxes find two sources for one element.
        twice = target.is_contiguous() and len(boxes) > 1 and have_overlap(boxes)
        if twice or written + filled != total:
            sources = [source for source, all_of in self._regions.items() if any(each.name == name for each in all_of)]
            raise WeightsLayoutError(
                f"the loader writes {written + filled} of the {total} elements of {name!r}{', some twice,' * twice} "
                f"from {listed(sources)}. Each element must be written once"
            )


def record(
    load: Callable[[LoadRecorder], Any], published: StoredLayout, targets: Mapping[str, torch.Tensor], *, subset: bool
) -> Record:
    """Run a loader on recorded tensors, and return what it does to the reader's tensors.

    `load` takes the recorder, whose `tensors` are those of the published names. It copies them into the reader's
    tensors, or returns a module that has them as its parameters, under the names of the reader.

    WeightsLayoutError for an operation that cannot be recorded: it names the tensor, the operation and the line.
    """
    recorder = LoadRecorder(published, targets)
    try:
        with torch.no_grad(), recorder:
            loaded = load(recorder)
    except Exception:
        if recorder.failure is not None:  # also where the loader's own error hides it
            raise recorder.failure from None
        raise
    if isinstance(loaded, Module):
        recorder.place_parameters(loaded)
    return recorder.finish(subset=subset)


def _view(tensor: torch.Tensor) -> View:
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _line() -> str:
    """Return file and line of the innermost frame that belongs neither to torch nor to raylane."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        if not path.startswith((OWN_FOLDER + os.sep, TORCH_FOLDER + os.sep)) and os.path.exists(path):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

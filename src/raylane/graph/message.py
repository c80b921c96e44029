"""A value as bytes and back, for one edge. Quick for small plain values; tensors go through the transport's codec.

    message = kind + body + buffers          the body is pickle (protocol 5); buffers are its out-of-band memory

Order of attempts: pickle (0.3 us for a small dict); the transport's codec when a torch tensor is met, so that views and
tied weights stay shared; cloudpickle for what only that can pickle, such as classes of a script (`__main__`), which
another process could not import. Knows nothing of channels.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import ray

from raylane import _ray
from raylane.errors import GraphValueError

VALUE, TENSORS, ERROR, NOTHING = 0, 1, 2, 3
"""Kinds: plain pickle; (skeleton, specs) of the codec; a pickled exception; None or a mere signal."""


class Message(NamedTuple):
    """What an edge carries. `buffers` are C-contiguous memory of the sender, valid while `held` is."""

    kind: int
    body: bytes | memoryview
    buffers: Sequence[Any] = ()
    held: Any = None

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


_modules = sys.modules
_message: Callable[..., Message] = tuple.__new__
"""What Message(...) does, in half the time."""
SIGNAL = Message(NOTHING, b"")


_KEPT_BYTES = 1 << 20
"""A pickle from this size on is not kept as the encoder's working memory."""


class _TensorInside(Exception):
    """Pickle has met a tensor."""


def _stop(_: Any) -> NoReturn:
    raise _TensorInside


def _refuse(_: Any) -> NoReturn:
    """A ref outside Ray's own messages is not counted: its object could vanish while the receiver holds it."""
    raise GraphValueError(
        "an ObjectRef cannot travel in a graph, because Ray would not count it: pass the value, ray.get(ref), or the "
        "result of another graph"
    )


class Encoder:
    """Turns values into messages. Keeps its pickler (a new one would cost more than a small value); one thread at a
    time."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        """A pickler that has seen nothing. Its steps are bound once: an attribute costs a tenth of a small value."""
        file = io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        pickler = pickle.Pickler(file, 5, buffer_callback=self._buffers.append)
        self._guarded = "torch" in sys.modules
        pickler.dispatch_table = {**copyreg.dispatch_table, ray.ObjectRef: _refuse}
        if self._guarded:
            import torch

            pickler.dispatch_table |= {torch.Tensor: _stop, torch.nn.Parameter: _stop}
        forget, rewind, cut, dump, content = pickler.clear_memo, file.seek, file.truncate, pickler.dump, file.getvalue

        def pickled(value: Any) -> bytes:
            forget()
            rewind(0)
            dump(value)
            cut()
            return content()

        self._pickled = pickled

    def encode(self, value: Any) -> Message:
        """GraphValueError if the value cannot be pickled, with the pickler's error as its cause."""
        if value is None:
            return SIGNAL
        if not self._guarded and "torch" in _modules:
            self._renew()
        buffers = self._buffers
        try:
            body = self._pickled(value)
            if b"__main__" not in body:
                if not buffers and len(body) < _KEPT_BYTES:
                    return _message(Message, (VALUE, body, (), None))
                raw = [buffer.raw() for buffer in buffers]
                self._renew()  # let go of the value and of a large pickle
                return Message(VALUE, body, raw, value)
            if buffers:
                self._renew()
        except _TensorInside:
            buffers.clear()
            return _with_tensors(value)
        except GraphValueError:
            self._renew()
            raise
        except Exception:  # whatever a __reduce__ raises: cloudpickle may know better, and says so if not
            self._renew()  # half a pickle has unknown state
        return _by_cloudpickle(value)


def _by_cloudpickle(value: Any) -> Message:
    if "torch" in sys.modules:
        return _with_tensors(value)  # its pickler is cloudpickle's too
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _ray.CloudPickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:
        raise _unpicklable(value, error) from error
    _check_for_refs(file.getvalue())
    return Message(VALUE, file.getvalue(), [buffer.raw() for buffer in buffers], value)


def _with_tensors(value: Any) -> Message:
    from raylane.core.segment import bytes_at
    from raylane.transport import codec

    try:
        skeleton, leaves = codec.encode(value)
        layout = codec.plan(leaves)
    except Exception as error:
        raise _unpicklable(value, error) from error
    _check_for_refs(skeleton)
    body = pickle.dumps((skeleton, msgspec.msgpack.encode(layout.specs)), 5)
    return Message(TENSORS, body, [bytes_at(block.start, block.nbytes) for block in layout.blocks], layout)


def _check_for_refs(data: bytes) -> None:
    """Cloudpickle pickles refs by a way of its own."""
    if b"_object_ref_deserializer" in data:
        _refuse(None)


def _unpicklable(value: Any, error: BaseException) -> GraphValueError:
    return GraphValueError(
        f"a value of type {type(value).__name__} cannot be pickled, so it cannot travel in a graph: "
        f"{type(error).__name__}: {error}"
    )


def decode(kind: int, body: Any, buffers: Sequence[Any], *, shared: bool = False) -> Any:
    """The value of a message whose buffers are memory that this process may keep (it is kept alive by what is made
    from it). `shared`: other processes see the same memory, so arrays come read-only and tensors are copied.

    For ERROR the exception, which is not raised. Raises what unpickling raises.
    """
    if kind == VALUE:
        return pickle.loads(body, buffers=buffers) if buffers else pickle.loads(body)
    if kind == NOTHING:
        return None
    if kind == ERROR:
        return pickle.loads(body)
    from raylane.transport import codec

    skeleton, packed = pickle.loads(body)
    specs = msgspec.msgpack.decode(packed, type=list[codec.LeafSpec])
    if shared and any(spec.kind != codec.ARRAY for spec in specs):
        buffers = [bytearray(buffer) for buffer in buffers]
    return codec.decode(skeleton, codec.build(specs, buffers))


def encode_error(error: BaseException) -> Message:
    """An exception as a message. What cannot be pickled is replaced by a GraphValueError that shows it."""
    for attempt in (error, GraphValueError(f"{type(error).__name__}: {error}")):
        file = io.BytesIO()
        try:
            _ray.CloudPickler(file, protocol=5).dump(attempt)
            pickle.loads(file.getvalue())
        except Exception:
            continue
        return Message(ERROR, file.getvalue())
    raise AssertionError("an error of ours cannot be pickled")

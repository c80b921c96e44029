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
import pickletools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import ray

from raylane import _ray
from raylane.errors import GraphValueError

VALUE, TENSORS, ERROR, NOTHING = 0, 1, 2, 3
KINDS = (VALUE, TENSORS, ERROR, NOTHING)
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

    def copied(self) -> Message:
        """The same message in memory of its own, which nobody else can change."""
        return Message(self.kind, bytes(self.body), [bytes(memoryview(buffer).cast("B")) for buffer in self.buffers])


_modules = sys.modules
_message: Callable[..., Message] = tuple.__new__
"""What Message(...) does, in half the time."""
SIGNAL = Message(NOTHING, b"")


MAX_BUFFERS = 256
"""Out-of-band buffers of one message: their sizes stand in a slot."""
_ALIGNMENT = 64
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
        pickler.dispatch_table = _table()
        rewind, dump, cut, content, forget = file.seek, pickler.dump, file.truncate, file.getvalue, pickler.clear_memo

        def pickled(value: Any) -> bytes:
            rewind(0)
            dump(value)
            cut()
            forget()  # now, not next time: the memo keeps what it has seen
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
                self._renew()  # let go of the value and of a large pickle
                if len(buffers) > MAX_BUFFERS:
                    return _with_few_buffers(value)
                return Message(VALUE, body, [buffer.raw() for buffer in buffers], value)
            self._renew()
        except _TensorInside:
            self._renew()  # half a pickle has unknown state
            return _with_tensors(value)
        except Exception as error:  # whatever a __reduce__ raises: cloudpickle may know better, and says so if not
            self._renew()
            if isinstance(error, ray.exceptions.RayError):  # of a result inside: it has failed, or is not there in time
                raise
        except BaseException:
            self._renew()
            raise
        return _by_cloudpickle(value)


def _table() -> dict[type, Callable[[Any], Any]]:
    """What is pickled in a way of its own: torch only where it is imported."""
    table: dict[type, Any] = {**copyreg.dispatch_table, ray.ObjectRef: _refuse}
    if "torch" in sys.modules:
        import torch

        table |= {torch.Tensor: _stop, torch.nn.Parameter: _stop}
    return table


def _limited(buffers: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """A buffer callback that takes out so many buffers; the others stay in the body."""

    def take(buffer: pickle.PickleBuffer) -> bool:
        if len(buffers) == MAX_BUFFERS:
            return True
        buffers.append(buffer)
        return False

    return take


def _with_few_buffers(value: Any) -> Message:
    """For a value of very many arrays, which are small or will be copied once more."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=_limited(buffers))
    pickler.dispatch_table = _table()
    pickler.dump(value)
    return Message(VALUE, file.getvalue(), [buffer.raw() for buffer in buffers], value)


def _by_cloudpickle(value: Any) -> Message:
    if "torch" in sys.modules:
        return _with_tensors(value)  # its pickler is cloudpickle's too
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _ray.CloudPickler(file, protocol=5, buffer_callback=_limited(buffers)).dump(value)
        raw = [buffer.raw() for buffer in buffers]
    except ray.exceptions.RayError:
        raise
    except Exception as error:
        raise _unpicklable(value, error) from error
    _check_for_refs(file.getvalue())
    return Message(VALUE, file.getvalue(), raw, value)


def _with_tensors(value: Any) -> Message:
    from raylane.core.segment import bytes_at
    from raylane.transport import codec

    try:
        skeleton, leaves = codec.encode_value(value)
        layout = codec.plan_layout(leaves)
    except ray.exceptions.RayError:
        raise
    except Exception as error:
        raise _unpicklable(value, error) from error
    _check_for_refs(skeleton)
    specs, held = layout.specs, layout
    buffers: list[Any] = [bytes_at(block.start, block.nbytes) for block in layout.blocks]
    if len(buffers) > MAX_BUFFERS:
        specs, buffers = _in_one(specs, buffers)
    return Message(TENSORS, pickle.dumps((skeleton, msgspec.msgpack.encode(specs)), 5), buffers, held)


def _in_one(specs: Sequence[Any], blocks: Sequence[memoryview]) -> tuple[list[Any], list[Any]]:
    """Very many blocks, copied into one; the specs say where."""
    starts, end = [], 0
    for block in blocks:
        starts.append(end)
        end += -(-block.nbytes // _ALIGNMENT) * _ALIGNMENT
    joined = bytearray(end)
    for start, block in zip(starts, blocks, strict=True):
        joined[start : start + block.nbytes] = block
    moved = [
        spec if spec.block < 0 else msgspec.structs.replace(spec, block=0, offset=spec.offset + starts[spec.block])
        for spec in specs
    ]
    return moved, [joined]


def _check_for_refs(data: bytes) -> None:
    """Cloudpickle pickles refs by a way of its own: as a call of that function. Its name alone may be a user's text."""
    module, name = _ray.REF_MAKER
    if name.encode() in data and _names_global(data, module, name):
        _refuse(None)


def _names_global(data: bytes, module: str, name: str) -> bool:
    """Return True if a pickle refers to that global. Reads the pickle's operations, which takes about 1 us
    each."""
    memo: dict[int, Any] = {}
    argument: Any
    below: Any = None
    top: Any = None  # the two values that were pushed last; None for what is no string
    for operation, argument, _ in pickletools.genops(data):
        kind = operation.name
        if kind == "STACK_GLOBAL" and (below, top) == (module, name):
            return True
        if kind in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            below, top = top, argument
        elif kind == "MEMOIZE":
            memo[len(memo)] = top
        elif kind in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = top
        elif kind in ("BINGET", "LONG_BINGET"):
            below, top = top, memo.get(argument)
        elif kind != "FRAME":
            below, top = top, None
    return False


def _unpicklable(value: Any, error: BaseException) -> GraphValueError:
    return GraphValueError(
        f"a value of type {type(value).__name__} cannot be pickled, so it cannot travel in a graph: {shown(error)}"
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
    return codec.decode_value(skeleton, codec.build_leaves(specs, buffers))


def duplicate(message: Message) -> Any:
    """The value of a message as an object of its own, as another process would receive it."""
    return decode(message.kind, message.body, [bytearray(memoryview(buffer).cast("B")) for buffer in message.buffers])


def shown(error: BaseException, of: Callable[[BaseException], str] | None = None) -> str:
    """An error as text: `Class: message`, or what `of` makes of it. The class alone where its own code fails."""
    try:
        return f"{type(error).__name__}: {error}" if of is None else of(error)
    except Exception:
        return type(error).__name__


def encode_error(error: BaseException) -> Message:
    """An exception as a message. What cannot be pickled is replaced by a GraphValueError that shows it."""
    for attempt in (error, GraphValueError(shown(error))):
        file = io.BytesIO()
        try:
            _ray.CloudPickler(file, protocol=5).dump(attempt)
            pickle.loads(file.getvalue())
        except Exception:
            continue
        return Message(ERROR, file.getvalue())
    raise AssertionError("an error of ours cannot be pickled")

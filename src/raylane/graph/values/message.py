"""Messages: values as bytes and back, for the edges of a graph. Knows nothing of channels.

    message = kind + body + buffers          the body is a pickle (protocol 5); buffers are its out-of-band memory

A value is encoded by the first of these that can do it:

1. as it is, if it is None, or bytes or an ASCII string of at least 64 KB;
2. pickle: 0.3 us for a small dict; also for small plain tensors, unless they share memory;
3. the transport's codec, if the value holds another torch tensor: views and tied weights stay shared;
4. cloudpickle, for values that only it can pickle, such as classes of a script (`__main__`), which another process
   could not import.
"""

from __future__ import annotations

import bisect
import functools
import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import ray

from raylane import _ray
from raylane.core import native
from raylane.core.memory.layout import bytes_at, segment_offsets
from raylane.errors import GraphValueError
from raylane.graph.values import references, script_classes
from raylane.graph.values.references import ReferenceInside, refused

VALUE, NOTHING, BYTES, TEXT = native.VALUE, native.NOTHING, native.BYTES, native.TEXT
TENSORS, ERROR, TICKET = 1, 2, 4
KINDS = (VALUE, TENSORS, ERROR, NOTHING, TICKET, BYTES, TEXT)
"""Kinds of messages: plain pickle; (skeleton, specs) of the codec; a pickled exception; None or a signal; the ticket of
published tensors (`channels.published`); the content of large bytes, or of a large string (UTF-8)."""


class Message(NamedTuple):
    """One message of an edge. `buffers` are C-contiguous memory of the sender, valid while `held` is referenced."""

    kind: int
    body: bytes | memoryview
    buffers: list[Any] | tuple[()] = ()
    held: Any = None

    @property
    def nbytes(self) -> int:
        """Size of body and buffers in bytes."""
        return len(self.body) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def copied(self) -> Message:
        """Return the same message in memory of its own, which no other code can change."""
        return Message(self.kind, bytes(self.body), [bytes(memoryview(buffer).cast("B")) for buffer in self.buffers])


SIGNAL = Message(NOTHING, b"")


MAX_BUFFERS = 256
"""Maximum number of out-of-band buffers of one message: their sizes must fit into a slot of a ring."""
_KEPT_BYTES = 1 << 20
"""Size of a pickle from which the encoder does not keep it as working memory."""


SMALL_TENSOR_BYTES = 1 << 17
"""Size below which a plain tensor is pickled: then it is copied once on each side, and its memory is not shared."""

MAX_ERROR_BYTES = 16 << 20
"""Size of the largest exception that travels as it is."""
MAX_SMALL_ERROR_BYTES = 1 << 15
"""Size of an exception where readers keep too much memory for a larger one."""
MAX_TEXT = 4000
"""Number of characters of an error's text that other messages repeat."""
PAYLOAD_BYTES = 1 << 16
"""Size from which the pickler writes the content of a string apart (FRAME_SIZE_TARGET of CPython's _pickle.c)."""


_SHORT_OPCODES, _LONG_OPCODES = (b"X", b"B"), (b"\x8d", b"\x8e", b"\x96")
"""Opcodes of strings, bytes and bytearrays that are followed by a length of 4 or of 8 bytes."""


class TensorInside(Exception):
    """A tensor was found during pickling."""


def _stop(_: Any) -> NoReturn:
    raise TensorInside


class Encoder(native.Encoder):
    """Encoder of values into messages. Used by one thread at a time.

    `encode` returns a value as a message, which may share memory with the value. GraphValueError if the value cannot be
    pickled, with the pickler's error as its cause. The usual values are encoded in C; the methods here do the others.
    """

    if TYPE_CHECKING:

        def encode(self, value: Any) -> Message: ...

    def __init__(self) -> None:
        super().__init__(Message, SIGNAL, sys.modules, _KEPT_BYTES)
        self.renew()

    def renew(self) -> None:
        """Start with a new pickler: after an error its state is undefined, after a large value it keeps memory.

        Also once torch or NumPy is imported: a pickler must know their types.
        """
        # The pickler is kept, because a new one would cost more than a small value.
        self._output: list[bytes] = []
        self._buffers: list[pickle.PickleBuffer] = []
        self._storages: list[tuple[int, int]] = []
        """Begin and end of the storages of the tensors that were pickled since the last call of `rest`."""
        file = types.SimpleNamespace(write=self._output.append)
        pickler = pickle.Pickler(file, 5, buffer_callback=self._buffers.append)
        pickler.dispatch_table = _table(self._storages)
        awaited = tuple(name for name in ("torch", "numpy") if name not in sys.modules)
        self.prepare(pickler.dump, pickler.clear_memo, self._output, self._buffers, awaited)

    def unusual(self, value: Any, error: BaseException) -> Message:
        """Return the message of a value for which `small` or `rest` failed. Raises what `encode` raises."""
        self.renew()  # the pickler stopped half way: its state is undefined
        try:
            if isinstance(error, TensorInside):
                return _with_tensors(value)
            if isinstance(error, ReferenceInside):
                raise refused(value, error.reference) from None
            # A GraphResult inside has failed or has timed out, or Ctrl-C: pickling must not begin again.
            if isinstance(error, GraphValueError | ray.exceptions.RayError) or not isinstance(error, Exception):
                raise error
            return _of_script(value)
        finally:
            del error  # with its traceback it would be a cycle of references

    def rest(self, value: Any) -> Message:
        """Return the message of a value for which `small` has returned None."""
        parts, buffers = self._output.copy(), self._buffers.copy()
        if len(parts) > 1 and type(value) is str:  # not in ASCII
            self._output.clear()
            return Message(TEXT, max(parts, key=len))  # one copy less than a pickle
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._storages and _overlap(self._storages, buffers):
            raise TensorInside
        if len(body) < _KEPT_BYTES:
            self._output.clear()
            self._buffers.clear()
            self._storages.clear()
        else:
            self.renew()
        # A class of a script is pickled as `__main__.Name`, which no other process can import: cloudpickle sends
        # the class itself. The text may also be the user's own; then cloudpickle is only slower.
        # Contents of large strings are skipped, they name no class: the pickler writes such a content by itself, after
        # its opcode and length.
        header = b""
        for part in parts:
            size = len(part)
            is_content = size >= PAYLOAD_BYTES and (
                (header[-9:-8] in _LONG_OPCODES and header[-8:] == size.to_bytes(8, "little"))
                or (header[-5:-4] in _SHORT_OPCODES and header[-4:] == (size & 0xFFFFFFFF).to_bytes(4, "little"))
            )
            if not is_content and script_classes.SCRIPT in part:
                return _of_script(value)
            header = part[-9:]
        if len(buffers) > MAX_BUFFERS:  # pickle again, with the arrays beyond the limit in the body
            buffers, file = [], io.BytesIO()
            pickler = pickle.Pickler(file, 5, buffer_callback=_limited(buffers))
            pickler.dispatch_table = _table([])
            pickler.dump(value)
            body = file.getvalue()
        return Message(VALUE, body, [buffer.raw() for buffer in buffers], value)


def _table(storages: list[tuple[int, int]]) -> dict[type, Callable[[Any], Any]]:
    """Return the reducers for types that need special treatment. torch is used only if it is imported."""
    table: dict[type, Any] = references.dispatch_table()
    if "torch" in sys.modules:
        import torch

        table |= {torch.Tensor: functools.partial(reduce_tensor, torch, storages), torch.nn.Parameter: _stop}
    if "numpy" in sys.modules:
        table[sys.modules["numpy"].ndarray] = array_reducer()
    return table


@functools.cache
def array_reducer() -> Callable[[Any], Any]:
    """Return `reduce_array` for the dtypes of numbers."""
    import numpy as np

    # A dictionary, because a message may have hundreds of arrays: `dtype.str` alone takes a tenth of a microsecond.
    names = {np.dtype(kind): np.dtype(kind).str for kind in "?bhilqBHILQefdFD"}
    return functools.partial(reduce_array, np.frombuffer, names)


def reduce_array(frombuffer: Any, names: Mapping[Any, str], array: Any) -> Any:
    """Return how an array is pickled: if its dtype is in `names`, in C order, in a fifth of NumPy's own time."""
    name = names.get(array.dtype)
    if name is None or not array.size or not array.flags.c_contiguous:
        return array.__reduce_ex__(5)
    if array.ndim == 1:
        return frombuffer, (pickle.PickleBuffer(array), name)
    return array_of, (pickle.PickleBuffer(array), name, array.shape)


def array_of(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return the array of a pickle, over the buffer."""
    import numpy as np

    return np.frombuffer(buffer, dtype).reshape(shape)


def reduce_tensor(torch: Any, storages: list[tuple[int, int]], tensor: Any) -> Any:
    """Return how a small plain tensor is pickled, and note its storage. TensorInside for all others.

    The bytes are those of the tensor itself, so the value must be alive until the message was written.
    """
    if (
        tensor.layout is not torch.strided
        or tensor.requires_grad
        or not tensor.is_cpu
        or tensor.is_nested
        or tensor.is_quantized
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.__dict__  # attributes of the user
        or not 0 < (nbytes := tensor.nbytes) < SMALL_TENSOR_BYTES
    ):
        raise TensorInside
    try:
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # of a tensor that wraps others; the codec has the message
        raise TensorInside from None
    if size < nbytes or not begin:  # its memory was taken away, or it wraps another tensor
        raise TensorInside
    storages.append((begin, begin + size))
    return tensor_of, (pickle.PickleBuffer(bytes_at(tensor.data_ptr(), nbytes)), tensor.dtype, tuple(tensor.shape))


def _overlap(storages: list[tuple[int, int]], buffers: Sequence[pickle.PickleBuffer]) -> bool:
    """Return True if a tensor shares memory with another tensor or with an array of the same value.

    `buffers` are those of the tensors and of the arrays.
    """
    begins, ends = zip(*sorted(storages), strict=True)
    if any(end > begin for end, begin in zip(ends, begins[1:], strict=False)):
        return True
    if len(buffers) == len(storages):
        return False
    import numpy as np

    count = 0
    for buffer in buffers:
        memory = np.frombuffer(buffer.raw(), np.uint8)
        begin = memory.__array_interface__["data"][0]
        count += bisect.bisect_left(begins, begin + memory.nbytes) - bisect.bisect_right(ends, begin)
    return count != len(storages)


def tensor_of(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return the tensor of a pickle. It uses the buffer if that may be written to."""
    import torch

    writable = bytearray(buffer) if memoryview(buffer).readonly else buffer
    return torch.frombuffer(writable, dtype=dtype).reshape(shape)


def _limited(buffers: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a buffer callback that takes MAX_BUFFERS buffers out of the pickle; the others stay in the body."""

    def take(buffer: pickle.PickleBuffer) -> bool:
        if len(buffers) == MAX_BUFFERS:
            return True
        buffers.append(buffer)
        return False

    return take


def _of_script(value: Any) -> Message:
    """Return the message of a value whose pickle names `__main__`, or which plain pickle refuses."""
    buffers: list[pickle.PickleBuffer] = []
    storages: list[tuple[int, int]] = []
    try:
        body = script_classes.dumps(value, _table(storages), _limited(buffers))
        if storages and (len(buffers) == MAX_BUFFERS or _overlap(storages, buffers)):
            raise TensorInside
        raw = [buffer.raw() for buffer in buffers]
    except TensorInside:
        return _with_tensors(value)
    except ReferenceInside as inside:
        raise refused(value, inside.reference) from None
    except Exception:  # also NotPlain: cloudpickle may succeed, and otherwise raises the same
        if "torch" in sys.modules:
            return _with_tensors(value)  # the codec uses cloudpickle too
        buffers, file = [], io.BytesIO()
        try:
            references.pickler(file, buffer_callback=_limited(buffers)).dump(value)
            raw = [buffer.raw() for buffer in buffers]
        except ray.exceptions.RayError:
            raise
        except ReferenceInside as inside:
            raise refused(value, inside.reference) from None
        except Exception as error:
            raise _unpicklable(value, error) from error
        body = file.getvalue()
    return Message(VALUE, body, raw, value)


def split(value: Any, layout_of: Callable[[list[Any]], Any] | None = None) -> tuple[bytes, Any]:
    """Return the skeleton of a value and its leaves, or what `layout_of` makes of them. Errors as of `Encoder.encode`.

    Imports torch.
    """
    from raylane.transport.value import codec

    try:
        skeleton, leaves = codec.encode_value(value, references.refuse)
        return skeleton, leaves if layout_of is None else layout_of(leaves)
    except ray.exceptions.RayError:
        raise
    except ReferenceInside as inside:
        raise refused(value, inside.reference) from None
    except Exception as error:
        raise _unpicklable(value, error) from error


def join(skeleton: bytes, leaves: list[Any]) -> Any:
    """Return the value of a skeleton and its leaves. Raises the errors of unpickling."""
    from raylane.transport.value import codec

    return codec.decode_value(skeleton, leaves)


def _with_tensors(value: Any) -> Message:
    from raylane.transport.value import codec

    skeleton, layout = split(value, codec.plan_layout)
    # The layout keeps the tensors alive until the message was written.
    specs, held = layout.specs, layout
    buffers: list[Any] = [bytes_at(block.start, block.nbytes) for block in layout.blocks]
    if len(buffers) > MAX_BUFFERS:
        # Copy all blocks into one, and let the specs point into it.
        starts, end = segment_offsets([block.nbytes for block in buffers])
        joined = bytearray(end)
        for start, block in zip(starts, buffers, strict=True):
            joined[start : start + block.nbytes] = block
        specs = [
            # A negative block number marks a leaf without bytes.
            spec if spec.block < 0 else msgspec.structs.replace(spec, block=0, offset=spec.offset + starts[spec.block])
            for spec in specs
        ]
        buffers = [joined]
    return Message(TENSORS, pickle.dumps((skeleton, msgspec.msgpack.encode(specs)), 5), buffers, held)


def _unpicklable(value: Any, error: BaseException) -> GraphValueError:
    return GraphValueError(
        f"a value of type {type(value).__name__} cannot be pickled, so it cannot travel in a graph: {error_text(error)}"
    )


def decode(kind: int, body: Any, buffers: Sequence[Any], *, shared: bool = False) -> Any:
    """Return the value of a message; for the kind ERROR the exception, which is not raised.

    The value may use the memory of `buffers` and keeps it alive. With `shared`, other processes see that memory too:
    arrays are read-only and tensors are copied. Raises the errors of unpickling.
    """
    if kind == VALUE:
        return pickle.loads(body, buffers=buffers) if buffers else pickle.loads(body)
    if kind == NOTHING:
        return None
    if kind == ERROR:
        return pickle.loads(body)
    if kind == BYTES:
        return bytes(body)
    if kind == TEXT:
        return str(body, "utf-8", "surrogatepass")  # as pickle does
    from raylane.transport.value import codec
    from raylane.transport.value.layout import ARRAY, LeafSpec

    skeleton, packed = pickle.loads(body)
    specs = msgspec.msgpack.decode(packed, type=list[LeafSpec])
    # A tensor cannot be read-only, and a write into shared memory would change the value of other readers.
    if shared and any(spec.kind != ARRAY for spec in specs):
        buffers = [bytearray(buffer) for buffer in buffers]
    return codec.decode_value(skeleton, codec.build_leaves(specs, buffers))


def duplicate(message: Message) -> Any:
    """Return the value of a message as a new object, as another process would receive it."""
    return decode(message.kind, message.body, [bytearray(memoryview(buffer).cast("B")) for buffer in message.buffers])


def error_text(error: BaseException, to_text: Callable[[BaseException], str] | None = None) -> str:
    """Return an error as `Class: message`, or as `to_text(error)`; the class alone if the error's own code raises.

    At most MAX_TEXT characters.
    """
    try:
        return _shortened(f"{type(error).__name__}: {error}" if to_text is None else to_text(error))
    except Exception:
        return type(error).__name__


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]} ... [{len(text) - MAX_TEXT} characters] ... {text[-MAX_TEXT // 2 :]}"


def encode_error(error: BaseException, limit_bytes: int | None = None) -> Message:
    """Return an exception as a message of at most `limit_bytes` (None: MAX_ERROR_BYTES).

    An exception that is larger, or cannot be pickled, is replaced by one with its text: a RayTaskError if it is one.
    The text travels with any other, too: for readers that lack its class.
    """
    limit = MAX_ERROR_BYTES if limit_bytes is None else limit_bytes
    text = _pickled(_replacement(error))
    itself = _pickled(error)
    both = None if itself is None or text is None else pickle.dumps(_EitherError(itself, text), protocol=5)
    for body in (both, itself, text):
        if body is not None and len(body) <= limit:
            return Message(ERROR, body)
    raise AssertionError("an error of raylane cannot be pickled")


class _EitherError:
    """Pickles of an exception and of its text: unpickled, the exception, or the text where its class is missing."""

    def __init__(self, itself: bytes, text: bytes) -> None:
        self._pickles = itself, text

    def __reduce__(self) -> tuple[Any, ...]:
        return either_error, self._pickles


def either_error(itself: bytes, text: bytes) -> BaseException:
    """Return the exception of the first pickle that this process can read."""
    try:
        error: BaseException = pickle.loads(itself)
    except Exception as obstacle:
        error = pickle.loads(text)
        error.add_note(f"The error itself could not be unpickled here: {error_text(obstacle)}")
    return error


def _pickled(error: BaseException) -> bytes | None:
    """Return the pickle of an exception, None if it has none that can be read."""
    file = io.BytesIO()
    try:
        _ray.CloudPickler(file, protocol=5).dump(error)
        # Try it here: an error that cannot be unpickled would raise a second error in every reader.
        pickle.loads(file.getvalue())
    except Exception:
        return None
    return file.getvalue()


def _replacement(error: BaseException) -> BaseException:
    """Return an exception with the text of another one."""
    where = _ray.raised_at(error)
    if where is None:
        return GraphValueError(error_text(error))
    cause = error_text(error.cause)  # type: ignore[attr-defined]
    text = _shortened(error.traceback_str)  # type: ignore[attr-defined]
    return _ray.task_error(where, text, GraphValueError(f"{cause} (only the text of the error could travel)"))


def small_error(message: Message) -> Message:
    """Return the message of an error in a size that fits into a slot of a ring."""
    try:
        error = pickle.loads(message.body)
    except Exception as obstacle:  # this process lacks the class of the error
        error = GraphValueError(f"an error of {len(message.body)} bytes, too large to travel: {error_text(obstacle)}")
    return encode_error(error, MAX_SMALL_ERROR_BYTES)

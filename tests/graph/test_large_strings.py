"""Large strings in messages: classes of a script are found beside them, and their content is not searched."""

from __future__ import annotations

from typing import Any

import pytest

from raylane.graph.values.message import Encoder, decode


class Scripted:
    """Class that pretends to be of a script."""


@pytest.mark.parametrize("size", [10, 40_000, 65_535, 65_536, 100_000, 1 << 21])
@pytest.mark.parametrize("kind", [str, bytes, bytearray])
def test_class_of_a_script_is_found_beside_large_strings(kind: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    monkeypatch.setattr(Scripted, "__module__", "__main__")
    monkeypatch.setattr(__main__, "Scripted", Scripted, raising=False)
    content = ("__main__" * (size // 8 + 1))[:size]
    text = content if kind is str else kind(content.encode())
    for value in (text, [text, text], {"a": text, "b": [1, text]}):
        assert _by_name(value)
    for value in ([text, Scripted], {"a": Scripted, "b": text}, [text, text, Scripted()], [Scripted, *[text] * 3]):
        assert not _by_name(value)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        bytes(range(256)) * 300,
        b"x" * 65_536,
        "x" * 65_535,
        "x" * 1_000_000,
        "\u00e9\u4e2d" * 40_000,
        "\ud800" * 30_000,
        "\0" * 70_000,
    ],
    ids=range(8),
)
def test_large_string_arrives_as_it_was(value: Any) -> None:
    for whole in (value, [value], {"a": value}):
        message = Encoder().encode(whole)
        arrived = decode(message.kind, memoryview(bytes(message.body)), message.buffers)
        assert (type(arrived), arrived) == (type(whole), whole)


def test_large_string_of_a_subclass_keeps_its_type() -> None:
    message = Encoder().encode(Tagged("x" * 100_000))
    assert type(decode(message.kind, message.body, message.buffers)) is Tagged


class Tagged(str):
    """String with a type of its own."""


def _by_name(value: Any) -> bool:
    """Return True if plain pickle has encoded a value: a process without `__main__.Scripted` decodes it."""
    message = Encoder().encode(value)
    assert decode(message.kind, message.body, message.buffers) is not None
    body = bytes(message.body)
    return b"cloudpickle" not in body and b"script_classes" not in body

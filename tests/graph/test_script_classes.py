"""Instances of classes of a script: the class travels as bytes that are made once, until it changes."""

from __future__ import annotations

import abc
import dataclasses
import enum
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raylane.graph.values import message as messages
from raylane.graph.values import script_classes
from raylane.graph.values.message import VALUE, Encoder

SCRIPT = """
import abc, dataclasses, enum, sys
import numpy as np
from raylane.graph.values.message import Encoder

class Base:
    unit = "s"
    def twice(self): return 2 * self.x
class Point(Base):
    scale = 1000
    def __init__(self, x): self.x = x
    def scaled(self): return self.scale * self.x
    @property
    def half(self): return self.x / 2
    @classmethod
    def make(cls, x): return cls(x)
@dataclasses.dataclass(slots=True)
class Row:
    name: str
    cells: list
class Color(enum.Enum):
    RED = 1
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
class Square(Shape):
    def area(self): return 4
class Listing:
    seen = []
def scale(x): return 3 * x

encoder, out = Encoder(), sys.stdout.buffer
def send(value):
    message = encoder.encode(value)
    parts = [bytes([message.kind]), bytes(message.body), *(bytes(b) for b in message.buffers)]
    out.write(repr(parts).encode() + b"\\n")
send([Point(4), Row("a", [1, 2]), Color.RED, Square(), Point])
Point.scale = 2000
send(Point(4))
send(Point(5))
Base.twice = lambda self: "changed"
send(Point(4))
Listing.seen.append(1)
send(Listing())
Listing.seen.append(2)
send(Listing())
send([Point(4), np.arange(3)])
send([Point(4), scale])
import torch
send([Point(4), torch.ones(3)])
send([Point(4), torch.ones(3, requires_grad=True)])
Point.scale = 1000
send(Point(4))
"""


@pytest.mark.processes
def test_instances_of_a_script_arrive_in_another_process(tmp_path: Path) -> None:
    import ast

    from raylane.graph.values.message import decode

    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()

    def arrive(line: bytes) -> Any:
        (kind,), body, *buffers = ast.literal_eval(line.decode())
        return decode(kind, body, [bytearray(buffer) for buffer in buffers])

    lines = done.stdout.splitlines()
    point, row, color, square, cls = arrive(lines[0])
    assert (point.scaled(), point.twice(), point.half, point.unit, cls.make(3).x) == (4000, 8, 2.0, "s", 3)
    assert type(point) is cls
    assert (row.name, row.cells, dataclasses.asdict(row)) == ("a", [1, 2], {"name": "a", "cells": [1, 2]})
    assert isinstance(color, enum.Enum)
    assert color is type(color).RED
    assert isinstance(square, abc.ABC)
    assert square.area() == 4
    changed, again = arrive(lines[1]), arrive(lines[2])
    assert (changed.scaled(), again.scaled()) == (8000, 10_000)
    assert type(changed) is type(again)
    assert arrive(lines[3]).twice() == "changed"  # a method of a base class
    assert arrive(lines[4]).seen == [1]
    assert arrive(lines[5]).seen == [1, 2]  # a list may change in place: such classes are pickled every time
    assert arrive(lines[6])[1].tolist() == [0, 1, 2]
    assert arrive(lines[7])[1](5) == 15
    assert arrive(lines[8])[1].tolist() == [1.0] * 3
    assert arrive(lines[9])[1].requires_grad
    assert arrive(lines[10]).scaled() == 4000  # as in the beginning
    assert changed.scaled() == 4000  # there is one class, as in the script


def test_a_class_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Item:
        limit = 3

        def __init__(self, values: Any) -> None:
            self.values = values

    Item.__module__, Item.__qualname__ = "__main__", "Item"
    monkeypatch.setattr(sys.modules["__main__"], "Item", Item, raising=False)
    pickled: list[object] = []
    inner = script_classes.references.pickler

    def counted(*args: Any, **options: Any) -> Any:
        pickled.append(args)
        return inner(*args, **options)

    monkeypatch.setattr(script_classes.references, "pickler", counted)
    encoder = Encoder()
    for values in (1, [2], np.ones(3), torch.ones(3)):
        assert encoder.encode(Item(values)).kind == VALUE
    assert len(pickled) == 1
    Item.limit = 1000
    Item.limit += 1  # another number, perhaps at the same address
    encoder.encode(Item(1))
    assert len(pickled) == 2


PASS_ON = """
import sys
from raylane.graph.values.message import Encoder, decode
kind, body = sys.stdin.buffer.read(1)[0], sys.stdin.buffer.read()
sys.stdout.buffer.write(Encoder().encode(decode(kind, body, [], shared=False)).body)
"""


@pytest.mark.processes
def test_a_class_that_comes_back_is_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Item:
        def __init__(self, value: int) -> None:
            self.value = value

        def total(self) -> int:
            return self.value

    Item.__module__, Item.__qualname__ = "__main__", "Item"
    monkeypatch.setattr(sys.modules["__main__"], "Item", Item, raising=False)
    encoder = Encoder()
    body = bytes(encoder.encode(Item(7)).body)
    before = dict(vars(Item))
    answer = subprocess.run(
        [sys.executable, "-c", PASS_ON], input=bytes([VALUE]) + body, capture_output=True, check=True, timeout=120
    ).stdout
    item = messages.decode(VALUE, answer, [], shared=False)
    assert type(item) is Item
    assert item.total() == 7
    # Else each message would have a class of its own, of 1 KB, which takes a millisecond to make and to load.
    assert dict(vars(Item)) == before
    assert answer == body
    assert bytes(encoder.encode(Item(7)).body) == body

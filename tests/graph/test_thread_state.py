"""Settings of one thread taken over by another: every one of them, and none when torch is not there."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from core.processes import start_code
from raylane.graph.worker import thread_state
from raylane.graph.worker.thread_state import ThreadState


def on_a_thread(function: Callable[[], Any]) -> Any:
    """What it returns on a thread of its own, whose settings are the defaults."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((function(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = box[0]
    if error is not None:
        raise error
    return value


def seen() -> dict[str, Any]:
    """What code of a method would notice."""
    x = torch.ones(2, requires_grad=True)
    return {
        "grad": (x * 2).requires_grad,
        "inference": (x * 2).is_inference(),
        "device": str(torch.empty(1).device),
        "autocast": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
        "threads": torch.get_num_threads(),
        "divide": _division(),
    }


def _division() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            np.ones(1) / np.zeros(1)
        except FloatingPointError:
            return "raise"
        except RuntimeWarning:
            return "warn"
    return "ignore"


def no_grad() -> None:
    torch.set_grad_enabled(False)


_kept: list[Any] = []


def inference() -> None:
    mode = torch.inference_mode()
    mode.__enter__()
    _kept.append(mode)  # dropping it would leave the mode


def meta() -> None:
    torch.set_default_device("meta")


def autocast() -> None:
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.bfloat16)


def half() -> None:
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)


def one_thread() -> None:
    torch.set_num_threads(1)


def three_threads() -> None:
    torch.set_num_threads(3)


def strict() -> None:
    np.seterr(divide="raise", over="ignore")


def careless() -> None:
    np.seterr(all="ignore")


def nothing() -> None:
    return


SETTINGS = [nothing, no_grad, inference, meta, autocast, half, one_thread, three_threads, strict, careless]


def after(*settings: Callable[[], None]) -> tuple[ThreadState, dict[str, Any]]:
    """The context of a thread with these settings, and what its code sees."""

    def apply() -> tuple[ThreadState, dict[str, Any]]:
        for setting in settings:
            setting()
        return thread_state.capture(), seen()

    found: tuple[ThreadState, dict[str, Any]] = on_a_thread(apply)
    return found


def adopted(*contexts: ThreadState) -> tuple[ThreadState, dict[str, Any]]:
    """What another thread reads and sees that has adopted these, one after the other."""

    def adopt() -> tuple[ThreadState, dict[str, Any]]:
        for one in contexts:
            thread_state.apply(one)
        return thread_state.capture(), seen()

    found: tuple[ThreadState, dict[str, Any]] = on_a_thread(adopt)
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.__name__)
def test_each_setting_is_taken_over(setting: Callable[[], None]) -> None:
    read, sees = after(setting)
    assert adopted(read) == (read, sees)
    if setting is not nothing:
        assert sees != after()[1] or setting is three_threads or setting is one_thread


@pytest.mark.parametrize(
    ("key", "setting", "value"),
    [
        ("grad", no_grad, False),
        ("inference", inference, True),
        ("device", meta, "meta"),
        ("autocast", autocast, torch.bfloat16),
        ("autocast", half, torch.float16),
        ("threads", three_threads, 3),
        ("threads", one_thread, 1),
        ("divide", strict, "raise"),
        ("divide", careless, "ignore"),
    ],
)
def test_code_notices(key: str, setting: Callable[[], None], value: Any) -> None:
    read, _ = after(setting)
    assert adopted(read)[1][key] == value


def test_all_of_them_together() -> None:
    for settings in ((no_grad, meta, autocast, three_threads, strict), (inference, half, one_thread, careless)):
        read, sees = after(*settings)
        assert adopted(read) == (read, sees)


def test_the_next_graph_brings_its_own() -> None:
    contexts = [after(setting) for setting in SETTINGS]
    for first, _ in contexts:
        for second, sees in contexts:
            assert adopted(first, second) == (second, sees)


def test_context_toggled_often_leaves_no_modes() -> None:
    on, _ = after(inference)
    off, _ = after()

    def toggle() -> tuple[int, bool]:
        for _ in range(50):
            thread_state.apply(on)
            thread_state.apply(off)
        return len(thread_state._entered.modes), torch.is_inference_mode_enabled()

    assert on_a_thread(toggle) == (0, False)


IMPORTING = """
import sys, threading, types
from raylane.graph.worker import thread_state
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            from importlib.machinery import ModuleSpec
            return ModuleSpec("numpy", self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        begun.set()
        go_on.wait(20)
        module.geterr, module.geterrcall = (lambda: {"divide": "warn"}), (lambda: None)
begun, go_on = threading.Event(), threading.Event()
for name in [name for name in sys.modules if name.split(".")[0] == "numpy"]:
    del sys.modules[name]
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=__import__, args=("numpy",))
thread.start()
begun.wait(20)
threading.Timer(0.1, go_on.set).start()
answer = thread_state.capture().errstate
thread.join()
"""


@pytest.mark.processes
def test_context_read_during_an_import_waits_for_it() -> None:
    assert start_code(IMPORTING).result() == {"divide": "warn"}


def test_capture_changes_no_thread() -> None:
    before = thread_state.capture()
    for setting in SETTINGS[:-3]:
        adopted(after(setting)[0])
    assert thread_state.capture() == before
    assert torch.is_grad_enabled()


def test_reactions_to_floating_point_errors_that_call_somebody() -> None:
    calls: list[str] = []

    def apply() -> ThreadState:
        np.seterr(divide="call")
        np.seterrcall(lambda kind, _: calls.append(kind))
        return thread_state.capture()

    read = on_a_thread(apply)
    on_a_thread(lambda: (thread_state.apply(read), np.ones(1) / np.zeros(1)))
    assert calls == ["divide by zero"]


WITHOUT_TORCH = """
import sys, threading
import numpy as np
from raylane.graph.worker import thread_state
from raylane.graph.worker.thread_state import ThreadState
np.seterr(divide="raise")
read = thread_state.capture()
seen = []
def adopt():
    thread_state.apply(read)
    seen.append(np.geterr()["divide"])
    thread_state.apply(ThreadState(grad=False, num_threads=3, device="meta"))  # of a process that had torch: not here
thread = threading.Thread(target=adopt)
thread.start()
thread.join()
del sys.modules["numpy"]
bare = thread_state.capture()
thread_state.apply(read)
answer = read == ThreadState(errstate=np.geterr()), seen, bare == ThreadState(), "torch" in sys.modules
"""


@pytest.mark.processes
def test_without_torch_and_without_numpy() -> None:
    assert start_code(WITHOUT_TORCH).result() == (True, ["raise"], True, False)


def test_torch_imported_after_compile_has_its_defaults() -> None:
    assert adopted(ThreadState())[1]["grad"]  # read before torch was there: nothing is known

"""What the public calls answer to mistakes, and what a decorated method looks like. Mostly without Ray."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import ray
import torch

import raylane
from raylane.errors import TransportUnavailableError


class Model:
    @raylane.method
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Scale."""
        return x * scale

    @raylane.method(num_returns=2, tensor_transport="tcp")
    async def pair(self) -> tuple[int, int]:
        return 1, 2

    @staticmethod
    @raylane.method
    def static(x: int) -> int:
        return x + 1

    @raylane.method
    @classmethod
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__} {x}"


def test_a_decorated_method_looks_like_itself() -> None:
    assert Model.forward.__name__ == "forward"
    assert Model.forward.__doc__ == "Scale."
    assert str(inspect.signature(Model.forward)).startswith("(self, x: ")
    assert inspect.iscoroutinefunction(Model.pair)
    assert not hasattr(Model.forward, "__wrapped__")
    assert Model.pair.__ray_num_returns__ == 2


def test_a_plain_instance_is_plain() -> None:
    model = Model()
    assert torch.equal(model.forward(torch.ones(2), scale=3), torch.full((2,), 3.0))
    assert Model.static(1) == 2
    assert Model.of_class(1) == "Model 1"
    assert pickle.loads(pickle.dumps(Model.forward)) is Model.forward


def test_subclasses_keep_and_override() -> None:
    class Child(Model):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, scale=scale) + 1

    assert torch.equal(Child().forward(torch.ones(1)), torch.full((1,), 2.0))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"tensor_transport": "hots"}, ValueError, "did you mean 'host'"),
        ({"tensor_transport": None, "num_return": 2}, TypeError, r"num_return\. .*num_returns"),
        ({"snapshot": "yes"}, TypeError, "snapshot must be True or False, got 'yes'"),
        ({"on_mutation": "ignore"}, ValueError, "warn, error, allow"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        raylane.method(**options)


def test_method_refuses_objects_that_cannot_be_decorated() -> None:
    with pytest.raises(TypeError, match=r"below @ray\.remote"):
        raylane.method(Model)
    with pytest.raises(TypeError, match=r"decorated with raylane\.method already\. Decorate it once"):
        raylane.method(Model.forward)
    with pytest.raises(TransportUnavailableError, match="a generator"):

        @raylane.method(tensor_transport="host")
        def stream(self: Any) -> Any:
            yield 1


def test_without_ray_it_says_so() -> None:
    if ray.is_initialized():
        pytest.skip("another test of this session has started Ray")
    with pytest.raises(TransportUnavailableError, match=r"ray\.init"):
        raylane.stats()


def test_put_and_get_name_what_is_wrong(cluster: None) -> None:
    ref = raylane.put(torch.ones(50_000))
    with pytest.raises(TypeError, match="pass the ref on"):
        raylane.put(ref)
    with pytest.raises(ValueError, match="two spellings"):
        raylane.get(ref, tensor_transport="tcp", _tensor_transport="host")
    with pytest.raises(ValueError, match="unknown"):
        raylane.get(ref, tensor_transport="pigeon")
    with pytest.raises(ValueError, match=r"timeout must be .* got -1"):
        raylane.get(ref, timeout=-1)
    with pytest.raises(TypeError, match=r"not an ray\.ObjectRef"):
        raylane.get("text")
    assert raylane.get([]) == []
    assert raylane.get([ray.put(1), ref])[0] == 1


def test_a_method_that_raises_raises_what_it_raised(cluster: None) -> None:
    class Broken:
        @raylane.method
        def fail(self) -> None:
            raise KeyError("weights")

        @raylane.method
        def unpicklable(self) -> Any:
            import threading

            return {"tensor": torch.ones(50_000), "lock": threading.Lock()}

        def entries(self) -> int:
            return raylane.stats()["entries"]

    broken = ray.remote(num_cpus=0)(Broken).remote()
    with pytest.raises(KeyError, match="weights"):
        raylane.get(broken.fail.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="lock"):
        raylane.get(broken.unpicklable.remote())
    assert ray.get(broken.entries.remote()) == 0


def test_values_of_any_kind_come_back(cluster: None) -> None:
    class Echo:
        @raylane.method
        def echo(self, value: Any) -> Any:
            return value

    echo = ray.remote(num_cpus=0)(Echo).remote()
    for value in (None, 7, "text", b"x" * 200_000, [], (), {"a": (1, [2])}, (1, 2), [None]):
        assert ray.get(echo.echo.remote(value)) == value
        assert type(ray.get(echo.echo.remote(value))) is type(value)
    nested = ray.get(echo.echo.remote({"ref": ray.put(5), "me": echo}))
    assert ray.get(nested["ref"]) == 5
    assert ray.get(nested["me"].echo.remote(6)) == 6

"""Layouts read off modules and DTensors, which torch itself divides."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from tests.forkservers import CONTEXT, Server
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import LazyLinear, Linear, Module, Parameter, ParameterDict, Sequential
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from raylane.errors import WeightsLayoutError
from raylane.transport.value.leaf_memory import lacking_memory
from raylane.weights.layout.boxes import Box, Layout, store
from raylane.weights.memory.devices import PreparedCopy, lock_pages
from raylane.weights.memory.structure import Structure
from raylane.weights.memory.tensors import NamedTensors, Part, layout_of, local, published_dtypes

SERVER = Server(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "raylane.weights"])
SIZES = ((8, 12, 8), (5, 14, 7))
MESHES = ((1, 4, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 3, 2))
"""Replicas, shards and tensor parallelism of fully sharded modules."""


def run_rank(sender: Connection, rank: int) -> None:
    """Be one rank of every case, in a process of its own: torch keeps the coordinate of the first rank."""
    layouts = {}
    for mesh in MESHES:
        if rank < math.prod(mesh):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh))
            for sizes in SIZES:
                layouts[mesh, sizes] = sharded_layout(sizes, *mesh)
            dist.destroy_process_group()
    if rank < 6:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        check_placed()
    sender.send(layouts)


def check(layout: Layout, tensors: dict[str, torch.Tensor], wholes: dict[str, torch.Tensor]) -> None:
    """Compare what a rank holds with the regions of the whole tensors that its layout names."""
    for name, tensor in tensors.items():
        inner = local(tensor)
        count = 0
        for box, at in layout[name].held:
            assert torch.equal(Box(at, box.size).of(inner), box.of(wholes[name])), name
            count += box.elements
        assert count == inner.numel(), name


def build(sizes: tuple[int, int, int]) -> Sequential:
    torch.manual_seed(3)
    return Sequential(Linear(sizes[0], sizes[1]), Linear(sizes[1], sizes[2]))


def sharded_layout(sizes: tuple[int, int, int], replicas: int, shards: int, tensor: int) -> Layout:
    """Return the layout of this rank's part of a module, after a check of its content."""
    wholes = {name: value.detach().clone() for name, value in build(sizes).state_dict().items()}
    mesh = init_device_mesh("cpu", (replicas, shards, tensor), mesh_dim_names=("replicate", "shard", "tp"))
    module = build(sizes)
    if tensor > 1:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(module, mesh["tp"], plan, src_data_rank=None)
    if tensor > 1 and shards == 1:
        NamedTensors(module).check_exchangeable()  # before FSDP2: nobody else has the memory
    fully_shard(module, mesh=mesh["replicate", "shard"] if replicas > 1 else mesh["shard"])
    with pytest.raises(WeightsLayoutError, match="a DTensor whose storage its module uses in another way too"):
        NamedTensors(module).check_exchangeable()
    tensors = NamedTensors(module).distinct()
    assert all(isinstance(value, DTensor) for value in tensors.values())
    layout = layout_of(tensors, None, None)
    check(layout, tensors, wholes)
    return layout


def check_placed() -> None:
    whole = torch.arange(7 * 5 * 3).view(7, 5, 3)
    mesh = init_device_mesh("cpu", (2, 3))
    for each in ([Shard(0), Shard(1)], [Shard(2), Replicate()], [Shard(0), Shard(0)], [Shard(-1), Shard(0)]):
        tensors = {"w": distribute_tensor(whole, mesh, each, src_data_rank=None)}
        check(layout_of(tensors, None, None), tensors, {"w": whole})
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False)
    with pytest.raises(WeightsLayoutError, match="'w' is a DTensor of partial sums"):
        layout_of({"w": partial}, None, None)


@pytest.mark.claim("weights", "shards, replicas and uneven parts of meshes of three axes are read into any others")
@pytest.mark.processes
def test_layouts_of_dtensors_are_those_of_torch() -> None:
    connections = []
    for rank in range(max(map(math.prod, MESHES))):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        SERVER.start(run_rank, sender, rank)
        sender.close()
        connections.append(receiver)
    layouts = [connection.recv() for connection in connections]
    for mesh in MESHES:
        for sizes in SIZES:
            # Refuses regions that are missing or overlap.
            stored = store([layouts[rank][mesh, sizes] for rank in range(math.prod(mesh))])
            assert set(stored.tensors) == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.claim("weights", "tied weights, buffers, wrapped modules and models that change later can be published")
def test_tied_and_transient_tensors_of_a_module() -> None:
    class Tied(Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = Linear(3, 4, bias=False), Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("counts", torch.zeros(2))
            self.register_buffer("cache", torch.zeros(2), persistent=False)

    module = Tied()
    tensors = NamedTensors(module)
    assert set(tensors.distinct()) == {"embedding.weight", "counts"}
    assert tensors.same == {"head.weight": "embedding.weight"}
    tensors.set_memory("embedding.weight", torch.ones(4, 3))
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.eq(1).all()
    with torch.device("meta"):
        empty = Tied()
    NamedTensors(empty).set_memory("embedding.weight", torch.ones(4, 3))
    assert empty.head.weight is empty.embedding.weight
    assert empty.head.weight.eq(1).all()


@pytest.mark.claim("weights", "plain parts have declared places")
def test_parts_of_plain_tensors_are_named_by_places() -> None:
    tensor = torch.zeros(3, 4)
    even = Part.even(tensor, 1, 2, 5)
    assert even == Part((3, 20), (0, 8))
    tensors = {"w": tensor, "b": torch.zeros(2)}
    layout = layout_of(tensors, {"w": even}, published_dtypes(tensors, torch.bfloat16))
    assert (layout["w"].shape, layout["w"].dtype, layout["b"].shape) == ((3, 20), "bfloat16", (2,))
    with pytest.raises(WeightsLayoutError, match=r"'w' of shape \(3, 4\) does not lie in Part"):
        layout_of({"w": tensor}, {"w": Part((3, 20), (0, 18))}, None)


@pytest.mark.claim("weights", "readers may have another floating-point dtype, and strided tensors")
def test_dtypes_are_chosen_by_name() -> None:
    names = ("model.norm.weight", "model.gate.bias", "lm_head.weight", "model.mlp.weight")
    tensors = {name: torch.zeros(2) for name in names} | {"steps": torch.zeros(1, dtype=torch.int64)}
    by_pattern = {"norm": torch.float32, r"gate\.bias$": None, r"mlp\.weight$": torch.float8_e4m3fn, "": torch.bfloat16}
    assert list(published_dtypes(tensors, by_pattern).values()) == [
        *(torch.float32, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
    ]
    assert set(published_dtypes(tensors, {"norm": torch.float16}).values()) == {
        torch.float16,
        torch.float32,
        torch.int64,
    }
    assert published_dtypes({"norm": torch.zeros(1)}, {"head": None}, whole=False) == {"norm": torch.float32}
    assert published_dtypes(tensors, None) == {name: tensor.dtype for name, tensor in tensors.items()}
    for wrong, message in (
        ({"nrom": torch.float32}, "patterns that decide on no tensor: 'nrom'"),
        ({"": torch.bfloat16, "norm": torch.float32}, "patterns that decide on no tensor: 'norm'. The first pattern"),
        ({"(": torch.float32}, r"the key '\(', which is no regular expression"),
        ({1: torch.float32}, "the key 1, which is no regular expression"),
        ({"norm": torch.int8}, "a floating-point dtype such as torch.bfloat16, got torch.int8"),
        (torch.float8_e5m2, "two bytes or more, got torch.float8_e5m2: quantise"),
    ):
        with pytest.raises(ValueError, match=message):
            published_dtypes(tensors, wrong)


def test_copies_convert_and_write_any_view() -> None:
    base = torch.arange(24.0).view(4, 6)
    whole = torch.randn(3, 3, dtype=torch.complex64)
    sources = [base, base.t(), base[1:3, ::2], torch.ones(0), whole.conj(), whole.conj().imag, base.bool(), base]
    targets = [torch.full_like(source, 9) for source in sources]
    targets[-1] = targets[-1].bfloat16()
    targets[2] = torch.zeros(2, 6)[:, ::2]
    whole = {str(i): source for i, source in enumerate(sources)}
    regions = [(name, Box((0,) * source.dim(), tuple(source.shape))) for name, source in whole.items()]
    copy = PreparedCopy(regions, whole, targets, to_slot=True)
    for _ in range(2):
        copy.run(lambda: whole)
        assert all(
            torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources, strict=True)
        )
        base.mul_(2)
    back = {name: torch.full_like(source, 9) for name, source in whole.items()}
    PreparedCopy(regions, back, targets, to_slot=False).run(lambda: back)
    assert all(torch.equal(tensor, targets[int(name)].to(tensor.dtype)) for name, tensor in back.items())
    PreparedCopy([], {}, [], to_slot=True).run(dict)


@pytest.mark.claim("weights", "tied weights, buffers, wrapped modules and models that change later can be published")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_wrapped_modules_have_plain_names() -> None:
    def build(wrap: Callable[[Module], Any]) -> Any:
        return Sequential(wrap(Linear(2, 2)), Linear(2, 2))

    plain = set(build(lambda module: module).state_dict())
    for wrap in (checkpoint_wrapper, offload_wrapper, torch.compile):
        assert set(NamedTensors(build(wrap)).distinct()) == plain
    assert set(NamedTensors(torch.compile(build(checkpoint_wrapper))).distinct()) == plain


def test_modules_that_hide_weights_are_refused() -> None:
    class Packed(Module):  # as a layer of quantize_dynamic
        def __init__(self) -> None:
            super().__init__()
            self.packed = torch.ones(2), None

        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            destination |= {f"{prefix}packed": self.packed, f"{prefix}scale": torch.tensor(1.0)}

    with pytest.raises(WeightsLayoutError, match=r"2 entries of state_dict.* '0\.packed', '0\.scale'\. Pass"):
        NamedTensors(Sequential(Packed(), Linear(2, 2)))


@pytest.mark.claim("weights", "tied weights, buffers, wrapped modules and models that change later can be published")
def test_models_that_change_are_followed_or_refused() -> None:
    model = Sequential(Linear(2, 2), Linear(2, 2))
    tensors = NamedTensors(model)
    model[1] = Linear(2, 2)
    model[0].weight = Parameter(torch.ones(2, 2))
    tensors.refresh()
    assert tensors.distinct()["1.weight"] is model[1].weight
    assert tensors.distinct()["0.weight"] is model[0].weight
    model[1].weight = model[0].weight
    with pytest.raises(WeightsLayoutError, match=r"other ties .*'1.weight' is tied to '0.weight'\. .*ew publisher"):
        tensors.refresh()
    tied = NamedTensors(model)
    model[1].weight = Parameter(torch.ones(2, 2))
    with pytest.raises(WeightsLayoutError, match=r"'1\.weight' is no longer tied to '0.weight'"):
        tied.refresh()
    model.append(Linear(1, 1))
    del model[0].bias
    with pytest.raises(WeightsLayoutError, match=r"added '2.bias', '2.weight'; removed '0.bias'\. Make a new"):
        tensors.refresh()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_structure_is_another_after_each_change() -> None:
    def swap_keys(model: Any) -> None:
        model[0]._parameters["other"] = model[0]._parameters.pop("bias")

    def drop_buffer(model: Any) -> None:
        del model.scale
        model.register_buffer("scale", torch.ones(1), persistent=False)

    changes: list[Callable[[Any], object]] = [
        lambda model: model.__setitem__(1, Linear(2, 2)),
        lambda model: setattr(model[0], "weight", Parameter(torch.ones(2, 2))),
        lambda model: setattr(model[1], "weight", model[0].weight),
        lambda model: model.append(Linear(1, 1)),
        lambda model: setattr(model[0], "bias", None),
        lambda model: setattr(model[0], "_parameters", dict(model[0]._parameters)),
        swap_keys,
        drop_buffer,
    ]
    for change in changes:
        model = Sequential(Linear(2, 2), Linear(2, 2))
        model.register_buffer("scale", torch.ones(1))
        before = Structure(model)
        assert before == Structure(model)
        change(model)
        assert before != Structure(model)
    tensors = {"a": torch.ones(1)}
    before = Structure(tensors)
    tensors["a"].add_(1)
    assert before == Structure(tensors)
    tensors["b"] = tensors["a"]
    assert before != Structure(tensors)
    compiled = torch.jit.script(Linear(2, 2))
    assert Structure(compiled) != Structure(compiled), "its collections are made at each access"


def test_dtypes_may_change_between_plain_floats_only() -> None:
    target = {"w": torch.ones(4)}
    tensors = NamedTensors(target)
    target["w"] = torch.ones(4, dtype=torch.bfloat16)
    tensors.check(meta=True)
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn):
        target["w"] = torch.ones(4).to(dtype)
        with pytest.raises(WeightsLayoutError, match=f"'w' has the dtype {dtype} now, and had torch.float32"):
            tensors.check(meta=True)


def test_merged_adapters_are_refused() -> None:
    model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"]), Sequential(Linear(4, 4)))
    tensors = NamedTensors(model)
    tensors.check_unmerged()
    model[0].merge()
    with pytest.raises(WeightsLayoutError, match=r"'0' has merged its adapters .* unmerge_adapter\(\)"):
        tensors.check_unmerged()


def _functional() -> torch.Tensor:
    functional: torch.Tensor = torch._to_functional_tensor(torch.ones(4))
    return functional


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 4)


OPAQUE = {
    "wrapper": lambda: TwoTensor(torch.ones(4), torch.ones(4)),
    "fake": _fake,
    "functional": _functional,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "lazy": lambda: LazyLinear(3).weight,
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.claim("weights", "tensors without plain memory, and memory that others see, are refused by name")
@pytest.mark.parametrize("kind", list(OPAQUE))
def test_tensors_without_plain_memory_are_refused(kind: str) -> None:
    tensor = OPAQUE[kind]()
    assert lacking_memory(tensor)
    with pytest.raises(WeightsLayoutError, match="'w' cannot be published or read: it"):
        NamedTensors({"w": tensor})
    target = {"w": torch.ones(4)}
    tensors = NamedTensors(target)
    target["w"] = tensor
    with pytest.raises(WeightsLayoutError, match="'w' cannot be published or read now: it"):
        tensors.check(meta=False)


def test_memory_that_is_gone_is_refused_when_it_is_used() -> None:
    freed, meta = torch.ones(4), torch.ones(4, device="meta")
    tensors = NamedTensors({"w": freed})
    before = tensors.memory()
    freed.untyped_storage().resize_(0)
    assert tensors.memory() != before
    with pytest.raises(WeightsLayoutError, match="'w' cannot be published or read now: its storage holds 0 bytes"):
        tensors.check(meta=True)
    NamedTensors({"w": meta}).check(meta=True)
    expanded = NamedTensors({"w": torch.zeros(1, 4).expand(4, 4)})
    expanded.check(meta=False)
    with pytest.raises(WeightsLayoutError, match="its elements share memory"):
        expanded.check(meta=True)
    conjugated = NamedTensors({"w": torch.ones(2, dtype=torch.complex64).conj()})
    conjugated.check(meta=False)
    with pytest.raises(WeightsLayoutError, match=r"it is conjugated or negated .* resolve_conj\(\)"):
        conjugated.check(meta=True)
    with pytest.raises(WeightsLayoutError, match="on the device meta"):
        NamedTensors({"w": meta}).check(meta=False)


@pytest.mark.claim("weights", "tensors without plain memory, and memory that others see, are refused by name")
def test_memory_that_others_see_is_not_exchanged() -> None:
    module, flat = Linear(2, 2), torch.zeros(8)
    NamedTensors(module).check_exchangeable()
    NamedTensors(dict(module.named_parameters())).check_exchangeable()
    NamedTensors({"w": torch.zeros(4, 4).t()[::2]}).check_exchangeable()  # nobody else has the memory
    with pytest.raises(WeightsLayoutError, match="'w' cannot be exchanged: other tensors"):
        NamedTensors({"w": flat[2:]}).check_exchangeable()
    with pytest.raises(WeightsLayoutError, match=r"'weight' cannot be exchanged: other tensors .* state_dict\(\)"):
        NamedTensors(module.state_dict()).check_exchangeable()
    with pytest.raises(WeightsLayoutError, match="'b' cannot be exchanged: 'a' lies in the same storage"):
        NamedTensors(ParameterDict({"a": flat[:6], "b": flat[2:]})).check_exchangeable()


def test_pages_are_locked_again_after_a_slot_was_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Driver:  # a stand-in for the calls of CUDA's driver
        def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:
            calls.append(("lock", nbytes))
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unlock", address))

    class Owner:
        pass

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    memory, owner = torch.zeros(8, dtype=torch.uint8), Owner()
    lock_again = lock_pages(memory, owner)
    lock_again()
    del owner, lock_again
    gc.collect()
    assert calls == [("lock", 8), ("unlock", memory.data_ptr()), ("lock", 8), ("unlock", memory.data_ptr())]

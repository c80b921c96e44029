"""Verification of readers on a real Ray: wrong bits in a slot or in what was loaded are found and named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.weights.small_models import SMALL
from torch.nn import Linear, Module, ParameterDict
from transformers import AutoConfig, AutoModelForCausalLM

from raylane import weights
from raylane.errors import (
    WeightsError,
    WeightsInvalidError,
    WeightsLostError,
    WeightsMismatchError,
    WeightsTimeoutError,
)
from raylane.weights.memory.tensors import NamedTensors
from raylane.weights.state.contents import ReaderState

pytestmark = pytest.mark.usefixtures("ray_session", "weights_service")


@pytest.fixture(autouse=True)
def dropped() -> Iterator[None]:
    yield
    weights.drop("policy")


def new_tensors(seed: float = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(int(seed))
    return {
        "q": torch.randn(8, 16),
        "k": torch.randn(8, 16),
        "experts": torch.randn(4, 6, 16),
        "norm": torch.randn(16),
        "steps": torch.arange(5),
    }


def blank(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(each.shape, dtype=dtype if each.is_floating_point() else each.dtype)
        for name, each in new_tensors().items()
    }


def ranks_of(tensors: dict[str, torch.Tensor], world: int = 2, **options: Any) -> list[weights.Publisher]:
    """Return publishers of ranks that have equal parts of the rows of `q`, `k` and `experts`."""

    def part(name: str, rank: int) -> torch.Tensor:
        return tensors[name].chunk(world)[rank] if name in ("q", "k", "experts") else tensors[name]

    def place_of(rank: int) -> Callable[[str, torch.Tensor], weights.Part | None]:
        return lambda name, own: weights.Part.even(own, 0, rank, world) if name in ("q", "k", "experts") else None

    return [
        weights.Publisher(
            "policy",
            {name: part(name, rank) for name in tensors},
            rank=rank,
            world=world,
            places=place_of(rank),
            **{"digests": True, **options},
        )
        for rank in range(world)
    ]


def publish(publishers: list[weights.Publisher], step: int) -> int:
    (number,) = {publisher.publish(step, timeout=20) for publisher in publishers}
    return number


def in_slot(publisher: weights.Publisher, version: int, name: str) -> torch.Tensor:
    """Return the bytes of a tensor in the shared memory of a version, which all processes see."""
    assert publisher._stored is not None
    (room,) = publisher._stored.tensors[name].boxes
    (slot,) = (each.slot for each in publisher._slots.values() if set(each.slot.numbers()) == {version})
    nbytes = room.box.elements * publisher._stored.tensors[name].itemsize
    return slot.memory()[room.offset : room.offset + nbytes]


def flip(tensor: torch.Tensor, at: int = 3) -> None:
    """Change the lowest bit of one element."""
    tensor.detach().view(-1).view(torch.uint8)[at * tensor.itemsize] ^= 1


def check_mismatch(
    verify: Callable[[], object], reader: Any, loaded: Collection[str] = (), slots: Collection[str] = ()
) -> None:
    """Check that a verification names these tensors, and that the reader is refused afterwards."""
    with pytest.raises(WeightsMismatchError) as caught:
        verify()
    error = caught.value
    assert (set(error.fields["loaded"]), set(error.fields["slots"])) == (set(loaded), set(slots)), error
    assert all(f"'{name}'" in str(error) for name in [*loaded, *slots])
    with pytest.raises(WeightsInvalidError, match=r"verification of a version of 'policy' has failed"):
        reader.check()


def of_dict(apply: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], Any]:
    tensors = blank(dtype)
    return tensors, weights.Subscriber("policy", tensors, apply=apply)


def of_mapping(apply: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], Any]:
    """Return a reader whose `qk` has `q` and `k`, and whose `experts` are transposed."""
    source = blank(dtype)
    own = {"qk": torch.zeros(16, 16, dtype=dtype), "experts": torch.zeros(4, 16, 6, dtype=dtype)}
    own |= {"norm": source["norm"], "steps": source["steps"]}
    rules = weights.Mapping().fuse(["q", "k"], "qk").transpose("experts", dim0=1, dim1=2)
    subscriber = weights.Subscriber("policy", own, apply=apply, mapping=rules)
    views = {
        "q": own["qk"][:8],
        "k": own["qk"][8:],
        "experts": own["experts"],
        **{n: own[n] for n in ("norm", "steps")},
    }
    return (own if apply == "swap" else views), subscriber


def of_module(_: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    module = ParameterDict({name: torch.nn.Parameter(each, requires_grad=False) for name, each in blank(dtype).items()})
    return module, weights.attach(module, "policy")


def loaded(tensors: Any, name: str) -> torch.Tensor:
    """Return the memory of a published tensor in a reader, which may have exchanged it."""
    if name in ("q", "k") and "qk" in tensors:
        return tensors["qk"][:8] if name == "q" else tensors["qk"][8:]
    return tensors[name].detach()


KINDS = [
    (kind, apply, dtype)
    for kind, apply in (
        (of_dict, "copy"),
        (of_dict, "swap"),
        (of_mapping, "copy"),
        (of_mapping, "swap"),
        (of_module, ""),
    )
    for dtype in (torch.float32, torch.bfloat16)
] + [(of_dict, "map", torch.float32)]


@pytest.mark.claim("weights", "bits that differ from those published are found, and their tensors named")
@pytest.mark.parametrize(("kind", "apply", "dtype"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_wrong_bits_are_found_in_every_reader(kind: Any, apply: str, dtype: torch.dtype) -> None:
    source = new_tensors()
    publishers = ranks_of(source, keep=3)
    version = publish(publishers, 1)
    tensors, reader = kind(apply, dtype)
    reader.update()
    assert reader.verify() == version
    reader.check()

    def load_again() -> None:
        assert reader.update().changed
        assert reader.verify() == version
        reader.check()

    for name in source:  # a flipped bit in each loaded tensor
        flip(loaded(tensors, name))
        check_mismatch(reader.verify, reader, [name])
        load_again()
    experts = loaded(tensors, "experts")
    experts.copy_(experts[[1, 0, 2, 3]].clone())  # the right experts in the wrong places
    check_mismatch(reader.verify, reader, ["experts"])
    load_again()
    half = loaded(tensors, "q")
    half.copy_(loaded(tensors, "k").clone())  # the wrong half of a fused tensor
    check_mismatch(reader.verify, reader, ["q"])
    load_again()
    k = loaded(tensors, "k")
    k[4:].zero_()  # the part of rank 1 did not arrive
    check_mismatch(reader.verify, reader, ["k"])
    load_again()
    flip(in_slot(publishers[0], version, "norm"))  # in shared memory, after it was loaded
    if apply == "map" or dtype != torch.float32:
        check_mismatch(reader.verify, reader, slots=["norm"])
    else:
        assert reader.verify() == version  # what was loaded is right
    flip(in_slot(publishers[0], version, "norm"))
    assert reader.verify() == version
    reader.check()
    in_slot(publishers[0], version, "q")[:64].copy_(torch.ones(64, dtype=torch.uint8))  # before it is loaded
    getattr(reader, "_subscriber", reader).invalidate()
    reader.update()
    check_mismatch(reader.verify, reader, slots=["q"])
    reader.close()


@pytest.mark.parametrize("option", ["each", "first", 2])
@pytest.mark.parametrize(("kind", "apply"), [(of_dict, "copy"), (of_dict, "swap"), (of_dict, "map"), (of_module, "")])
def test_updates_verify_by_themselves(monkeypatch: pytest.MonkeyPatch, option: Any, kind: Any, apply: str) -> None:
    original = weights.Subscriber.__init__
    monkeypatch.setattr(
        weights.Subscriber, "__init__", lambda self, *args, **more: original(self, *args, **{**more, "verify": option})
    )
    source = new_tensors()
    (publisher,) = ranks_of(source, world=1, keep=4)
    tensors, reader = kind(apply)
    bad = {"each": {1, 2, 3, 4}, "first": {1}, 2: {2, 4}}[option]
    for turn in (1, 2, 3, 4):
        version = publish([publisher], turn)
        flip(in_slot(publisher, version, "k"))  # as an error on the way would
        if turn in bad:
            check_mismatch(reader.update, reader, slots=["k"])
            check_mismatch(reader.update, reader, slots=["k"])  # the same version is not taken for loaded
            flip(in_slot(publisher, version, "k"))
        assert reader.update(timeout=20).version == version
        reader.check()
        if turn in bad:
            assert torch.equal(loaded(tensors, "k"), source["k"])
        else:
            assert not torch.equal(loaded(tensors, "k"), source["k"])
    reader.close()


def test_failed_verification_of_swap_leaves_the_version_before() -> None:
    source = new_tensors()
    (publisher,) = ranks_of(source, world=1, keep=3)
    tensors = blank()
    subscriber = weights.Subscriber("policy", tensors, apply="swap", verify="each")
    publish([publisher], 1)
    subscriber.update()
    source["q"].add_(1)
    flip(in_slot(publisher, publish([publisher], 2), "q"))
    with pytest.raises(WeightsMismatchError, match=r"version 2 of 'policy' .* in shared memory 1 of 5 tensors: 'q'"):
        subscriber.prefetch()
    assert torch.equal(tensors["q"] + 1, source["q"])
    assert (subscriber.version, subscriber.state) == (1, ReaderState.MISMATCH)
    assert subscriber.verify() == 1  # still whole
    assert subscriber.state is ReaderState.VALID
    # Nothing is held by the update that has failed.
    for step in (3, 4, 5, 6):
        assert publish([publisher], step) == step
    assert subscriber.update().version == 6
    subscriber.close()


def test_readers_of_parts_compare_with_the_slots() -> None:
    source = new_tensors()
    publishers = ranks_of(source, keep=2)
    version = publish(publishers, 1)
    readers = []
    for rank in range(2):  # tensor parallelism: columns of `q`, rows of `experts`
        own = {"q": torch.zeros(8, 8), "experts": torch.zeros(2, 6, 16, dtype=torch.bfloat16)}
        places = {
            "q": weights.Part.even(own["q"], 1, rank, 2),
            "experts": weights.Part.even(own["experts"], 0, rank, 2),
        }
        readers.append((own, weights.Subscriber("policy", own, subset=True, places=places, verify="first")))
    for own, subscriber in readers:
        subscriber.update()
        assert subscriber.verify() == version
        for name in own:
            flip(own[name], at=11)
            check_mismatch(subscriber.verify, subscriber, [name])
            subscriber.update()
    # A bit of the other rank's part differs in the slot: no loaded tensor shows it, but the digest does.
    flip(in_slot(publishers[0], version, "experts"), at=0)
    check_mismatch(readers[1][1].verify, readers[1][1], slots=["experts"])
    for step in (2, 3):
        publish(publishers, step)
    with pytest.raises(WeightsLostError, match=r"version 1 of 'policy' cannot be verified any more: newer versions"):
        readers[0][1].verify()
    readers[0][1].check()
    for own, subscriber in readers:
        assert subscriber.update().version == subscriber.verify() == 3
        assert torch.equal(own["experts"], source["experts"].bfloat16().chunk(2)[0 if own is readers[0][0] else 1])
        subscriber.close()


def test_whole_tensors_are_verified_after_their_version() -> None:
    source = new_tensors()
    (publisher,) = ranks_of(source, world=1, keep=2)
    publish([publisher], 1)
    tensors, subscriber = of_dict("copy")
    subscriber.update()
    for step in (2, 3):
        source["q"].add_(1)
        publish([publisher], step)
    assert subscriber.verify() == 1
    flip(tensors["q"])
    with pytest.raises(WeightsMismatchError, match=r"'q' \(perhaps in the shared memory too"):
        subscriber.verify()
    weights.drop("policy")
    flip(tensors["q"])
    assert subscriber.verify() == 1  # the digests came with the version
    subscriber.close()


def test_a_rank_that_wrote_old_values_is_found() -> None:
    source = new_tensors()
    publishers = ranks_of(source, keep=2)
    publish(publishers, 1)
    old = in_slot(publishers[1], 1, "q").clone()
    source["q"].add_(1)
    version = publish(publishers, 2)
    slot = in_slot(publishers[1], version, "q")
    slot[len(slot) // 2 :].copy_(old[len(slot) // 2 :])  # as if rank 1 had not written
    subscriber = weights.Subscriber("policy", blank())
    subscriber.update()
    check_mismatch(subscriber.verify, subscriber, slots=["q"])
    subscriber.close()


@pytest.mark.parametrize("beside", [False, True], ids=["publish", "publish_async"])
def test_converted_tensors_count_in_their_published_dtype(beside: bool) -> None:
    source = new_tensors()
    (publisher,) = ranks_of(source, world=1, dtype=torch.bfloat16)
    version = publisher.publish_async(1).result(20) if beside else publisher.publish(1)
    for dtype in (torch.bfloat16, torch.float32):
        tensors, subscriber = of_dict("copy", dtype)
        subscriber.update()
        assert subscriber.verify() == version
        flip(tensors["norm"])
        check_mismatch(subscriber.verify, subscriber, ["norm"])
        subscriber.close()


class Tied(Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Linear(6, 4, bias=False), Linear(6, 4, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_are_verified_in_every_place() -> None:
    weights.Publisher("policy", Tied(), digests=True).publish(1)
    untied = {"embed.weight": torch.zeros(4, 6), "head.weight": torch.zeros(4, 6)}
    readers = [(untied, weights.Subscriber("policy", untied)), (Tied(), None)]
    readers[1] = (readers[1][0], weights.Subscriber("policy", readers[1][0], apply="swap"))
    for _, subscriber in readers:
        subscriber.update()
        assert subscriber.verify() == 1
    flip(untied["head.weight"])
    with pytest.raises(WeightsMismatchError, match=r"1 of 1 tensors: 'embed.weight' \(in 'head.weight'\)"):
        readers[0][1].verify()
    flip(readers[1][0].head.weight)
    check_mismatch(readers[1][1].verify, readers[1][1], ["embed.weight"])


def test_padding_of_a_loader_is_verified() -> None:
    weights.Publisher("policy", {"embed": torch.randn(3, 4)}, digests=True).publish(1)
    own = {"embed": torch.ones(5, 4)}

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            own[name][:3].copy_(tensor)
            own[name][3:].fill_(0)

    subscriber = weights.Subscriber("policy", own, mapping=weights.Mapping.record(load))
    subscriber.update()
    assert subscriber.verify() == 1
    own["embed"][4, 2] = 1e-9
    with pytest.raises(WeightsMismatchError, match=r"padding of 'embed'\. Update again"):
        subscriber.verify()
    assert subscriber.update().changed
    assert subscriber.verify() == 1


def test_versions_without_digests_are_refused_before_a_write() -> None:
    (publisher,) = ranks_of(new_tensors(), world=1, digests=False)
    tensors, subscriber = blank(), None
    subscriber = weights.Subscriber("policy", tensors, verify="each")
    with pytest.raises(WeightsInvalidError, match="hold no version of 'policy' yet"):
        subscriber.verify()
    with pytest.raises(WeightsTimeoutError):
        subscriber.update(timeout=0.1)
    publish([publisher], 1)
    message = r"version 1 of 'policy' cannot be verified: it was published without digests. Pass digests=True"
    with pytest.raises(WeightsError, match=message):
        subscriber.update()
    assert not tensors["q"].any()
    plain = weights.Subscriber("policy", tensors)
    plain.update()
    with pytest.raises(WeightsError, match=message):
        plain.verify()
    plain.check()
    plain.invalidate()
    with pytest.raises(WeightsInvalidError, match="no whole version"):
        plain.verify()
    for wrong in ("always", 0, True):
        with pytest.raises(ValueError, match="verify must be"):
            weights.Subscriber("policy", tensors, verify=wrong)
        with pytest.raises(ValueError, match="verify must be"):
            weights.attach(Linear(1, 1), "policy", verify=wrong)
    subscriber.close()
    plain.close()
    with pytest.raises(WeightsError, match="was closed"):
        plain.verify()


def test_ranks_that_do_not_agree_on_digests_are_two_trainers() -> None:
    tensors = {"w": torch.zeros(4)}
    first = weights.Publisher("policy", tensors, rank=0, world=2, digests=True)
    weights.Publisher("policy", tensors, rank=1, world=2)
    with pytest.raises(WeightsError, match="replaced by"):
        first.publish(1, timeout=5)


class Packing(NamedTensors):
    """Tensors that are packed when they were loaded, as vLLM packs them."""

    keep_values = False

    def __init__(self) -> None:
        super().__init__({name: each.to("meta") for name, each in blank().items()})
        self.packed: dict[str, torch.Tensor] = {}

    def new(self, names: Collection[str], take: Any) -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(self.distinct()[name], device="cpu") for name in names}

    def prepare(self, memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: each.flip(0) for name, each in memory.items()}

    def exchange(self, prepared: dict[str, torch.Tensor]) -> None:
        self.packed = prepared


def test_engines_that_pack_are_verified_before_they_pack() -> None:
    source, tensors = new_tensors(), Packing()
    (publisher,) = ranks_of(source, world=1)
    subscriber = weights.Subscriber("policy", tensors, apply="swap", mapping=weights.Mapping(), verify="each")
    version = publish([publisher], 1)
    flip(in_slot(publisher, version, "experts"))
    check_mismatch(subscriber.prefetch, subscriber, slots=["experts"])
    assert not tensors.packed
    flip(in_slot(publisher, version, "experts"))
    assert subscriber.prefetch() == subscriber.update().version == version
    assert torch.equal(tensors.packed["q"], source["q"].flip(0))
    with pytest.raises(WeightsError, match=r"the engine has packed what was loaded\. Pass verify='each'"):
        subscriber.verify()
    subscriber.close()


@pytest.mark.claim("weights", "bits that differ from those published are found, and their tensors named")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hugging_face_models_are_verified_by_their_loader(dtype: torch.dtype, tmp_path: Path) -> None:
    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SMALL)).eval()

    # A folder has the experts one by one, and the model has them stacked, each with two fused halves.
    model(1).save_pretrained(tmp_path)
    folder = load_file(tmp_path / "model.safetensors")
    publisher = weights.Publisher("policy", folder, digests=True)
    version = publisher.publish(1)
    reader = model(2).to(dtype)
    attachment = weights.attach(reader, "policy", verify="each")
    attachment.update()
    assert attachment.verify() == version
    state = reader.state_dict()
    fused = "model.layers.0.mlp.experts.gate_up_proj"

    def changed(change: Callable[[torch.Tensor], None], *names: str) -> None:
        with torch.no_grad():
            change(reader.get_parameter(fused))
        with pytest.raises(WeightsMismatchError) as caught:
            attachment.verify()
        assert set(caught.value.fields["loaded"]) == set(names)
        assert f"(in '{fused}')" in str(caught.value)
        with pytest.raises(WeightsInvalidError, match="verification of a version"):
            reader(torch.tensor([[1, 2]]))
        assert attachment.update().changed
        assert attachment.verify() == version
        attachment.check()

    gates = [f"model.layers.0.block_sparse_moe.experts.0.{part}.weight" for part in ("w1", "w3")]
    seconds = [name.replace("experts.0", "experts.1") for name in gates]
    changed(lambda each: flip(each), gates[0])
    changed(lambda each: each[:2].copy_(each[[1, 0]].clone()), *gates, *seconds)  # swapped experts
    half = state[fused].shape[1] // 2
    changed(lambda each: each[0].copy_(each[0].roll(half, 0).clone()), *gates)  # swapped halves
    changed(lambda each: each[1, half:].zero_(), seconds[1])
    attachment.close()

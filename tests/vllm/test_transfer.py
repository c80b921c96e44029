"""raylane as a backend of vLLM's own interface for weight updates, compared with fresh engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: run `make test-vllm`")

from tests.vllm import engines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]


class Pairs:
    """A `WeightSource` of vLLM that is no `ModuleSource`: rank 0 publishes what it yields."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def metadata(self) -> list[Any]:
        return []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.named_parameters():
            yield name, tensor.detach().clone()


@ray.remote(runtime_env=engines.INSIDE)
class TransferTrainer:
    """A rank of a trainer that sends a model which changes at random, through vLLM's interface."""

    def __init__(self, folder: str) -> None:
        self.folder, self.model = Path(folder), engines.new_model()

    def export(self, version: int) -> str:
        folder = self.folder / f"version-{version}"
        self.model.save_pretrained(folder)
        return str(folder)

    def connect(self, handles: list[Any], sharded: bool) -> None:
        """Register, and let the engines register."""
        from vllm.distributed.weight_transfer import (
            ModuleSource,
            RayVLLMWeightSyncClient,
            WeightTransferTrainerFactory,
        )

        from raylane.weights.engines import vllm_plugin
        from raylane.weights.engines.vllm_transfer import RaylaneTrainerInitInfo

        vllm_plugin.register()
        self.sender = WeightTransferTrainerFactory.trainer_init(
            RaylaneTrainerInitInfo(rank=0, timeout=60),
            client=RayVLLMWeightSyncClient(handles),
            source=ModuleSource(self.model) if sharded else Pairs(self.model),
        )

    def send(self, version: int) -> str:
        """Change the weights and send them; return their folder."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        self.sender.send_weights()
        return self.export(version)

    def close(self) -> None:
        self.sender.shutdown()


@ray.remote
class ServedEngine:
    """An `LLM` with the methods that vLLM's Ray client calls."""

    def __init__(self, folder: str, **options: Any) -> None:
        from vllm.config import WeightTransferConfig

        from vllm import LLM

        config = WeightTransferConfig(backend="raylane")
        self.engine = LLM(model=folder, weight_transfer_config=config, **engines.OPTIONS | options)

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.engine.init_weight_transfer_engine(dataclasses.asdict(request))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.engine.update_weights(dataclasses.asdict(request))

    def finish_weight_update(self) -> None:
        self.engine.finish_weight_update()

    def update_weight_version(self, version: str) -> None:
        self.engine.llm_engine.set_weight_version(version)
        self.engine.reset_prefix_cache()

    def shutdown_weight_transfer_engine(self) -> None:
        self.engine.collective_rpc("shutdown_weight_transfer_engine")

    def answers(self) -> list[list[int]]:
        return engines.answers_of(self.engine)

    def version(self) -> str:
        version: str = self.engine.llm_engine.get_weight_version()
        return version


@pytest.mark.claim("weights", "vLLM's own interface for weights has the backend `raylane`")
@pytest.mark.parametrize(
    ("sharded", "environment", "options"),
    [(True, engines.INSIDE, {}), (False, engines.INSIDE, {}), (True, engines.OUTSIDE, {"tensor_parallel_size": 2})],
    ids=["module", "pairs", "two workers"],
)
def test_backend_raylane_answers_like_a_fresh_engine(
    started: list[Any], tmp_path: Path, sharded: bool, environment: dict[str, Any], options: dict[str, Any]
) -> None:
    trainer, fresh = TransferTrainer.remote(str(tmp_path)), engines.FreshEngines.remote()
    started += [trainer, fresh]
    engine = ServedEngine.options(runtime_env=environment).remote(ray.get(trainer.export.remote(0)), **options)
    started.append(engine)
    before = ray.get(engine.answers.remote())
    ray.get(trainer.connect.remote([engine], sharded))
    for version in (1, 2):
        folder = ray.get(trainer.send.remote(version))
        after = ray.get(engine.answers.remote())
        assert after == ray.get(fresh.answers.remote(folder))
        assert after != before
        assert ray.get(engine.version.remote()) == str(version)
        before = after
    ray.get(engine.shutdown_weight_transfer_engine.remote())
    ray.get(trainer.close.remote())
    assert ray.get(engine.answers.remote()) == before


def test_backend_raylane_serves_two_engines(started: list[Any], tmp_path: Path) -> None:
    trainer, fresh = TransferTrainer.remote(str(tmp_path)), engines.FreshEngines.remote()
    folder = ray.get(trainer.export.remote(0))
    served = [ServedEngine.options(runtime_env=engines.INSIDE).remote(folder) for _ in range(2)]
    started += [trainer, fresh, *served]
    ray.get(trainer.connect.remote(served, True))
    exported = ray.get(trainer.send.remote(1))
    expected = ray.get(fresh.answers.remote(exported))
    assert ray.get([engine.answers.remote() for engine in served]) == [expected, expected]

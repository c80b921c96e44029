"""The contract suite with CUDA tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from raylane.testing.contract import BackendContract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("ray_session", "cluster"),
]


class OnDevice(BackendContract):
    device = "cuda"
    # NCCL refuses two processes on one GPU, unless it takes them for processes of two hosts.
    actor_options: ClassVar[dict[str, Any]] = {
        "num_cpus": 0,
        "num_gpus": 0.1,
        "runtime_env": {"env_vars": {"NCCL_HOSTID": "source"}},
    }


class TestCudaIpc(OnDevice):
    name = "cuda_ipc"


class TestNccl(OnDevice):
    name = "nccl"


class TestNixl(OnDevice):
    name = "nixl"


class TestHost(OnDevice):
    name = "host"


class TestTcp(OnDevice):
    name = "tcp"

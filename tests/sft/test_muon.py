"""Muon and parameter groups: against torch's own Muon, and in one worker, with state."""

from __future__ import annotations

import pytest
import torch

from raylane.errors import ConfigError
from raylane.training.config.policy import OptimizerConfig
from raylane.training.model.optim import MuonAdamW, make_optimizer, orthogonalised, set_learning_rate
from sft import tiny_run

MUON = {"policy.optimizer.name": "muon"}


class Layered(torch.nn.Module):
    """The parts of a transformers model that decide which parameters Muon trains."""

    def __init__(self) -> None:
        super().__init__()
        self.causal_lm = torch.nn.Module()
        self.causal_lm.embed = torch.nn.Embedding(5, 4)
        self.causal_lm.layers = torch.nn.ModuleList([torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)])
        self.causal_lm.get_decoder = lambda: self.causal_lm


def settings(**values):
    return OptimizerConfig(name="muon", kwargs={"lr": 0.1, "weight_decay": 0.2}, **values)


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_and_adamw_equal_those_of_torch(adjust, nesterov):
    torch.manual_seed(0)
    mine = Layered()
    theirs = Layered()
    theirs.load_state_dict(mine.state_dict())
    muon = {"ns_precision": "bfloat16", "adjust_lr_fn": adjust, "nesterov": nesterov}
    own = make_optimizer(mine, settings(muon=muon))
    matrices = [layer.weight for layer in theirs.causal_lm.layers]
    vectors = [layer.bias for layer in theirs.causal_lm.layers]
    first = torch.optim.Muon(matrices, lr=0.1, weight_decay=0.2, adjust_lr_fn=adjust, nesterov=nesterov)
    embed = {"params": [theirs.causal_lm.embed.weight]}
    second = torch.optim.AdamW([embed, {"params": vectors, "weight_decay": 0.0}], lr=0.1, weight_decay=0.2)
    for seed in range(4):
        gradients(mine, seed)
        gradients(theirs, seed)
        own.step()
        first.step()
        second.step()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(mine.get_parameter(name), parameter, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5)])
def test_orthogonalised_has_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(matrix, 5, torch.float32))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert torch.equal(orthogonalised(torch.zeros(shape), 5, torch.float32), torch.zeros(shape))


def test_groups_change_rate_and_decay_of_their_parameters():
    groups = [{"pattern": "embed", "lr_scale": 0.5}, {"pattern": r"layers\.1", "weight_decay": 0.0, "lr_scale": 3}]
    model = Layered()
    optimizer = make_optimizer(model, settings(groups=groups, muon={"lr_scale": 2}))
    assert isinstance(optimizer, MuonAdamW)
    set_learning_rate(optimizer, 1.0)
    names = {id(parameter): name.removeprefix("causal_lm.") for name, parameter in model.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"], group["orthogonal"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert found == {
        "embed.weight": (0.5, 0.2, False),
        "layers.0.weight": (2.0, 0.2, True),
        "layers.0.bias": (1.0, 0.0, False),
        "layers.1.weight": (6.0, 0.0, True),
        "layers.1.bias": (3.0, 0.0, False),
    }


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["nothing"], r"groups\[0\]\.pattern='nothing' matches no trained parameter.*embed\.weight, layers\.0\.weight"),
        (["embed", "emb"], r"groups\[1\]\.pattern='emb' matches only parameters of earlier entries, e\.g\. embed"),
    ],
)
def test_pattern_that_matches_nothing_names_the_parameters(patterns, told):
    with pytest.raises(ConfigError, match=told):
        make_optimizer(Layered(), settings(groups=[{"pattern": one} for one in patterns]))


def test_group_that_is_no_pattern_is_refused(tmp_path):
    for group, told in (
        ({"pattern": "("}, "is no regular expression"),
        ({"lr_scale": 2}, "pattern"),
        ({"pattern": "a", "lr": 2}, "lr"),
    ):
        with pytest.raises(ConfigError, match=told):
            tiny_run.config_of(tmp_path, {"policy.optimizer.groups": [group]})

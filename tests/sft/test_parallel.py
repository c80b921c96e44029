"""Every parallel layout computes what one process computes: losses, gradients, and weights after training.

The reference is `reference_loop`, which shares no code with raylane. Data: 24 conversations that pack into exactly 8
rows, and every step uses all of them. `make test-all` runs a covering set of layouts, families and checkpoints, and
`make test-matrix` all combinations.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import RankGroups, Ranks
from torch.distributed.tensor import DTensor

from raylane.sft.data.mixing import open_rows
from raylane.sft.data.prepare import prepare
from raylane.sft.run.policy import SftPolicy
from raylane.training.model.hf_config import model_config
from raylane.training.parallel.mesh import ParallelDims
from raylane.training.parallel.sharded import own_part
from raylane.training.run import step
from raylane.training.run.generate import generate
from raylane.workers.batch import BatchDict
from sft import reference_loop, tiny_run
from sft.layouts import COVERING, LAYOUTS, MATRIX, QUICK

CONVERSATIONS, PACKED_ROWS, ROW_TOKENS, STEPS, EPS = 24, 8, 128, 3, 1e-4

FAMILIES = ("llama", "qwen2", "mistral", "gemma", "gemma2", "gemma3_text")
FAMILY_LAYOUTS = ("tp2-pp2", "tp2-cp2")
RING = ("tp2-pp2", "hsdp2x2", "tp2-cp2", "dp2-pp2", "dp2-cp2")
"""Layouts of four workers, each of which resumes what the one before saved."""
SHORT_RING = ("tp2-pp2", "hsdp2x2", "dp2-cp2", "tp2-pp2")
"""Each axis is saved once and loaded once; `make test-matrix` loads every layout on every other one."""
ON_RAY = (("tp2", True, "off"), ("tp2-pp2", True, "required"))
"""Layout, packing and mode of the compiled graph that `make test-all` runs by actors of Ray."""


def cases_with_marks() -> Iterator[Any]:
    """Yield the matrix of layouts: three cases without a mark, the covering set as `slow`, the rest as `matrix`."""
    for case in MATRIX:
        layout, packing = case
        mark = [] if case in QUICK else [pytest.mark.slow] if case in COVERING else [pytest.mark.matrix]
        yield pytest.param(layout, packing, marks=mark, id=f"{layout}-{'packed' if packing else 'unpacked'}")


def write_data(folder: Path) -> None:
    chooser = random.Random(5)
    for name, count in (("train", CONVERSATIONS), ("validation", 8)):
        lines = []
        for i in range(count):
            words = chooser.choices(tiny_run.WORDS, k=7)
            question = {"role": "user", "content": "say " + " ".join(words)}
            answer = {"role": "assistant", "content": " ".join(words[: 5 + i % 2])}
            lines.append(json.dumps({"messages": [question, answer]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def changes_of(world: int, layout: Mapping[str, Any], packing: bool, model_type: str = "qwen3") -> dict[str, Any]:
    return {
        "cluster.num_workers": world,
        "policy.max_total_sequence_length": ROW_TOKENS,
        "policy.sequence_packing.enabled": packing,
        "policy.train_global_batch_size": PACKED_ROWS if packing else CONVERSATIONS,
        "policy.train_micro_batch_size": 1 if packing else 3,
        "policy.hf_config_overrides.num_hidden_layers": 4,
        "policy.hf_config_overrides.model_type": model_type,
        # AdamW divides each gradient by its own size. With a small eps the rounding errors of gradients near zero would
        # decide about whole steps.
        "policy.optimizer.kwargs": {"lr": 1e-3, "eps": EPS},
        "policy.scheduler": {"name": "constant"},
        **{f"policy.dtensor_cfg.{key}": value for key, value in layout.items()},
    }


class Reference:
    """Loss, gradients and weights of the independent loop."""

    def __init__(
        self, folder: Path, model_type: str = "qwen3", changes: Mapping[str, Any] | None = None, steps: int = STEPS
    ) -> None:
        own = {**changes_of(1, {}, packing=True, model_type=model_type), **(changes or {})}
        config = tiny_run.config_of(folder, own)
        prepared = prepare(config)
        assert open_rows(prepared.train, config.policy, prepared.pad_id).num_rows == PACKED_ROWS
        data = reference_loop.documents(folder / "train.jsonl", prepared.tokenizer_dir)
        hf_config = model_config(config.policy, prepared.vocab_size, prepared.pad_id, prepared.end_ids[0])
        model = reference_loop.new_model(hf_config, config.sft.seed)
        self.loss, _ = reference_loop.backward(model, data)
        self.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        lr = config.policy.optimizer.kwargs.lr
        self.losses, self.accuracies = reference_loop.train(model, data, steps, lr, EPS, max_norm=1.0)
        self.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def computed(worker: Any, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return loss, gradients, losses of some steps, and the weights after them. Runs on every rank."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), STEPS)
    dims = ParallelDims.of(config.policy.dtensor_cfg, config.cluster.num_workers)
    loss, gradients = worker.gradients(worker.own_rows(0), 1)
    metrics = [worker.train_step(number) for number in range(STEPS)]
    losses, accuracies = ([of_step[name] for of_step in metrics] for name in ("loss", "token_accuracy"))
    weights = {}
    for name, parameter in worker.model.causal_lm.named_parameters():
        weights[name] = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
    place = dims.coordinates(worker.mesh.rank)
    if sum(place.values()) > place["pp"]:  # another rank has the same weights
        gradients, weights = {}, {}
    measured = {"loss": loss, "losses": losses, "accuracies": accuracies}
    return {**measured, "gradients": gradients, "weights": weights}


def assert_equal(found: list[dict[str, Any]], wanted: Reference) -> None:
    """Assert that token accuracies are those of the reference; losses, gradients and weights differ by < 1e-5."""
    for of_rank in found:
        assert abs(of_rank["loss"] - wanted.loss) < 1e-5
        assert max(abs(a - b) for a, b in zip(of_rank["losses"], wanted.losses, strict=True)) < 1e-5
        assert of_rank["accuracies"] == pytest.approx(wanted.accuracies, abs=1e-9)
    for kind in ("gradients", "weights"):
        ours = {name: value for of_rank in found for name, value in of_rank[kind].items()}
        theirs: dict[str, torch.Tensor] = getattr(wanted, kind)
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            difference = float((ours[name] - value).abs().max())
            assert difference < 1e-5, (kind, name, difference, float(value.abs().max()))


@pytest.mark.claim("fine-tuning", "layouts of data, tensor, context and pipeline parallelism equal one process")
@pytest.mark.parametrize(("layout", "packing"), list(cases_with_marks()))
def test_layouts_equal_one_process(
    groups: RankGroups, folder: Path, reference: Reference, layout: str, packing: bool
) -> None:
    world, settings = LAYOUTS[layout]
    assert_equal(groups.of(world).run(computed, folder, changes_of(world, settings, packing)), reference)


@pytest.mark.matrix  # each family once with some layout: `test_type_layouts`
@pytest.mark.parametrize("layout", FAMILY_LAYOUTS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_equals_one_process(four_ranks: Ranks, folder: Path, model_type: str, layout: str) -> None:
    changes = changes_of(4, LAYOUTS[layout][1], packing=True, model_type=model_type)
    assert_equal(four_ranks.run(computed, folder, changes), Reference(folder, model_type))


def answers(worker: Any, folder: Path, changes: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
    """Return the answers of a new model, which never ends them, and those that end at its first choices."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), STEPS)
    endless = generate(worker.model, prompts, 6, (), 0, worker.device)
    ended = generate(worker.model, prompts, 6, {endless[0][0], endless[1][2]}, 0, worker.device)
    worker._end_other_work()
    return [endless, ended]


@pytest.mark.claim("fine-tuning", "answers at a validation are the same on every layout")
@pytest.mark.slow
def test_answers_are_the_same_on_every_layout(four_ranks: Ranks, folder: Path) -> None:
    """Against `generate` of transformers, which continues one prompt at a time with a key-value cache."""
    config = tiny_run.config_of(folder, changes_of(1, {}, packing=True))
    prepared = prepare(config)
    prompts = [
        tokens[:length].tolist()
        for length, (tokens, _) in zip(
            (5, 9, 12), reference_loop.documents(folder / "train.jsonl", prepared.tokenizer_dir), strict=False
        )
    ]
    found = {
        layout: four_ranks.run(answers, folder, changes_of(4, LAYOUTS[layout][1], packing=True), prompts)
        for layout in ("tp2-pp2", "dp2-cp2")
    }
    first, ended = found["tp2-pp2"][0]
    assert [len(answer) for answer in first] == [6, 6, 6]
    assert ended[0] == []
    assert len(ended[1]) <= 2
    assert all(a[: len(b)] == b for a, b in zip(first, ended, strict=True))
    assert all(of_rank == [first, ended] for of_layout in found.values() for of_rank in of_layout)
    model = reference_loop.new_model(
        model_config(config.policy, prepared.vocab_size, prepared.pad_id, prepared.end_ids[0]), config.sft.seed
    )
    model.generation_config.eos_token_id = None
    for prompt, answer in zip(prompts, first, strict=True):
        made = model.eval().generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert made[0, len(prompt) :].tolist() == answer


def evaluated_from_a_folder(worker: Any, folder: Path, changes: dict[str, Any], hf: str) -> tuple[float, float]:
    """Return the validation losses of a new model, and of the folder that it was written to. Runs on every rank."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), STEPS)
    before = worker.evaluate()["loss"]
    worker.save_hf(hf)
    # The tokenizer of the run, because only then is the data the same.
    policy = {"model_name": hf, "hf_config_overrides": {}, "tokenizer": config.policy.tokenizer.model_dump()}
    policy["tokenizer"]["train_vocab_size"] = None
    policy["tokenizer"]["chat_template"] = None
    start = {f"policy.{key}": value for key, value in policy.items()}
    kept = {key: value for key, value in changes.items() if not key.startswith("policy.hf_config_overrides")}
    again = tiny_run.config_of(folder, {**kept, **start})
    worker.setup(again, prepare(again), STEPS)
    return before, worker.evaluate()["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "layouts"), [("qwen3", ("tp2", "pp2")), ("gemma", ("pp2",)), ("gemma3_text", ("tp2",))]
)
def test_models_start_from_the_folders_that_they_were_written_to(
    ranks: Ranks, folder: Path, tmp_path: Path, model_type: str, layouts: tuple[str, ...]
) -> None:
    for layout in layouts:
        changes = changes_of(2, LAYOUTS[layout][1], packing=True, model_type=model_type)
        for before, after in ranks.run(evaluated_from_a_folder, folder, changes, str(tmp_path / layout)):
            assert abs(before - after) < 1e-5


@pytest.mark.slow
def test_vocabularies_that_do_not_divide_equal_one_process(ranks: Ranks, folder: Path) -> None:
    """Logits of parts of different sizes; the self-check of `setup` passes through a loss function made from logits."""
    odd = {"policy.hf_config_overrides.vocab_size": 331}
    wanted = Reference(folder, changes=odd)
    changes = {**changes_of(2, LAYOUTS["tp2-sp"][1], packing=True), **odd}
    assert_equal(ranks.run(computed, folder, changes), wanted)


def dtype_of_weights(worker: Any, folder: Path, changes: dict[str, Any]) -> str:
    """Return the dtype in which a loss function gets a float32 tensor of a batch. Runs on every rank."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), STEPS)
    seen = []

    def weighted(logits: torch.Tensor, batch: BatchDict) -> torch.Tensor:
        seen.append(str(batch["weights"].dtype))
        return logits.sum() * 0.0

    batch = worker.own_rows(0)
    batch["weights"] = torch.rand(batch["input_ids"].shape)
    worker.add_loss("weighted", weighted)
    worker.train_batch(batch, 0, "weighted", 1, False)
    return ",".join(sorted(set(seen)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_loss_functions_get_tensors_as_they_were_sent(ranks: Ranks, folder: Path, layout: str) -> None:
    changes = {**changes_of(2, LAYOUTS[layout][1], packing=True), "policy.precision": "bfloat16"}
    assert set(ranks.run(dtype_of_weights, folder, changes)) - {""} == {"torch.float32"}


def step_with_a_fault(worker: Any, folder: Path, changes: dict[str, Any]) -> tuple[float, bool]:
    """Return the mark of a skipped step, and True if no weight changed; rank 1 has a gradient of NaN alone."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), STEPS)
    clip = step.clip

    def clip_with_a_fault(model: Any, max_norm: float | None) -> float:
        own_part(model.causal_lm.get_parameter("model.norm.weight").grad).fill_(float("nan"))
        return clip(model, max_norm)

    before = [own_part(parameter).detach().clone() for parameter in worker.model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        if worker.mesh.rank == 1:
            patch.setattr(step, "clip", clip_with_a_fault)
        metrics = worker.train_step(1)
    after = [own_part(parameter) for parameter in worker.model.parameters()]
    return metrics.get("skipped", 0.0), all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_all_ranks_skip_a_step_that_one_of_them_must_skip(ranks: Ranks, folder: Path) -> None:
    """Tensor-parallel ranks compute the gradients of a norm's weights each for themselves."""
    changes = {**changes_of(2, LAYOUTS["tp2"][1], packing=True), "sft.on_nan": "skip"}
    assert ranks.run(step_with_a_fault, folder, changes) == [(1.0, True)] * 2


def trained_and_saved(worker: Any, folder: Path, changes: dict[str, Any], state: str, start: str | None) -> float:
    """Load a state if there is one, train a step, save, and return its loss. Runs on every rank."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), len(RING) + 1)
    number = 0 if start is None else worker.load_state(start)
    loss = float(worker.train_step(number)["loss"])
    worker.save_state(state, number + 1)
    return loss


@pytest.mark.slow
def test_checkpoints_load_around_a_ring_of_layouts(four_ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """Weights and the optimizer's averages come over, or the second loss would differ."""
    losses, start = [], None
    for number, layout in enumerate(SHORT_RING):
        changes, state = changes_of(4, LAYOUTS[layout][1], packing=True), str(tmp_path / f"state-{number}")
        losses.append(four_ranks.run(trained_and_saved, folder, changes, state, start)[0])
        start = state
    expected = Reference(folder, steps=len(SHORT_RING)).losses
    assert losses == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.claim("fine-tuning", "checkpoints load on every other layout")
@pytest.mark.matrix
@pytest.mark.parametrize("source", RING)
def test_checkpoints_load_on_every_other_layout(four_ranks: Ranks, folder: Path, tmp_path: Path, source: str) -> None:
    expected = Reference(folder, steps=2).losses
    first = str(tmp_path / "state")
    loss = four_ranks.run(trained_and_saved, folder, changes_of(4, LAYOUTS[source][1], packing=True), first, None)[0]
    for layout in ("dp4", *RING):
        changes, state = changes_of(4, LAYOUTS[layout][1], packing=True), str(tmp_path / layout)
        losses = [loss, four_ranks.run(trained_and_saved, folder, changes, state, first)[0]]
        assert losses == pytest.approx(expected, abs=1e-5, rel=0), layout


def losses_by_driver(folder: Path, layout: tuple[int, dict[str, Any]], packing: bool, mode: str) -> list[float]:
    """Return the losses of a run on Ray: the first steps with batches from the driver, the rest read by the workers."""
    world, changes = layout
    changes = {**changes_of(world, changes, packing), "policy.compiled_graph.mode": mode}
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    with SftPolicy(config, prepared, STEPS) as policy:
        assert policy.group.compiled is (mode == "required")
        rows = open_rows(prepared.train, config.policy, prepared.pad_id)
        policy.warm_up(rows)
        whole = BatchDict.from_arrays(rows.rows(list(range(rows.num_rows))))
        losses = [policy.train(whole)["loss"]]
        return losses + [policy.train_step(number)["loss"] for number in range(1, STEPS)]


@pytest.mark.parametrize(
    ("layout", "packing", "mode"),
    [
        pytest.param(*case, mode, marks=pytest.mark.slow if (*case, mode) in ON_RAY else pytest.mark.matrix)
        for case in MATRIX
        for mode in ("off", "required")
        if LAYOUTS[case[0]][0] <= 4
    ],
)
def test_workers_of_ray_equal_one_process(
    cluster: None, folder: Path, reference: Reference, layout: str, packing: bool, mode: str
) -> None:
    losses = losses_by_driver(folder, LAYOUTS[layout], packing, mode)
    assert losses == pytest.approx(reference.losses, abs=1e-5, rel=0)

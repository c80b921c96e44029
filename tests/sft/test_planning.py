"""Plans: figures that can be checked by hand, and a model whose size and keys are known without making it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raylane.errors import ConfigError, DataError
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.run.planning import RowCount, make_plan, num_validations, plan_run, render
from raylane.training.config.policy import DTensorConfig
from raylane.training.model.hf_config import ModelShape, model_config, model_shape
from raylane.training.parallel.mesh import keeps_gathered, shards_parameters
from raylane.training.run.memory import MemoryEstimate, estimate_memory
from sft import tiny_run
from sft.conversations import config, question, write_jsonl

SHAPE = ModelShape("llama", 1000, 336, 332, 2, 16, 32, 2, 1, 8, 20, 256)
VAL_SIZES = {"val_global_batch_size": 4, "val_micro_batch_size": 2}
ROWS = RowCount(rows=21, documents=50, tokens=2000, supervised=900, efficiency=0.74)


def test_steps_and_tokens(tmp_path: Path) -> None:
    run = config(
        tmp_path,
        cluster={"num_workers": 2},
        policy={"train_global_batch_size": 4, "dtensor_cfg": {"dp_replicate_size": 2}},
        sft={"val_period": 4, "val_at_start": True, "val_at_end": True, **VAL_SIZES},
        data={"validation_fraction": 0.1},
    )
    plan = make_plan(run, SHAPE, ROWS, RowCount(9, 9, 100, 50, 0.5))
    assert (plan.dims.dp_replicate, plan.dims.dp_shard, plan.device) == (2, 1, "cpu")
    assert (plan.steps_per_epoch, plan.total_steps, plan.unused_rows, plan.micro_batches) == (5, 10, 1, 2)
    assert plan.positions == 10 * 4 * 128
    assert plan.supervised == round(40 / 21 * 900)
    assert plan.validations == 4  # before the first step, after 4, 8 and 10
    assert plan.validation_batches == 3


@pytest.mark.parametrize(
    ("period", "at_end", "times"), [(0, False, 0), (0, True, 1), (5, True, 2), (4, False, 2), (4, True, 3)]
)
def test_the_last_step_validates_once(tmp_path: Path, period: int, at_end: bool, times: int) -> None:
    run = config(tmp_path, sft={"val_period": period, "val_at_end": at_end}, data={"validation_fraction": 0.1})
    assert num_validations(run, 10) == times


def memory(tmp_path: Path, **sections: Any) -> Any:
    return estimate_memory(config(tmp_path, **sections), SHAPE)


def test_forecast_divides_memory_by_shards_not_replicas(tmp_path: Path) -> None:
    one = memory(tmp_path)
    assert (one.parameters, one.optimizer) == (4000, 8000)
    two = memory(tmp_path, cluster={"num_workers": 2})
    assert (two.parameters, two.optimizer) == (2000, 4000)
    replicas = memory(tmp_path, cluster={"num_workers": 2}, policy={"dtensor_cfg": {"dp_replicate_size": 2}})
    assert replicas.parameters == 4000
    assert one.total == sum(one.parts.values())
    assert set(one.parts) | {"moment"} == set(one.__dict__)


def test_memory_counts_whole_gradients_between_micro_batches(tmp_path: Path) -> None:
    """Each worker keeps 4 bytes of every parameter, however many workers share the model: 32 GB at 8 billion."""
    cluster = {"num_workers": 2}
    several = {"train_global_batch_size": 4, "train_micro_batch_size": 1}
    whole = memory(tmp_path, cluster=cluster, policy=several)
    assert whole.unreduced >= 4 * SHAPE.num_parameters
    each = {**several, "dtensor_cfg": {"reduce_every_micro_batch": True}}
    assert memory(tmp_path, cluster=cluster, policy=each).unreduced < 4 * SHAPE.num_parameters
    assert memory(tmp_path, cluster=cluster).unreduced < 4 * SHAPE.num_parameters, "one micro-batch is reduced at once"
    run = config(tmp_path, cluster=cluster, policy=several)
    text = render(make_plan(run, SHAPE, ROWS, None), run)
    assert "gradients not reduced yet" in text
    assert f"({whole.moment})" in text


@pytest.mark.parametrize(
    ("policy", "dp_shard", "parameters", "shards"),
    [
        ({}, 2, 2**26, False),
        ({}, 2, 2**26 + 1, True),
        ({}, 1, 10**10, False),
        ({"precision": "bfloat16"}, 1, 1000, True),
        ({"dtensor_cfg": {"reduce_every_micro_batch": True}}, 2, 1000, True),
        ({"dtensor_cfg": {"shard_parameters": "always"}}, 1, 1000, True),
        ({"dtensor_cfg": {"shard_parameters": "never"}}, 8, 10**10, False),
    ],
)
def test_shards_parameters_by_size_and_settings(
    tmp_path: Path, policy: dict[str, Any], dp_shard: int, parameters: int, shards: bool
) -> None:
    made = config(tmp_path, policy={"precision": "float32", **policy}).policy
    assert shards_parameters(made, dp_shard, parameters) is shards


def test_memory_of_whole_models_has_no_gathered_part(tmp_path: Path) -> None:
    whole = memory(tmp_path, policy={"precision": "float32"}, cluster={"num_workers": 2})
    assert (whole.parameters, whole.optimizer, whole.gathered) == (4000, 8000, 0)
    assert whole.shared == 4 * 2500, "own slot, the result, and half of the other slot"
    run = config(tmp_path, policy={"precision": "float32"})
    assert "1 worker, the whole model on each, over gloo" in render(make_plan(run, SHAPE, ROWS, None), run)


@pytest.mark.parametrize(
    ("settings", "parameters", "keeps"),
    [
        ({}, 2**28, True),
        ({}, 2**28 + 1, False),
        ({"reduce_every_micro_batch": True}, 1000, False),
        ({"activation_checkpointing": True}, 1000, False),
    ],
)
def test_keeps_gathered_by_size_and_settings(
    tmp_path: Path, settings: dict[str, Any], parameters: int, keeps: bool
) -> None:
    made = config(tmp_path, policy={"precision": "float32", "dtensor_cfg": settings}).policy
    assert keeps_gathered(made, parameters) is keeps


def test_plan_tells_of_gpus_that_are_not_used(tmp_path: Path) -> None:
    run = config(tmp_path, cluster={"gpus_per_node": 8, "num_workers": 2})
    assert "6 of 8 GPUs are not used" in render(make_plan(run, SHAPE, ROWS, None), run)


def test_plan_tells_the_memory_of_snapshots(tmp_path: Path) -> None:
    run = config(tmp_path, sft={"snapshot_every": 10, "max_num_steps": 50})
    text = render(make_plan(run, SHAPE, ROWS, None), run)
    expected = 3 * 12 * SHAPE.num_parameters / 2**30
    assert f"every 10 steps, {expected:.2f} GiB of shared memory" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"attn_implementation": "no_such_thing"}, "must be one of raylane, sdpa, eager, .* got 'no_such_thing'"),
        ({"torch_dtype": "bfloat16"}, r"torch_dtype has no effect here; set policy\.precision"),
    ],
)
def test_model_overrides_without_effect_are_refused(tmp_path: Path, overrides: dict[str, Any], words: str) -> None:
    policy = config(tmp_path, policy={"hf_config_overrides": overrides}).policy
    with pytest.raises(ConfigError, match=words):
        model_config(policy, 400)


def test_forecast_falls_with_each_memory_saving_option(tmp_path: Path) -> None:
    base = memory(tmp_path, policy={"precision": "float32"})
    assert memory(tmp_path, policy={"precision": "bfloat16"}).activations < base.activations
    checkpointed = {"precision": "float32", "dtensor_cfg": {"activation_checkpointing": True}}
    assert memory(tmp_path, policy=checkpointed).activations < base.activations
    assert memory(tmp_path, policy={"precision": "float32", "loss_chunk_tokens": 16}).logits < base.logits
    offloaded = {"dtensor_cfg": {"cpu_offload": True}}
    assert memory(tmp_path, policy=offloaded, cluster={"gpus_per_node": 1}).optimizer == 0


def test_forecast_has_all_heads_of_keys_for_float32_on_gpus(tmp_path: Path) -> None:
    """CUDA's fused kernel for float32 takes no shared key heads."""
    on_cpus, on_gpus = (
        memory(tmp_path, policy={"precision": "float32"}, cluster={"gpus_per_node": gpus}).activations
        for gpus in (0, 1)
    )
    shared = (SHAPE.num_attention_heads - SHAPE.num_key_value_heads) * SHAPE.head_dim
    tokens = config(tmp_path).policy.micro_batch_tokens
    assert on_gpus - on_cpus == 4 * 2 * shared * SHAPE.num_layers * tokens


def test_forecast_knows_torch_without_its_kernel_for_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 and 2.10 compute bfloat16 with the kernels of float32: all heads of keys, and one more copy."""
    half = {"policy": {"precision": "bfloat16"}, "cluster": {"gpus_per_node": 1}}
    with_kernel = memory(tmp_path, **half).activations
    monkeypatch.setattr("raylane.training.run.memory.varlen_kernel", lambda: None)
    without = memory(tmp_path, **half).activations
    heads = SHAPE.num_attention_heads + 2 * (SHAPE.num_attention_heads - SHAPE.num_key_value_heads)
    tokens = config(tmp_path).policy.micro_batch_tokens
    assert without - with_kernel == 2 * heads * SHAPE.head_dim * SHAPE.num_layers * tokens


def test_forecast_falls_with_each_axis(tmp_path: Path) -> None:
    """Two workers on any axis but that of copies hold half of what the axis divides."""
    base = memory(tmp_path, policy={"precision": "bfloat16", "train_global_batch_size": 4})

    def divided(**settings: Any) -> MemoryEstimate:
        policy = {"precision": "bfloat16", "train_global_batch_size": 4, "dtensor_cfg": settings}
        return memory(tmp_path, policy=policy, cluster={"num_workers": 2})

    by_heads = divided(tensor_parallel_size=2, sequence_parallel=True)
    assert 2 * by_heads.parameters == base.parameters
    assert by_heads.activations < base.activations
    by_tokens = divided(context_parallel_size=2)
    assert 2 * by_tokens.optimizer == base.optimizer
    assert base.activations / 2 <= by_tokens.activations < base.activations, "every worker has all keys and values"
    by_layers = divided(pipeline_parallel_size=2)
    assert by_layers.parameters < base.parameters


def test_rows_longer_than_the_model_can_place_are_refused(tmp_path: Path) -> None:
    short = ModelShape(**{**SHAPE.__dict__, "max_positions": 64})
    with pytest.raises(ConfigError, match=r"max_total_sequence_length=128 .* max_position_embeddings=64"):
        make_plan(config(tmp_path), short, ROWS, None)


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 rows, which is less than one global batch of 2"):
        make_plan(config(tmp_path), SHAPE, RowCount(1, 1, 10, 5, 0.1), None)


def real(tmp_path: Path, **sections: Any) -> SftRunConfig:
    write_jsonl(tmp_path / "train.jsonl", [question(seed) for seed in range(20)])
    shape = {
        "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    policy = sections.setdefault("policy", {})
    policy["hf_config_overrides"] = {**shape, **policy.get("hf_config_overrides", {})}
    return config(tmp_path, **sections)


def test_a_real_plan_counts_the_model_and_reads_the_data(tmp_path: Path) -> None:
    run = real(tmp_path)
    plan = plan_run(run)
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 8 + 3 * 16 * 32 + 2 * 16
    assert plan.shape.num_parameters == plan.shape.vocab_size * 16 + 2 * layer + 16
    assert (plan.shape.num_layer, plan.shape.num_root) == (layer, plan.shape.vocab_size * 16 + 16)
    assert plan.shape.has_head_norms
    assert plan.train.documents == 20
    text = render(plan, run)
    for words in ("dp_replicate=1 x dp_shard=1: 1 worker, FSDP over gloo", f"{plan.total_steps} = 2 epochs", "never"):
        assert words in text


def test_plan_refuses_a_model_folder_that_the_run_refuses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 8}')
    sizes = {"policy.dtensor_cfg.tensor_parallel_size": 3, "policy.train_global_batch_size": 6}
    folder = {"policy.model_name": str(tmp_path), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    run = tiny_run.config_of(tmp_path, {"cluster.num_workers": 3, **sizes, **folder})
    with pytest.raises(ConfigError, match=r"num_attention_heads=8 does not divide .*=3; use 1, 2, 4, 8"):
        plan_run(run)


def test_a_warm_up_that_outlasts_the_run_is_mentioned(tmp_path: Path) -> None:
    run = real(tmp_path, policy={"scheduler": {"warmup_steps": 1000}})
    assert "1000 of warm-up, which is longer than this run" in render(plan_run(run), run)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_hiden_layers": 3}, ["num_hiden_layers", "Qwen3Config has no such key", "'num_hidden_layers'"]),
        ({"model_type": "quen3"}, ["'quen3' is unknown", "'qwen3'"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling", "no such key"]),
        ({"vocab_size": 10}, ["vocab_size=10", "the tokenizer has 400 tokens"]),
    ],
)
def test_model_overrides_that_would_change_nothing_are_refused(
    tmp_path: Path, overrides: dict, words: list[str]
) -> None:
    run = real(tmp_path, policy={"hf_config_overrides": overrides})
    with pytest.raises(ConfigError) as error:
        model_config(run.policy, vocab_size=400)
    for word in words:
        assert word in str(error.value)


def test_a_model_folder_keeps_its_shape_but_for_overrides(tmp_path: Path) -> None:
    made = model_config(real(tmp_path).policy, vocab_size=400, pad_id=0, end_id=2)
    made.save_pretrained(str(tmp_path / "model"))
    policy = real(tmp_path).policy.model_copy(
        update={"model_name": str(tmp_path / "model"), "hf_config_overrides": {"rope_theta": 5e5}}
    )
    again = model_config(policy, vocab_size=300)
    assert again.vocab_size == 400
    assert again.rope_parameters["rope_theta"] == 5e5
    assert model_shape(again) == model_shape(made)
    other = policy.model_copy(update={"hf_config_overrides": {"model_type": "llama"}})
    with pytest.raises(ConfigError, match=r"model_type='llama', but the model .* is 'qwen3'"):
        model_config(other, vocab_size=300)
    with pytest.raises(ConfigError, match=r"model_name='nowhere' is no folder"):
        model_config(policy.model_copy(update={"model_name": "nowhere"}), vocab_size=300)


def test_making_a_model_configuration_changes_nothing_in_the_run(tmp_path: Path) -> None:
    run = real(tmp_path)
    before = dict(run.policy.hf_config_overrides)
    model_config(run.policy, vocab_size=400)
    assert run.policy.hf_config_overrides == before


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_attention_heads": 0},
        {"hidden_size": -16},
        {"hidden_size": 2**40},
        {"hidden_size": "wide"},
        {"model_type": "bert"},
        {"model_type": "t5"},
        {"model_type": "gpt2"},
    ],
)
def test_plan_of_a_model_that_cannot_be_names_the_configuration(tmp_path: Path, overrides: dict[str, Any]) -> None:
    write_jsonl(tmp_path / "train.jsonl", [question(seed) for seed in range(9)])
    document = {"hidden_size": 16, "num_attention_heads": 2, **overrides}
    if "model_type" in overrides:
        document = overrides
    run = config(tmp_path, policy={"hf_config_overrides": document})
    with pytest.raises(ConfigError, match=r"policy\.hf_config_overrides"):
        plan_run(run)


@pytest.mark.parametrize("in_folder", [True, False])
def test_attention_dropout_on_divided_heads_is_refused(tmp_path: Path, in_folder: bool) -> None:
    """Tensor-parallel workers would draw equal masks for different heads."""
    shape = {"model_type": "llama", "vocab_size": 400, "attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    chosen = {"model_name": str(tmp_path), "hf_config_overrides": {}} if in_folder else {"hf_config_overrides": shape}
    divided = DTensorConfig(tensor_parallel_size=2)
    policy = real(tmp_path).policy.model_copy(update={"model_name": None, **chosen, "dtensor_cfg": divided})
    with pytest.raises(ConfigError, match=r"attention_dropout=0\.1.* Set .*attention_dropout=0"):
        model_config(policy, vocab_size=300)
    assert model_config(policy.model_copy(update={"dtensor_cfg": DTensorConfig()}), vocab_size=300)

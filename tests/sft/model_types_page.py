"""Page docs/reference/model-types.md, made from raylane's table of model types, so that it is never out of date.

`python tests/sft/model_types_page.py > docs/reference/model-types.md` writes it; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from raylane.training.config.model_types import DENSE, MODEL_TYPES

COMMAND = "python tests/sft/model_types_page.py > docs/reference/model-types.md"

HEAD = """# Model types

Generated from the code by `python tests/sft/model_types_page.py`; do not edit.

A type is `model_type` in the `config.json` of a Hugging Face folder. For the types of this table, tests compare losses,
gradients and files with transformers. A type that is not in it runs as one process, with FSDP2 and with copies, if it
passes the checks before the first step; it is refused otherwise, and so is every `no`, by an error that names the key.
The columns from `tensors` to `experts` are `tensor_parallel_size`, `sequence_parallel`, `context_parallel_size`,
`pipeline_parallel_size` and `expert_parallel_size` of `policy.dtensor_cfg`.

| type | alone | FSDP2, copies | tensors | sequences | context | pipeline | experts | LoRA | export |
|---|---|---|---|---|---|---|---|---|---|
"""

PROOFS = (
    (
        "alone",
        ("test_model_types.py::test_model_type_equals_transformers_eager",),
        "loss and gradients of transformers' eager attention, one document at a time; packed and unpacked rows",
    ),
    (
        "FSDP2 to pipeline",
        ("test_type_layouts.py::test_divided_type_equals_transformers_eager",),
        "the same",
    ),
    (
        "pairs of divisions of " + ", ".join(f"`{name}`" for name in DENSE),
        ("test_parallel.py::test_layouts_equal_one_process", "test_parallel.py::test_every_family_equals_one_process"),
        "losses, gradients and weights of a loop that shares no code with raylane",
    ),
    (
        "LoRA",
        ("test_expert_folders.py::test_adapters_are_merged_into_published_weights",),
        "logits of transformers with the exported weights",
    ),
    (
        "export",
        ("test_expert_folders.py::test_folder_is_exported_as_it_was_published",),
        "names, shapes and values of a folder that transformers wrote, and its logits",
    ),
    (
        "experts",
        (
            "test_type_layouts.py::test_divided_type_equals_transformers_eager",
            "test_expert_parallel.py::test_training_with_divided_experts_equals_one_process",
        ),
        "the same, alone and with copies; losses, weights and files of one process",
    ),
    ("every `no`", ("test_type_layouts.py::test_type_that_cannot_be_divided_names_the_reason",), "the error"),
)
"""Columns of the table, the tests in tests/sft that prove their cells, and what these compare with."""

TAIL = """All of them run on CPUs with small models. Llama and Qwen3 were run on one GPU too, the others on none.

## Models with experts

- **Folders** are read in the names in which they are published, and exported in the same names, by transformers' own
  conversions. Folders with stacked experts are read too. A worker reads only those experts that FSDP2 gives to it.
- **Expert parallelism** (`policy.dtensor_cfg.expert_parallel_size`) leaves each expert on one worker, to which tokens
  travel; without it FSDP2 gathers the experts of a layer on every worker. The size is that of all workers that share
  the weights; `dp_replicate_size` copies, LoRA, activation checkpointing and bfloat16 work with it, other divisions do
  not (`tests/sft/test_expert_parallel.py`). Types without it were not tested with it.
- **Tensor parallelism** divides attention, embedding and head. Every worker computes all experts of whole rows.
- **Buffers** of routers (`e_score_correction_bias` of DeepSeek-V3 and GLM-4-MoE) are read, saved and exported in
  float32, and never changed.
- **Loss of the routers**: with `output_router_logits=true` in the model's configuration (or in
  `policy.hf_config_overrides`), transformers' load-balancing loss times `router_aux_loss_coef` is added to the training
  loss, not to the validation loss. It is that of the tokens of a micro-batch without padding, and the loss of a step
  has its mean over the micro-batches, weighted by their supervised tokens. It needs whole rows and all layers in a
  worker, so not context or pipeline parallelism
  (`tests/sft/test_type_layouts.py::test_router_loss_equals_that_of_transformers`).
- **LoRA** adapts linear layers. Experts and most routers are none, and stay frozen.
"""


def _cells() -> Iterator[str]:
    for name, divisions in sorted(MODEL_TYPES.items()):
        ways = (divisions.tensors, divisions.sequences, divisions.context, divisions.stages, divisions.experts)
        cells = ["yes", "yes", *("yes" if way else "no" for way in ways), "yes", "yes"]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _reasons() -> Iterator[str]:
    yield "\nReasons for `no` (types without expert parallelism have no experts, or were not tested with it):\n"
    for name, divisions in sorted(MODEL_TYPES.items()):
        if divisions.reason:
            yield f"- `{name}`: {divisions.reason}"


def _proofs() -> Iterator[str]:
    yield "\n## Proofs\n\nTests in tests/sft:\n\n| cells | test | compared with |\n|---|---|---|"
    for column, tests, reference in PROOFS:
        yield f"| {column} | {', '.join(f'`{test}`' for test in tests)} | {reference} |"
    yield ""


def markdown() -> str:
    """Return the whole page."""
    return HEAD + "\n".join([*_cells(), *_reasons(), *_proofs(), TAIL])


if __name__ == "__main__":
    sys.stdout.write(markdown())

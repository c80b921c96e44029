"""vLLM as the engine of a rollout actor. vLLM is loaded when an engine is made.

N = prompts, R = tokens of the longest answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from raylane import weights
from raylane.rl.generation import Answers
from raylane.rl.rollout import EngineWeights, SamplingOptions

DEFAULTS: Mapping[str, Any] = {
    # Versions are exchanged in the memory of the tensors, which compiled code would not see.
    "enforce_eager": True,
    # Prompts and answers are tokens here.
    "skip_tokenizer_init": True,
    # Options of sampling are those of the run, and not those in the model's folder.
    "generation_config": "vllm",
    # The trainer compares with the distribution that was sampled from, that is after the temperature.
    "logprobs_mode": "processed_logprobs",
}
"""Arguments of vLLM that a run sets; the others are vLLM's defaults. `rollout.vllm_kwargs` goes before."""
ENVIRONMENT = {
    # The engine computes in the actor's process, and so ends with it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # On CPUs: Ray, and not vLLM, says which cores a process has.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables that are set before vLLM is loaded, where they are not set yet."""


class VllmEngine:
    """vLLM's `LLM` in this process, or with workers of its own (`tensor_parallel_size`)."""

    def __init__(self, folder: str, name: str, **kwargs: Any) -> None:
        """Load the model of a folder and attach it to the weights `name`; `kwargs` are those of vLLM's `LLM`."""
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        from vllm import LLM

        self._engine = LLM(model=folder, **{**DEFAULTS, **kwargs})
        self._attachment = weights.attach(self._engine, name)

    def update(self, version: int, timeout_s: float) -> EngineWeights:
        """Wait for a version of the weights with this number or more, and take the newest."""
        newest = self._attachment.update(at_least=version, timeout=timeout_s)
        return EngineWeights(newest.version, newest.step, newest.pause_s if newest.changed else 0.0)

    def sample(self, prompts: Sequence[Sequence[int]], options: SamplingOptions, seed: int) -> Answers:
        """Return one answer to each prompt."""
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        sampling = [
            SamplingParams(
                temperature=options.temperature,
                max_tokens=options.new_tokens,
                # The ids that end an answer in the trainer's vocabulary, and no others.
                stop_token_ids=list(options.end_ids),
                ignore_eos=True,
                # A seed for each request: what an answer is does not depend on what is computed beside it.
                seed=(seed + number) % 2**63,
                logprobs=0,
                detokenize=False,
            )
            for number in range(len(requests))
        ]
        answers = [output.outputs[0] for output in self._engine.generate(requests, sampling, use_tqdm=False)]
        tokens = [torch.tensor(answer.token_ids) for answer in answers]
        logprobs = [
            torch.tensor([each[token].logprob for token, each in zip(answer.token_ids, answer.logprobs, strict=True)])
            for answer in answers
        ]
        return Answers(
            pad_sequence(tokens, batch_first=True, padding_value=options.pad_id),
            pad_sequence(logprobs, batch_first=True),
            torch.tensor([len(answer) for answer in tokens]),
        )

"""Bring weights of a trainer into a vLLM engine that answers requests. Run `python examples/weights_vllm.py`."""

import asyncio
import tempfile

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raylane import weights

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


@ray.remote(max_concurrency=8, runtime_env={"env_vars": ON_A_CPU})
class Engine:
    def __init__(self, folder):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "skip_tokenizer_init": True}
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **options))
        self.attachment = weights.attach(self.engine, "policy", pause="keep")

    async def answer(self, prompt, tokens):
        from vllm import SamplingParams

        options = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        async for output in self.engine.generate({"prompt_token_ids": prompt}, options, str(prompt)):
            answer = output.outputs[0]
        return [f"tokens {span.start} to {span.end} of version {span.version}" for span in answer.weight_versions]

    async def update(self):
        update = await self.attachment.update_async()
        return f"version {update.version} of step {update.step}"

    async def update_meanwhile(self, prompt, tokens):
        answer = asyncio.ensure_future(self.answer(prompt, tokens))
        await self.answer([9], 4)  # the long answer is under way by now
        return await self.update(), await answer

    def end(self):
        self.engine.shutdown()


ray.init()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **SMALL))
publisher = weights.Publisher("policy", model)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    engine = Engine.remote(folder)
    ray.get(engine.__ray_ready__.remote())
publisher.publish(10)
print(ray.get(engine.update.remote()))
print(ray.get(engine.answer.remote([1, 2, 3], 16)))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.01)  # a step of training
publisher.publish(20)
print(*ray.get(engine.update_meanwhile.remote([4, 5, 6], 300)), sep="\n")
ray.get(engine.end.remote())
weights.drop("policy")

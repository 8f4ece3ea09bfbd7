"""mtrain as the trainer of a reinforcement-learning framework: `python examples/rl_trainer.py`, or on two ranks with

    torchrun --nproc-per-node 2 examples/rl_trainer.py layout.tp=2

Rollouts come from another program, which gets the weights before each step: here transformers, in place of vLLM.
"""

import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from mtrain import Datum, Engine, load_config

PROMPTS, LENGTH = torch.tensor([[3, 1, 4]] * 64), 12
SAMPLING = {"do_sample": True, "top_k": 0, "min_new_tokens": LENGTH, "max_new_tokens": LENGTH, "pad_token_id": 0}
SHAPE = {"vocab_size": 16, "hidden_size": 32, "num_attention_heads": 4}
SETTINGS = [
    "run.dir=runs/rl",
    f"model={SHAPE | {'num_layers': 2, 'ffn_hidden_size': 64}}",
    "train={global_batch_size: 64, micro_batch_size: 16, num_steps: 16, precision: fp32}",
    "optimizer={lr: 3.0e-2, schedule: constant}",
    "adapter={rank: 8, targets: [qkv, proj, fc1, fc2, output]}",
    "data={kind: mock, seq_length: 16}",  # the samples come from this program
    "loss.side_terms.near={function: kl, coefficient: 0.02}",  # keeps the policy near the frozen model
]


def datum(ids: list[int], *extras: float | list[float]) -> Datum:
    named = dict(zip(("advantages", "old_logprobs", "ref_logprobs"), extras))  # one per sequence, or one per token
    return Datum(ids, [0.0] * (len(ids) - LENGTH) + [1.0] * LENGTH, extras=named)  # the prompt has weight 0


def main() -> None:
    server = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=2, intermediate_size=64, rms_norm_eps=1e-5))
    with Engine(load_config([], SETTINGS + sys.argv[1:])) as engine:
        while engine.step < engine.config.train.num_steps:
            for name, tensor in engine.named_hf_tensors(everywhere=False):  # other ranks take part but get no tensors
                server.get_parameter(name).data.copy_(tensor)
            torch.manual_seed(engine.step)
            drawn = server.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), **SAMPLING)
            dist.broadcast(drawn, src=0)
            rewards = (drawn[:, -LENGTH:] == 7).float().mean(1)  # the share of token 7 in an answer
            advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
            rollouts = [datum(ids) for ids in drawn.tolist()]
            old = [[0.0, *found.tolist()] for found in engine.forward(rollouts).log_probs]
            with engine.adapters_off():  # the reference model, without a second model in memory
                ref = [[0.0, *found.tolist()] for found in engine.forward(rollouts).log_probs]
            batch = [datum(*each) for each in zip(drawn.tolist(), advantages, old, ref)]
            for _ in range(2):  # two updates on the same rollouts
                engine.forward_backward(batch, "ppo", {"clip_high": 0.28})
                done = engine.optim_step()
            if engine.rank == 0:
                print(f"step {done.step}  reward {rewards.mean():.4f}  loss {done.loss:.5f}", flush=True)


if __name__ == "__main__":
    main()

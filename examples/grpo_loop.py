"""GRPO: a model that has seen a few sums learns from rewards alone to add two digits; a minute on two cores:
`torchrun --nproc-per-node 2 examples/grpo_loop.py layout.tp=2`. The engine that trains also draws the answers
(or vLLM, if it is installed); answers, rewards and the curve are the same under any layout."""

import random
import sys
from statistics import mean, pstdev

from mtrain import Config, Datum, Engine, SamplingParams, load_config, weigh
from vllm_rollouts import Draw, drawing

SETTINGS = [
    "run.dir=runs/grpo",
    "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 256, num_attention_heads: 4, vocab_size: 12}",
    "train={global_batch_size: 256, micro_batch_size: 64, num_steps: 70, precision: fp32}",
    "optimizer={kind: muon, lr: 3.0e-3, schedule: constant, weight_decay: 0.0}",
    "loss={function: ppo, aggregation: token-mean}",  # GRPO, with the advantages below
    "data={kind: mock, seq_length: 5}",  # the samples come from this program
]
PLUS, EQUALS, GROUP_SIZE, WARM_UP_STEPS, COUNTS = 10, 11, 8, 15, [0, 0, 0, 0, 1, 1]
SUMS = [[first, PLUS, second, EQUALS] for first in range(10) for second in range(10)]


def rollouts(draw: Draw, step: int) -> tuple[list[Datum], float]:
    """Draws groups of answers of two tokens; returns them with their advantages, and the mean reward."""
    asked = [each for each in random.Random(step).sample(SUMS, 32) for _ in range(GROUP_SIZE)]
    answers = draw(asked, SamplingParams(max_new_tokens=2, seed=step))
    said = [10 * answer.token_ids[0] + answer.token_ids[1] for answer in answers]
    rewards = [1 / (1 + abs(number - prompt[0] - prompt[2])) for number, prompt in zip(said, asked, strict=True)]
    data = []
    for number, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        group = rewards[number - number % GROUP_SIZE :][:GROUP_SIZE]
        advantage = (rewards[number] - mean(group)) / (pstdev(group) + 1e-4)
        old = [0.0] * 4 + answer.log_probs  # one per token; the prompt's are not read
        data.append(Datum(prompt + answer.token_ids, COUNTS, extras={"advantages": advantage, "old_logprobs": old}))
    return data, mean(rewards)


def train(config: Config) -> list[float]:
    """Returns the mean reward of each step, after some supervised steps that make answers worth comparing."""
    found = []
    with Engine(config) as engine, drawing(engine) as draw:
        for step in range(config.train.num_steps):
            if step < WARM_UP_STEPS:
                shown = random.Random(step).choices(SUMS, k=64)
                right = [Datum([*each, *divmod(each[0] + each[2], 10)], COUNTS) for each in shown]
                engine.forward_backward(right, lambda given: weigh(given.logits.cross_entropy(given.labels), given))
            else:
                data, reward = rollouts(draw, step)
                engine.forward_backward(data)
                found.append(reward)
                if engine.rank == 0:
                    print(f"step {step + 1}  reward {reward:.6f}", flush=True)
            engine.optim_step()
    return found


if __name__ == "__main__":
    train(load_config([], SETTINGS + sys.argv[1:]))

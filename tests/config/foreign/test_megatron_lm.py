"""Arguments of Megatron-LM: every one has a place, and each that is translated shows in the configuration."""

import random

import pytest
import yaml

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.foreign.megatron_arguments import FLAGS, REFUSED, TRANSLATED, WITHOUT_EFFECT
from mtrain.config.foreign.megatron_lm import from_megatron_lm
from mtrain.hf.configuration import resolved
from tests.messages import refuses

BASE = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --seq-length 8192 --position-embedding-type rope --vocab-size 128256 "
    "--micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 3e-4 --data-path c4 --save runs/x"
)
LLAMA = (
    f"{BASE} --tensor-model-parallel-size 2 --sequence-parallel --group-query-attention --num-query-groups 8 "
    "--rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear --lr-decay-style cosine "
    "--untie-embeddings-and-output-weights --min-lr 3e-5 --lr-warmup-fraction 0.01 --attention-dropout 0 "
    "--hidden-dropout 0 --bf16 --split 99,1,0 --eval-interval 100 --eval-iters 10 --save-interval 500 --use-flash-attn"
)
EXAMPLES = {
    "add-qkv-bias": "",
    "apply-layernorm-1p": "",
    "async-save": "",
    "attention-output-gate": "",
    "calculate-per-token-loss": "",
    "cp-comm-type": "a2a --context-parallel-size 2",
    "deterministic-mode": "",
    "eval-iters": "3 --eval-interval 10",
    "experimental-attention-variant": "gated_delta_net --linear-attention-freq 4",
    "finetune": "--load other",
    "fp8-recipe": "tensorwise --fp8-format hybrid",
    "initial-loss-scale": "1024 --fp16",
    "lr-decay-samples": "1280",
    "lr-warmup-samples": "1280",
    "lr-wsd-decay-iters": "10 --lr-decay-style WSD",
    "lr-wsd-decay-samples": "1280 --lr-decay-style WSD",
    "lr-wsd-decay-style": "linear --lr-decay-style WSD",
    "moe-aux-loss-coeff": "0.01 --num-experts 8 --moe-router-load-balancing-type seq_aux_loss",
    "moe-layer-freq": "([0]*1+[1]*31) --num-experts 8",
    "moe-router-bias-update-rate": "0.01 --num-experts 8 --moe-router-enable-expert-bias",
    "moe-router-load-balancing-type": "sinkhorn --num-experts 8",
    "moe-token-dispatcher-type": "alltoall --num-experts 8",
    "mscale": "0.7 --position-embedding-type yarn",
    "mscale-all-dim": "0.7 --position-embedding-type yarn",
    "no-bias-gelu-fusion": "",
    "no-rope-freq": "4",
    "normalization": "RMSNorm",
    "num-layers-per-virtual-pipeline-stage": "4 --pipeline-model-parallel-size 4",
    "num-query-groups": "8 --group-query-attention",
    "openai-gelu": "--disable-bias-linear",
    "optimizer": "sgd",
    "position-embedding-type": "learned_absolute",
    "pretrained-checkpoint": "origin",
    "profile-ranks": "0 1 --profile",
    "profile-step-end": "30 --profile",
    "profile-step-start": "3 --profile",
    "reset-attention-mask": "--reset-position-ids",
    "reset-position-ids": "",
    "recompute-method": "block --recompute-granularity full --recompute-num-layers 2",
    "recompute-modules": "core_attn mla_up_proj --recompute-granularity selective",
    "recompute-num-layers": "2 --recompute-granularity full --recompute-method block",
    "rope-scaling-factor": "4 --use-rope-scaling",
    "rotary-seq-len-interpolation-factor": "2",
    "rotary-scaling-factor": "40",
    "softmax-type": "learnable",
    "split": "90,5,5",
    "tokenizer-type": "GPT2BPETokenizer",
    "train-samples": "128000",
    "transformer-impl": "local",
    "use-rotary-position-embeddings": "--position-embedding-type learned_absolute",
    "window-attn-skip-freq": "4 --window-size 127,0",
    "window-size": "127,0",
    "yarn-beta-fast": "16 --position-embedding-type yarn",
    "yarn-beta-slow": "2 --position-embedding-type yarn",
    "yarn-original-max-position-embeddings": "4096 --position-embedding-type yarn",
}
"""Values of arguments for which 2 and what is given besides would change nothing."""
WITH_EXPERTS = {"expert-tensor-parallel-size", "expert-model-parallel-size", "num-experts"}


def lines(text: str) -> list[str]:
    return list(from_megatron_lm(text.split()).checked(resolved).lines())


def told(text: str) -> tuple[object, ...]:
    """Returns all that a translation says, before it is checked: drawn arguments may contradict each other."""
    found = from_megatron_lm(text.split())
    return found.content, found.origins, found.lost, found.notes, sorted(found.without_effect), sorted(found.wrong)


def example(name: str) -> str:
    if name in EXAMPLES:
        return f"--{name} {EXAMPLES[name]}"
    if name.startswith("moe-") or name in WITH_EXPERTS:
        return f"--{name} {'' if name in FLAGS else 2} {'' if name == 'num-experts' else '--num-experts 8'}"
    if name in ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"):
        return f"--{name} 2 --multi-latent-attention"
    if name.startswith("linear-"):
        return f"--{name} 2 --experimental-attention-variant gated_delta_net"
    return f"--{name}" if name in FLAGS else f"--{name} 3"


@pytest.mark.parametrize("name", sorted(TRANSLATED))
def test_each_argument_shows_in_the_translation(name: str) -> None:
    """What is given besides the argument is in both texts, so the argument itself makes the difference."""
    given, *others = example(name).split(" --")
    without = " ".join([BASE, *(f"--{each}" for each in others)])
    assert told(f"{without} {given}") != told(without)


@pytest.mark.parametrize("seed", range(12))
def test_no_argument_of_a_drawn_start_is_dropped(seed: int) -> None:
    """Each argument, whatever is given with it, makes a difference to the text."""
    drawn = random.Random(seed)
    given = {name: example(name).split(" --")[0] for name in drawn.sample(sorted(TRANSLATED), 25)}
    whole = told(" ".join([BASE, *given.values()]))
    silent = [
        name for name in given if told(" ".join([BASE, *(given[each] for each in given if each != name)])) == whole
    ]
    assert silent == []


def test_an_argument_is_translated_or_refused_or_without_effect() -> None:
    assert not TRANSLATED & REFUSED
    assert not TRANSLATED & WITHOUT_EFFECT
    assert not REFUSED & WITHOUT_EFFECT
    assert len(TRANSLATED | REFUSED | WITHOUT_EFFECT) == 876, "arguments of August 2026, with their other spellings"
    found = from_megatron_lm(f"{BASE} --squared-relu --log-throughput".split())
    assert any(line.startswith("--squared-relu: it changes training") for line in found.lost)
    assert found.without_effect == ["--log-throughput"]


def test_a_usual_start_becomes_a_configuration() -> None:
    found = from_megatron_lm(LLAMA.split()).checked(resolved)
    assert found.missing == []
    assert found.lost == []
    config = Config.model_validate(yaml.safe_load("\n".join(found.lines())))
    assert config.layout.tp == 2
    assert config.layout.sp
    model = config.model
    assert (model.num_layers, model.query_groups, model.activation, model.norm) == (32, 8, "swiglu", "rmsnorm")
    assert (model.rope.base, model.tied_embeddings, model.linear_bias) == (500000, False, False)
    optimizer = config.optimizer
    assert (optimizer.warmup_steps, optimizer.weight_decay, optimizer.schedule) == (10, 0.01, "cosine")
    assert config.valid.max_samples == 1280
    assert config.checkpoint.keep_every_steps == 500
    assert any("--calculate-per-token-loss" in line for line in found.notes)


def test_defaults_that_differ_are_written_out() -> None:
    text = "\n".join(lines(BASE))
    for line in (
        'norm: "layernorm"',
        "linear_bias: true",
        'activation: "gelu_tanh"',
        "tied_embeddings: true",
        "hidden_dropout: 0.1",
        "weight_decay: 0.01",
        "beta2: 0.999",
        'schedule: "linear"',
        "distributed_optimizer: false",
    ):
        assert f"  {line}  # " in text, line


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ("--tensor-model-paralel-size 2", "--tensor-model-parallel-size"),
        ("--num-layers", "--num-layers"),
        ("--num-layers a", "--num-layers"),
        ("--num-layers 4 --pipeline-model-parallel-size 0 --num-layers-per-virtual-pipeline-stage 1", "pipeline-model"),
        ("--num-layers 4 --num-layers-per-virtual-pipeline-stage 0", "--num-layers-per-virtual-pipeline-stage"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size"),
        ("--context-parallel-size 0", "--context-parallel-size"),
        ("num_layers=2", "num_layers=2"),
    ],
)
def test_what_is_no_argument_is_named(given: str, fact: str) -> None:
    with refuses(ConfigError, fact):
        from_megatron_lm(given.split()).checked(resolved)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Ettt|(tt|)*2,tL", [3, 2, 2, 1]),
        ("Et*2|t*2|t*3|tmL", [2, 2, 3, 1]),
        ("Et*3|(tt|)*2,m|L", None),
        ("E|t*4|t*4|L", None),
        ("Et*4|t*3L|t", None),
    ],
)
def test_stages_of_a_pipeline(text: str, layers: list[int] | None) -> None:
    """A stage without layers, as DeepSeek-V3's last ones, is no stage here."""
    words = f"{BASE} --num-layers 8 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {text}"
    if layers is None:
        with refuses(ConfigError, "--pipeline-model-parallel-layout"):
            from_megatron_lm(words.split()).checked(resolved)
        return
    found = from_megatron_lm(words.split()).checked(resolved)
    assert (found.get("layout.stage_layers"), found.get("layout.vpp")) == (layers, 2)
    assert "--pipeline-model-parallel-layout" in found.carried()


def test_conversations_are_separate_anyway() -> None:
    words = f"{BASE} --sft --data-path chat.jsonl --reset-position-ids --reset-attention-mask"
    found = from_megatron_lm(words.split()).checked(resolved)
    assert found.get("data.isolate_documents") is None
    assert {"--reset-position-ids", "--reset-attention-mask"} <= set(found.without_effect)


def test_modules_that_are_not_recomputed_here_are_no_reason_to_refuse() -> None:
    words = f"{BASE} --recompute-granularity selective --recompute-modules mla_up_proj"
    found = from_megatron_lm(words.split()).checked(resolved)
    assert (found.get("train.recompute"), found.get("train.recompute_modules")) == ("selective", None)
    assert any("mla_up_proj" in line for line in found.lost)

"""Examples of verbs, for their help and docs/reference/cli.md."""

EXAMPLES = {
    "init": "mtrain init my-runs",
    "plan": "mtrain plan configs/model/qwen3_32b.yaml --gpus 64 --seq-length 8192 --global-batch-size 128",
    "config": "mtrain config train.num_epochs optimizer.warmup_ratio",
    "check": (
        "mtrain check configs/model/llama3.2_1b.yaml configs/layout/tp2sp.yaml configs/run/pretrain.yaml "
        "--world-size 8 --without-files"
    ),
    "train": "mtrain train configs/model/tiny.yaml configs/run/pretrain.yaml run.dir=runs/first train.precision=fp32",
    "launch local": (
        "mtrain launch local -n 8 configs/model/llama3.2_1b.yaml configs/layout/tp2sp.yaml configs/run/pretrain.yaml"
    ),
    "launch slurm": (
        "mtrain launch slurm configs/model/llama3_8b.yaml configs/start/llama3_8b_pretrain.yaml --nodes 4 "
        "--gpus-per-node 8"
    ),
    "launch kubernetes": (
        "mtrain launch kubernetes configs/model/llama3_8b.yaml configs/start/llama3_8b_pretrain.yaml "
        "run.dir=/runs/first --nodes 4 --gpus-per-node 8 --image registry.example/mtrain:1 --volume runs:/runs"
    ),
    "launch torchrun": (
        "mtrain launch torchrun configs/model/llama3_8b.yaml configs/start/llama3_8b_pretrain.yaml --nodes 4 "
        "--gpus-per-node 8 --first-node gpu-1"
    ),
    "status": "mtrain status runs --watch",
    "report": "mtrain report runs/first",
    "plot": "mtrain plot runs/first runs/second --output losses.png",
    "compare": "mtrain compare runs/first runs/second --rtol 1e-5",
    "verify parity": (
        "mtrain verify parity configs/model/qwen3_8b.yaml configs/layout/tp4cp2.yaml configs/run/pretrain.yaml"
    ),
    "verify resume": (
        "mtrain verify resume configs/model/qwen3_8b.yaml configs/layout/tp4cp2.yaml configs/run/pretrain.yaml"
    ),
    "verify preempt": (
        "mtrain verify preempt configs/model/qwen3_8b.yaml configs/layout/tp2sp.yaml configs/run/pretrain.yaml"
    ),
    "verify hf": "mtrain verify hf configs/run/finetune.yaml --hf models/qwen3-8b --steps 5 --layouts tp2,pp2",
    "verify rollout": "mtrain verify rollout runs/grpo --rollouts rollouts.jsonl",
    "verify machine": "mtrain verify machine --output machine",
    "verify backend": "mtrain verify backend configs/model/qwen3_8b.yaml configs/run/pretrain.yaml",
    "show-batch": "mtrain show-batch configs/run/finetune.yaml model.hf=models/qwen3-8b --step 3 --html page.html",
    "from megatron-lm": (
        "mtrain from megatron-lm --output mine.yaml --num-layers 32 --hidden-size 4096 --train-iters 1000"
    ),
    "from ms-swift": "mtrain from ms-swift --output mine.yaml --model models/qwen3-8b --dataset data/chat.jsonl",
    "from axolotl": "mtrain from axolotl config.yml --output mine.yaml",
    "from verl": "mtrain from verl --output mine.yaml sft.yaml optim.lr=1e-5",
    "stdlib-corpus": "mtrain stdlib-corpus --output data",
    "train-tokenizer": "mtrain train-tokenizer data --output data/my.model --vocab-size 32000",
    "tokenize": "mtrain tokenize data --tokenizer data/my.model --output-prefix data/corpus --workers 8",
    "convert import": "mtrain convert import --hf models/llama --out ckpt/llama --check-logits",
    "convert export": "mtrain convert export --checkpoint runs/second --out exported",
    "convert verify": "mtrain convert verify --checkpoint ckpt/llama --hf models/llama",
    "convert inspect": "mtrain convert inspect models/llama",
    "inspect show": "mtrain inspect show runs/first",
    "inspect diff": "mtrain inspect diff runs/first runs/second --worst 10",
    "inspect verify": "mtrain inspect verify runs/first",
    "inspect data": "mtrain inspect data runs/first --step 100",
    "generate": "mtrain generate runs/chat --chat --prompt 'Who are you?'",
    "serve": "mtrain serve configs/run/lora.yaml model.hf=models/qwen3-8b data.tokenizer=models/qwen3-8b --port 8000",
}
"""Verb or subcommand -> a shell line that calls it."""

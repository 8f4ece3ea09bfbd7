"""mtrain: layout-exact pretraining and finetuning of language models on Megatron-Core."""

__version__ = "0.1.0"

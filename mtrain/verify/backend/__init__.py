"""Check `mtrain verify backend`: layers of other libraries compared with ours and the reference, on this machine."""

import torch

from mtrain.base.imports import settle_gpu_packages

# before megatron-core is imported, here and in the ranks: a certificate covers versions that runs would refuse
settle_gpu_packages(torch.cuda.is_available(), takes_any_version=True)

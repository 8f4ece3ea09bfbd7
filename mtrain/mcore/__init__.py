"""The only package that imports megatron-core.

The CPU emulation has to be in place before megatron-core is first imported, so it is installed here.
"""

import warnings

from mtrain.mcore import cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core warns at import about each optional package that is missing
    cpu.install()

"""Switches of torch for attention kernels.

They are named after CUDA and work without it: they choose between the CPU's kernels too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Whether a kernel is allowed, and what allows it. A step reads them several times a visit: these
# are what torch.backends.cuda.flash_sdp_enabled and the like call, without the call between.
# Private: tests/accelerator/test_accelerators.py fails when they change.
ATTENTION_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch._C._get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch._C._get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch._C._get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)

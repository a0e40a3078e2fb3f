"""torch's switches for attention kernels.

The switches are named after CUDA, but they also choose between the CPU's kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# One pair per kernel: reads whether the kernel is allowed, and sets it. A step reads them several
# times per visit, so the readers are the private functions behind
# torch.backends.cuda.flash_sdp_enabled and the like, which saves a call.
# tests/accelerator/test_accelerators.py fails when they change.
ATTENTION_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch._C._get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch._C._get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch._C._get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)

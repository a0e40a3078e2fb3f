"""CUDA devices without a GPU: real ``cuda`` tensors in host memory, and a checker of their order.

::

    import simulated_cuda

    simulated_cuda.start(devices=2)      # before the first `import torch`
    import torch

    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        y = x * 2                        # does not wait for the stream that fills x
    print(simulated_cuda.findings())     # ["race: the read by aten::mul ..."]

It fills the empty CUDA places of torch's CPU build, so that programs run as they are: streams,
events, pinned memory, autocast, ``GradScaler``, Lightning's ``accelerator="gpu"`` and the process
group "nccl". Kernels run at once, on the CPU. README.md beside this package says what is checked
and what is not.
"""

from simulated_cuda.build import Unavailable
from simulated_cuda.device import (
    clear,
    findings,
    kernels,
    launches,
    set_capacity,
    set_denials,
    start,
    unavailable,
    waits,
)

__all__ = [
    "Unavailable",
    "clear",
    "findings",
    "kernels",
    "launches",
    "set_capacity",
    "set_denials",
    "start",
    "unavailable",
    "waits",
]

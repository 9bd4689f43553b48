"""A Triton kernel that does nothing: what one launch costs on the host. Imported where Triton is needed anyway."""

import triton
import triton.language as tl


@triton.jit
def empty_kernel(pointer, BLOCK: tl.constexpr):
    pass

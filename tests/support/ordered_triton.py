"""A pytest plugin for bit-for-bit tests in Triton's interpreter, loaded after `interpreted_triton`.

A product's elements are added column by column, because a GPU's matrix instructions keep one order.
numpy leaves the order to its BLAS library, which chooses it by the shape of the block.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _wide(builder, x):
    return (x if x.dtype.scalar == tl.float32 else builder.cast_impl(x, tl.float32)).data


def _dot_in_order(self, a, b, d, *args):
    left, right = _wide(self, a), _wide(self, b)
    # Along the outermost axis numpy adds one slab after another.
    steps = np.empty((len(right) + 1, *d.data.shape), dtype=np.float32)
    steps[0] = d.data
    np.multiply(left.T[:, :, None], right[:, None, :], out=steps[1:])
    return interpreter.TensorHandle(np.add.reduce(steps, axis=0), d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot_in_order

"""A pytest plugin for bit-exact tests in Triton's interpreter; load it after `interpreted_triton`.

It adds the elements of a matrix product column by column. A GPU's matrix instructions always use
the same order. numpy's order depends on its BLAS library and on the shape of the block.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _wide(builder, x):
    return (x if x.dtype.scalar == tl.float32 else builder.cast_impl(x, tl.float32)).data


def _dot_in_order(self, a, b, d, *args):
    left, right = _wide(self, a), _wide(self, b)
    # numpy adds along the outermost axis in order, one slab after the other.
    steps = np.empty((len(right) + 1, *d.data.shape), dtype=np.float32)
    steps[0] = d.data
    np.multiply(left.T[:, :, None], right[:, None, :], out=steps[1:])
    return interpreter.TensorHandle(np.add.reduce(steps, axis=0), d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot_in_order

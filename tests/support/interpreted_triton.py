"""A pytest plugin for runs with TRITON_INTERPRET=1 that fixes eight faults of the interpreter.

- It multiplies bfloat16 matrices as if their bits were integers.
- It truncates float32 to bfloat16. A GPU rounds to nearest, ties to even.
- It truncates float32 to E4M3 in the same way.
- If a scalar condition is combined with a mask, the mask becomes integers, which loads and stores
  refuse.
- Up to Triton 3.6, the bound of a loop stays an array, which newer numpy does not accept as a
  number.
- It patches its functions into the whole language at every call of a device function, which takes
  a third of the time. Once per launch is enough.
- It computes every sum and product of integers a second time, in 64 bits, to find overflows of 32
  bits. Only a debugger shows them (`TritonSemantic.device_assert`). This takes another third.
- It computes shape, size and name of a type again for each of a hundred thousand values, a third of
  the remaining time.
"""

import dataclasses

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder


def _in_place_of(owner, name):
    """Return a decorator that replaces a function; the new function gets the original one first."""

    def put(mended):
        theirs = getattr(owner, name)
        setattr(owner, name, lambda *args, **named: mended(theirs, *args, **named))
        return mended

    return put


@_in_place_of(interpreter, "_convert_float")
def _convert_rounded(theirs, values, input_dtype, output_dtype, rounding_mode):
    if input_dtype == tl.float32 and output_dtype == tl.bfloat16:
        wide = torch.from_numpy(np.array(values, dtype=np.float32))
        return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
    if input_dtype == tl.float32 and output_dtype == tl.float8e4nv:
        wide = torch.from_numpy(np.array(values, dtype=np.float32))
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)
    if input_dtype == tl.bfloat16 and output_dtype == tl.float32:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return theirs(values, input_dtype, output_dtype, rounding_mode)


@_in_place_of(_Builder, "create_masked_load")
def _load_with_boolean_mask(theirs, builder, pointers, mask, *args, **named):
    mask.data = mask.data.astype(bool)
    return theirs(builder, pointers, mask, *args, **named)


@_in_place_of(_Builder, "create_masked_store")
def _store_with_boolean_mask(theirs, builder, pointers, values, mask, *args, **named):
    mask.data = mask.data.astype(bool)
    return theirs(builder, pointers, values, mask, *args, **named)


@_in_place_of(_Builder, "create_dot")
def _dot(theirs, builder, a, b, *args):
    a, b = (
        builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
    )
    return theirs(builder, a, b, *args)


@_in_place_of(interpreter, "_patch_lang_tensor")
def _patch_tensor(theirs, tensor, scope):
    theirs(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patched = []


@_in_place_of(interpreter, "_patch_lang")
def _patch_once(theirs, fn):
    seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    if seen in _patched:
        return interpreter._LangPatchScope()
    _patched.append(seen)
    return theirs(fn)


@_in_place_of(interpreter.GridExecutor, "__call__")
def _launch_patched(theirs, executor, *args, **named):
    _patched.clear()
    return theirs(executor, *args, **named)


_blocks, _tensors, _np_dtypes = {}, {}, {}


@_in_place_of(tl.block_type, "__init__")
def _init_block_once(theirs, block, element_ty, shape):
    key = element_ty.name, tuple(shape)
    if key not in _blocks:
        theirs(block, element_ty, shape)
        _blocks[key] = dict(vars(block))
    vars(block).update(_blocks[key])
    block.element_ty = element_ty


@_in_place_of(tl.tensor, "__init__")
def _init_tensor_once(theirs, tensor, handle, type):
    if type.name not in _tensors:
        theirs(tensor, handle, type)
        _tensors[type.name] = {key: vars(tensor)[key] for key in ("shape", "numel")}
    vars(tensor).update(_tensors[type.name])
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar


@_in_place_of(interpreter, "_get_np_dtype")
def _np_dtype_once(theirs, triton_dtype):
    name = triton_dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = theirs(triton_dtype)
    return _np_dtypes[name]


_options = interpreter.interpreter_builder.options
interpreter.interpreter_builder.options = dataclasses.replace(_options, sanitize_overflow=False)
torch.set_num_threads(1)

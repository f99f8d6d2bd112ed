"""A pytest plugin for runs with TRITON_INTERPRET=1: mends seven slips of Triton's interpreter.

- It multiplies the bits of bfloat16 matrices as if they were integers.
- It cuts float32 off where a GPU rounds to nearest, ties to even, when it makes a bfloat16.
- A scalar condition that joins a mask turns it into integers, which loads and stores refuse.
- Up to Triton 3.6 a bound of a loop stays an array, which newer numpy does not take for a number.
- It puts its own functions into the whole language again at every call of a device function, which
  takes a third of the time; once a launch is enough.
- It computes every sum and product of integers a second time, in 64 bits, to find those that leave
  32, and tells nobody but a debugger (`TritonSemantic.device_assert`): another third.
- It works out shape, size and name of a type again for each of a hundred thousand values: a third
  of what is left.
"""

import dataclasses

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


def _convert_rounded(values, input_dtype, output_dtype, rounding_mode):
    if input_dtype == tl.float32 and output_dtype == tl.bfloat16:
        wide = torch.from_numpy(np.array(values, dtype=np.float32))
        return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
    if input_dtype == tl.bfloat16 and output_dtype == tl.float32:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _convert_float(values, input_dtype, output_dtype, rounding_mode)


def _with_boolean_mask(access, mask_at):
    def masked(self, *args, **named):
        mask = args[mask_at]
        mask.data = mask.data.astype(bool)
        return access(self, *args, **named)

    return masked


def _dot(self, a, b, *args):
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *args)


def _patch_tensor(tensor, scope):
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patched = []


def _patch_once(fn):
    seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    if seen in _patched:
        return interpreter._LangPatchScope()
    _patched.append(seen)
    return _patch_lang(fn)


def _launch_patched(self, *args, **kwargs):
    _patched.clear()
    return _launch(self, *args, **kwargs)


_blocks, _tensors, _np_dtypes = {}, {}, {}


def _init_block_once(self, element_ty, shape):
    key = element_ty.name, tuple(shape)
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        _blocks[key] = dict(vars(self))
    vars(self).update(_blocks[key])
    self.element_ty = element_ty


def _init_tensor_once(self, handle, type):
    if type.name not in _tensors:
        _init_tensor(self, handle, type)
        _tensors[type.name] = dict(vars(self))
    vars(self).update(_tensors[type.name])
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _np_dtype_once(triton_dtype):
    name = triton_dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(triton_dtype)
    return _np_dtypes[name]


_Builder = interpreter.InterpreterBuilder
interpreter._convert_float = _convert_rounded
_options = interpreter.interpreter_builder.options
interpreter.interpreter_builder.options = dataclasses.replace(_options, sanitize_overflow=False)
_patch_lang_tensor, interpreter._patch_lang_tensor = interpreter._patch_lang_tensor, _patch_tensor
_patch_lang, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
interpreter._patch_lang = _patch_once
interpreter.GridExecutor.__call__ = _launch_patched
_init_block, tl.block_type.__init__ = tl.block_type.__init__, _init_block_once
_init_tensor, tl.tensor.__init__ = tl.tensor.__init__, _init_tensor_once
_get_np_dtype, interpreter._get_np_dtype = interpreter._get_np_dtype, _np_dtype_once
_create_dot = _Builder.create_dot
_Builder.create_dot = _dot
_Builder.create_masked_load = _with_boolean_mask(_Builder.create_masked_load, 1)
_Builder.create_masked_store = _with_boolean_mask(_Builder.create_masked_store, 2)
torch.set_num_threads(1)

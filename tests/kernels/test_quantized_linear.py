"""Products with stored forms, against `gguf`'s own dequantization and float64."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.quantized_linear import (
    FORMS,
    QUANTIZED_LINEAR,
    StoredMatrix,
    dequantize,
    look_up,
    pack,
)
from kernels.quantized_linear.encode import encode

BLOCK_FORMS = [name for name in FORMS if name not in ("f32", "f16", "bf16")]


def stored_matrix(form: str, out_features: int, in_features: int, seed: int = 0) -> StoredMatrix:
    """Any bits at all, but for scales, which are finite and of a usual size."""
    generator = np.random.default_rng(seed)
    if form in ("f32", "f16", "bf16"):
        values = torch.from_numpy(generator.standard_normal((out_features, in_features)))
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[form]
        return StoredMatrix(form, values.to(dtype).view(torch.uint8))
    layout = FORMS[form]
    blocks = out_features * in_features // layout.block_values
    raw = generator.integers(0, 256, (blocks, layout.block_bytes), dtype=np.uint8)
    halves = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
    if form == "mxfp4":
        raw[:, 0] = generator.integers(120, 130, blocks)
    else:
        with_minimum = form.endswith("_1")
        for at in halves.get(form, (0, 2) if with_minimum else (0,)):
            scale = generator.uniform(-0.05, 0.05, blocks).astype(np.float16)
            raw[:, at : at + 2] = scale[:, None].view(np.uint8)
    return StoredMatrix(form, torch.from_numpy(raw.reshape(out_features, -1)))


def oracle(stored: StoredMatrix) -> Tensor:
    kind = gguf.GGMLQuantizationType[stored.form.upper()]
    return torch.from_numpy(gguf.dequantize(stored.data.numpy(), kind).astype(np.float32))


def test_the_forms_are_those_of_gguf():
    for form in FORMS.values():
        kind = gguf.GGMLQuantizationType[form.name.upper()]
        assert gguf.GGML_QUANT_SIZES[kind] == (form.block_values, form.block_bytes)


@pytest.mark.parametrize("form", FORMS)
def test_dequantized_values_are_those_of_gguf(form):
    stored = stored_matrix(form, 7, 512)
    assert torch.equal(dequantize(stored, 512), oracle(stored))


IMPLEMENTATIONS = [name for name in QUANTIZED_LINEAR if not QUANTIZED_LINEAR.unavailable(name)]
needs_library = pytest.mark.skipif("cpu" not in IMPLEMENTATIONS, reason="no C++ library here")
# Tokens: a register block and less, past it, tiles and a part of one, all in one.
TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 16, 17, 31, 64)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out_features", [1, 16, 37])
def test_what_is_packed_comes_back(name, form, out_features):
    stored = stored_matrix(form, out_features, 512)
    packed = pack([stored], 512, implementation=name)
    assert packed.forms == ((form, out_features),)
    (back,) = packed.stored()
    assert back.form == form
    assert torch.equal(back.data, stored.data)
    assert torch.equal(packed.unpack(), oracle(stored))
    other = stored_matrix(form, out_features, 512, seed=1)
    packed.repack_stored([other])
    assert torch.equal(packed.unpack(), oracle(other))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_matrix_that_is_not_packed(name, form):
    stored = stored_matrix(form, 37, 512)
    # As in a file, the rows begin at an address that is not a multiple of a number's size.
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), stored.data.flatten()])[1:]
    mapped = StoredMatrix(form, shifted.view(37, -1))
    ids = torch.tensor([36, 0, 5, 5, 17])
    assert torch.equal(look_up(mapped, 512, ids, name), oracle(stored)[ids])
    for wrong in (37, -1):
        with pytest.raises(IndexError):
            look_up(mapped, 512, torch.tensor([0, wrong]), name)


def uses_amx() -> bool:
    from kernels.quantized_linear.cpu import dots_name

    return dots_name() == "AMX bfloat16"


def rounded_rows(x: Tensor) -> Tensor:
    """What rows are rounded to: 8 bits in blocks of 32, in float64."""
    blocks = x.float().unflatten(-1, (-1, 32)).numpy()
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    steps = np.rint(blocks.astype(np.float64) * inverse.astype(np.float64))
    return torch.from_numpy(steps * (most / np.float32(127)).astype(np.float64)).flatten(-2)


def products(form: str, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """The product in float64, as rows are rounded, what its sums are usually like, and how far off
    it may be in parts of that."""
    limit = 1e-6
    if form not in BLOCK_FORMS:
        rows = x.double()
    elif uses_amx():
        rows = x.bfloat16().double()
        limit = 1e-5
    else:
        rows = rounded_rows(x)
    usual = rows.square() @ weight.double().square().T
    return rows @ weight.double().T, usual.sqrt(), limit


@needs_library
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 256), (37, 768), (130, 1280)], ids=str)
def test_products(form, dtype, shape):
    """Only rows are rounded, for blocks, and sums are float32: nothing else is lost."""
    stored = stored_matrix(form, *shape)
    weight, bias = oracle(stored), torch.randn(shape[0])
    for with_bias in (None, bias):
        packed = pack([stored], shape[1], with_bias, "cpu")
        x = torch.randn(max(TOKENS), shape[1]).to(dtype)
        whole = packed(x)
        want, usual, limit = products(form, x, weight)
        if with_bias is not None:
            want, usual = want + bias.double(), usual + bias.abs().double()
        assert whole.dtype == dtype
        if dtype is torch.bfloat16:
            limit = 4e-3
        assert (whole.double() - want).norm() < limit * usual.norm()
        # A row has the same bits in any batch.
        for tokens in TOKENS:
            assert torch.equal(packed(x[:tokens].contiguous()), whole[:tokens])


@needs_library
@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_rounding_rows_costs_little(form):
    """Against numbers that are not rounded: an error of 8 bits in blocks of 32, or of bfloat16."""
    stored = stored_matrix(form, 64, 1024)
    x = torch.randn(16, 1024)
    exact = x.double() @ oracle(stored).double().T
    error = (pack([stored], 1024)(x).double() - exact).norm()
    centred = oracle(stored) - oracle(stored).mean()
    assert error < (0.004 if uses_amx() else 0.01) * (x.double() @ centred.double().T).norm()


@needs_library
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_threads(threads, monkeypatch):
    weight = pack([stored_matrix("q4_k", 300, 512), stored_matrix("q6_k", 77, 512)], 512)
    x = torch.randn(33, 512)
    want = weight(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(weight(x), want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_parts_of_different_forms_are_one_weight(name):
    parts = [
        stored_matrix("q4_k", 37, 512, 1),
        stored_matrix("q8_0", 5, 512, 2),
        stored_matrix("bf16", 18, 512, 3),
        stored_matrix("q6_k", 64, 512, 4),
    ]
    bias = torch.randn(124)
    fused = pack(parts, 512, bias, name)
    assert (fused.out_features, fused.in_features) == (124, 512)
    weight = torch.cat([oracle(part) for part in parts])
    assert torch.equal(fused.unpack(), weight)
    ids = torch.tensor([123, 0, 36, 37, 41, 42, 59, 60, 0])
    assert torch.equal(fused.rows(ids), weight[ids])
    assert torch.equal(fused.rows(ids, torch.bfloat16), weight[ids].bfloat16())
    for tokens in (0, 1, 5, 40):
        x = torch.randn(tokens, 512)
        one_by_one = torch.cat([pack([part], 512, None, name)(x) for part in parts], dim=1)
        assert torch.allclose(fused(x), one_by_one + bias, atol=1e-3, rtol=1e-5)
        out = torch.full((tokens, 124), 7.0)
        fused.write(x, out)
        assert torch.equal(out, fused(x))
    with pytest.raises(IndexError):
        fused.rows(torch.tensor([124]))


@needs_library
@pytest.mark.parametrize("form", ["q4_0", "q4_k", "q8_0", "f16"])
def test_what_is_no_number_makes_its_own_row_none(form):
    packed = pack([stored_matrix(form, 40, 256)], 256)
    x = torch.randn(20, 256)
    clean = packed(x)
    x[3, 7], x[19, 255] = torch.nan, torch.inf
    got = packed(x)
    assert got[3].isnan().all()
    assert not got[19].isfinite().any()
    others = [row for row in range(20) if row not in (3, 19)]
    assert torch.equal(got[others], clean[others])


@needs_library
def test_rows_of_nothing_and_of_extremes():
    packed = pack([stored_matrix("q8_0", 40, 256)], 256)
    x = torch.zeros(4, 256)
    x[1] = 1e-38
    # With AMX a block is summed before it is scaled.
    x[2] = (1e34 if uses_amx() else 1e36) * torch.randn(256).sign()
    x[3, 5] = 1.0
    got = packed(x)
    assert torch.equal(got[0], torch.zeros(40))
    assert got.isfinite().all()
    assert torch.allclose(got[3], packed.unpack()[:, 5], rtol=1e-2 if uses_amx() else 1e-6)


def test_what_does_not_fit_is_refused():
    data = torch.zeros(4, 144, dtype=torch.uint8)
    for form, shape, message in (
        ("q4_k", 255, "blocks of 256"),
        ("q4_k", 512, r"uint8 \[rows, 288\]"),
        ("q9_z", 256, "no stored form 'q9_z'"),
    ):
        with pytest.raises(ValueError, match=message):
            pack([StoredMatrix(form, data)], shape)
    with pytest.raises(ValueError, match="at least one"):
        pack([], 256)
    packed = pack([StoredMatrix("q4_k", data)], 256)
    with pytest.raises(ValueError, match="do not fit"):
        packed.repack_stored([StoredMatrix("q4_k", data[:2])])
    with pytest.raises(ValueError, match="stored forms"):
        packed.repack(torch.zeros(4, 256))


def test_eight_bits_are_those_of_ggml():
    weight = torch.randn(33, 512)
    weight[3, :64] = 0
    want = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(encode(weight, "q8_0").data, torch.from_numpy(want))


@pytest.mark.parametrize(("form", "limit"), [("q8_0", 0.006), ("q4_k", 0.075)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_weights_costs_little(form, limit, dtype):
    weight = torch.randn(40, 1024).to(dtype)
    weight[7] = 0
    weight[8] = weight[8].abs()
    got = oracle(encode(weight, form, searches=True))
    assert torch.equal(got[7], torch.zeros(1024))
    errors = (got - weight.float()).norm(dim=1)[8:] / weight.float().norm(dim=1)[8:]
    assert errors.max() < limit


def test_weights_are_rounded_to_some_forms_only():
    with pytest.raises(ValueError, match="among the forms"):
        encode(torch.randn(4, 256), "q9_k")
    with pytest.raises(ValueError, match="blocks of 256"):
        encode(torch.randn(4, 96), "q4_k")

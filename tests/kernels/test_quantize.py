from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvhal.kernels import quantize
from kvhal.modes import ENCODINGS, Scaling
from tests.kernels import oracle

FP8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
ROW = ("int8", "e4m3fn", "e4m3fnuz", "int4")
F = np.float32


def boundary_values(encoding: str) -> oracle.Array:
    """Every code's value, every midpoint, their fp32 neighbours, subnormals, zeros and overflow, both signs."""
    codes = np.arange(256, dtype=np.uint8).view(oracle.TYPES[encoding]).astype(F)
    finite = np.unique(np.abs(codes[np.isfinite(codes)]))
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(F)
    tiny = np.array([0.0, 1e-45, 1e-42, 1e-38, 1e-30], dtype=F)
    huge = np.array([127, 128, 240, 241, 248, 249, 256, 447, 448, 464, 465, 1e4, 57344, 61440, 65504, 1e9, 3e38], F)
    near = [np.nextafter(points, F(np.inf)), np.nextafter(points, F(-np.inf))]
    values = np.concatenate([points, *near, tiny, huge])
    return np.concatenate([values, -values])


@pytest.mark.parametrize("encoding", FP8)
def test_all_codes_decode_as_ml_dtypes_does(encoding: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    right = codes.numpy().view(oracle.TYPES[encoding]).astype(F)
    found = quantize.decode(codes, ENCODINGS[encoding]).numpy()
    assert np.array_equal(np.isnan(found), np.isnan(right))
    assert np.array_equal(found.view(np.uint32)[~np.isnan(right)], right.view(np.uint32)[~np.isnan(right)])


def test_int_codes_decode_to_their_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(quantize.decode(codes, ENCODINGS["int8"]), codes.view(torch.int8).float())
    both = quantize.decode(codes.view(-1, 1), ENCODINGS["int4"])
    assert torch.equal(both, torch.stack([codes % 16, codes // 16], 1).float())


@pytest.mark.parametrize("scale", [1.0, 0.037, 2.0**-126, 2.0**120])
@pytest.mark.parametrize("encoding", FP8)
def test_static_codes_are_bit_exact_at_every_boundary(encoding: str, scale: float) -> None:
    random = np.random.default_rng(7)
    bits = random.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(F)
    with np.errstate(over="ignore"):
        values = np.concatenate([boundary_values(encoding) * F(scale), boundary_values(encoding), bits]).astype(F)
        values = values[np.isfinite(values)]
        y = (values * (F(1.0) / F(scale))).astype(F)
    right = oracle.cast(y, encoding, ENCODINGS[encoding].qmax)
    found = quantize.quantize_static(torch.from_numpy(values).view(1, -1), scale, ENCODINGS[encoding])
    assert np.array_equal(found.numpy()[0], right)


@pytest.mark.parametrize("encoding", FP8)
def test_static_nan_and_infinity_become_the_canonical_nan_alone(encoding: str) -> None:
    negative_nan = torch.tensor([0xFFC00001 - 2**32], dtype=torch.int32).view(torch.float32).item()
    x = torch.tensor([[1.0, math.nan, math.inf, -math.inf, negative_nan, -0.0, -1e-30, 1.0]])
    codes = quantize.quantize_static(x, 1.0, ENCODINGS[encoding])[0].tolist()
    nan = 0x80 if encoding.endswith("uz") else 0x7F
    negative_zero = 0x00 if encoding.endswith("uz") else 0x80
    assert codes[1:7] == [nan] * 4 + [negative_zero] * 2
    assert codes[0] == codes[7] == int(np.array(1.0, F).astype(oracle.TYPES[encoding]).view(np.uint8))


def test_out_of_range_values_clamp_before_the_cast() -> None:
    k = [127, 128, 240, 241, 248, 249, 256, 447, 448, 464, 465, 1e4, math.inf, math.nan]
    x = torch.tensor([k + [-value for value in k]])
    fn = quantize.quantize_static(x, 1.0, ENCODINGS["e4m3fn"])[0].tolist()
    assert fn[:14] == [0x70, 0x70, 0x77, 0x77, 0x78, 0x78, 0x78, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7F, 0x7F]
    fnuz = quantize.quantize_static(x, 1.0, ENCODINGS["e4m3fnuz"])[0].tolist()
    assert fnuz[:14] == [0x78, 0x78] + [0x7E] * 10 + [0x80, 0x80]
    assert fn[14:26] == [c | 0x80 for c in fn[:12]]
    assert fnuz[14:26] == [c | 0x80 for c in fnuz[:12]]


@pytest.mark.parametrize("dim", [8, 80, 96, 112, 192])
@pytest.mark.parametrize("encoding", ROW)
def test_rows_are_bit_exact_at_every_amplitude(encoding: str, dim: int) -> None:
    random = np.random.default_rng(dim)
    amplitude = np.exp2(random.integers(-149, 122, (400, 1)).astype(np.float64))
    x = (random.standard_normal((400, dim)) * amplitude).astype(F)
    x[::3] = x[::3] + np.abs(x[::3]).max(-1, keepdims=True) * F(3)
    x[1::7, : dim // 2] = 0
    right_codes, right_words = oracle.quantize_rows(x, encoding)
    codes, words = quantize.quantize_rows(torch.from_numpy(x), ENCODINGS[encoding])
    assert np.array_equal(codes.numpy(), right_codes)
    assert np.array_equal(words.numpy().view(np.uint32), right_words)


@given(
    row=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8),
    encoding=st.sampled_from(ROW),
)
@settings(max_examples=300, deadline=None)
@example(row=[0.0] * 7 + [3.3895315920756315e38], encoding="int4")
@example(row=[2.0**127, -(2.0**127)] * 4, encoding="int4")
def test_any_row_is_bit_exact(row: list[float], encoding: str) -> None:
    x = np.array([row], F)
    right_codes, right_words = oracle.quantize_rows(x + F(0), encoding)
    codes, words = quantize.quantize_rows(torch.from_numpy(x + F(0)), ENCODINGS[encoding])
    assert np.array_equal(codes.numpy(), right_codes)
    assert np.array_equal(words.numpy().view(np.uint32), right_words)
    found = quantize.dequantize_rows(codes, words, ENCODINGS[encoding])
    assert bool(found.isfinite().all()) or np.abs(x).max() > 2.0**127


@pytest.mark.parametrize("encoding", ROW)
def test_a_row_with_nan_or_infinity_reads_back_as_nan_and_spares_its_neighbours(encoding: str) -> None:
    x = torch.randn(6, 32)
    x[1, 3], x[2, 4], x[4, 31] = math.nan, math.inf, -math.inf
    clean = x.clone()
    clean[[1, 2, 4]] = 1.0
    codes, words = quantize.quantize_rows(x, ENCODINGS[encoding])
    right_codes, right_words = quantize.quantize_rows(clean, ENCODINGS[encoding])
    good = [0, 3, 5]
    assert torch.equal(codes[good], right_codes[good])
    assert torch.equal(words[good].view(torch.int32), right_words[good].view(torch.int32))
    assert not codes[[1, 2, 4]].any()
    nan = 0x7FC07E00 if encoding == "int4" else 0x7FC00000
    assert words.view(torch.int32)[[1, 2, 4]].tolist() == [nan] * 3
    values = quantize.dequantize_rows(codes, words, ENCODINGS[encoding])
    assert bool(values[[1, 2, 4]].isnan().all())
    assert bool(values[good].isfinite().all())


def test_int8_rounds_to_nearest_even() -> None:
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([127, 0.6, -0.6, 1.5, 2.5, -1.5])
    codes, words = quantize.quantize_rows(x, ENCODINGS["int8"])
    assert codes.view(torch.int8)[0, :6].tolist() == [127, 1, -1, 2, 2, -2]
    assert words.tolist() == [1.0]


@pytest.mark.parametrize("low", [5.0, -6.0])
@pytest.mark.parametrize("dim", [80, 96, 112, 192])
def test_dead_lanes_never_enter_the_range_of_int4(dim: int, low: float) -> None:
    x = torch.rand(64, dim) + low
    codes, words = quantize.quantize_rows(x, ENCODINGS["int4"])
    scale, _ = quantize.row_scales(words, ENCODINGS["int4"])
    assert float(scale.max()) <= 1 / 15 * 1.01
    error = (quantize.dequantize_rows(codes, words, ENCODINGS["int4"]) - x).abs()
    # Half a step, and the zero point's own rounding: fp16 at 75 to 90 has steps of 1/16, so 1/32 of a step.
    assert float(error.max()) <= float(scale.max()) * (0.5 + 1 / 16)


@pytest.mark.parametrize("encoding", ROW)
def test_zero_tiny_and_constant_rows(encoding: str) -> None:
    x = torch.zeros(7, 32)
    x[1], x[2, 5], x[3], x[4], x[5] = 3.0, 1e-30, 1e-42, -0.0, torch.randn(32)
    codes, words = quantize.quantize_rows(x, ENCODINGS[encoding])
    scale, _ = quantize.row_scales(words, ENCODINGS[encoding])
    assert bool((scale > 0).all() & scale.isfinite().all())
    values = quantize.dequantize_rows(codes, words, ENCODINGS[encoding])
    assert not values[[0, 4, 6]].any()
    step = scale * (1.0 if encoding in ("int8", "int4") else 16.0)
    assert bool(((values - x).abs() <= step[:, None]).all())


def test_a_minimum_of_minus_zero_counts_as_zero_in_int4() -> None:
    for zeros in ([0.0] * 4, [-0.0] * 4, [0.0, -0.0] * 2, [-0.0, 0.0] * 2):
        _, words = quantize.quantize_rows(torch.tensor([[*zeros, 1.0, 2.0, 3.0, 4.0]]), ENCODINGS["int4"])
        assert int(words[0]) & 0xFFFF == 0x8000


@pytest.mark.parametrize("encoding", ROW)
@pytest.mark.parametrize("power", [-80, -20, 20, 80])
def test_codes_do_not_depend_on_amplitude(encoding: str, power: int) -> None:
    x = torch.randn(64, 96)
    codes, words = quantize.quantize_rows(x, ENCODINGS[encoding])
    moved, moved_words = quantize.quantize_rows(x * 2.0**power, ENCODINGS[encoding])
    assert torch.equal(codes, moved)
    scale, _ = quantize.row_scales(words, ENCODINGS[encoding])
    moved_scale, _ = quantize.row_scales(moved_words, ENCODINGS[encoding])
    assert torch.equal(scale * 2.0**power, moved_scale)


def test_fnuz_rows_are_the_ocp_codes_with_twice_the_scale() -> None:
    x = torch.randn(256, 64) * torch.exp2(torch.randint(-40, 40, (256, 1)))
    x[:, 3] = -0.0
    fn, fn_scale = quantize.quantize_rows(x, ENCODINGS["e4m3fn"])
    fnuz, fnuz_scale = quantize.quantize_rows(x, ENCODINGS["e4m3fnuz"])
    assert bool((fn == 0x80).any())
    assert torch.equal(fnuz, fn.masked_fill(fn == 0x80, 0))
    assert torch.equal(fnuz_scale, fn_scale * 2)


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_16_bit_modes_are_the_ieee_cast_with_canonical_nans(encoding: str) -> None:
    random = np.random.default_rng(3)
    bits = random.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    edges = [0, 0x80000000, 0x3F808000, 0x3F818000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 0x7F7FFFFF]
    x = np.concatenate([bits, np.array([*edges, 0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000], np.uint32)]).view(F)
    with np.errstate(over="ignore", invalid="ignore"):
        right = x.astype(oracle.TYPES[encoding]).view(np.uint16)
    right[np.isnan(x)] = 0x7FC0 if encoding == "bfloat16" else 0x7E00
    found = quantize.encode(torch.from_numpy(x).view(-1, 1), ENCODINGS[encoding], Scaling.NONE)
    assert np.array_equal(found.codes.view(torch.int16).numpy().view(np.uint16)[:, 0], right)
    exponent = 0x7F80 if encoding == "bfloat16" else 0x7C00
    assert found.nonfinite_rows == int(((right & 0x7FFF) >= exponent).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("encoding", ROW)
def test_narrow_inputs_are_widened_first_and_left_as_they_were(encoding: str, dtype: torch.dtype) -> None:
    x = torch.randn(16, 32).to(dtype)
    before = x.clone()
    found = quantize.encode(x, ENCODINGS[encoding], Scaling.ROW)
    codes, words = oracle.quantize_rows(x.float().numpy(), encoding)
    assert found.words is not None
    assert np.array_equal(found.codes.numpy(), codes)
    assert np.array_equal(found.words.numpy().view(np.uint32), words)
    assert torch.equal(x, before)


def test_row_words_of_int4_hold_a_bfloat16_scale_and_a_float16_zero() -> None:
    _, words = quantize.quantize_rows(torch.tensor([[-1.5] * 4 + [3.0] * 4]), ENCODINGS["int4"])
    word = int(words[0])
    scale = np.array([word >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)[0]
    zero = np.array([word & 0xFFFF], np.uint16).view(np.float16).astype(np.float64)[0]
    assert 0.3 <= scale <= 0.3 * (1 + 2**-7)
    assert zero == pytest.approx(1.5 / scale, rel=2**-11)

"""Low-bit products against the weights they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends.models.linear import LowBitWeight, MixedLinear, PlainLinear, WideLinear
from backends.models.quantization import (
    EightBitWeight,
    FourBitWeight,
    can_pack,
    pack_eight_bit,
    pack_four_bit,
    quantize_to_int4,
    quantize_to_int8,
    stack_rows,
)

torch.set_num_threads(1)
FIXED = settings(max_examples=15, derandomize=True, deadline=None)


def four_bit(num_rows: int, num_inputs: int) -> FourBitWeight:
    """Scales and minima that bf16 holds exactly, so that products can be compared closely."""
    scale = torch.randint(1, 100, (num_rows, num_inputs // 32)) / 512
    return FourBitWeight(
        torch.randint(0, 16, (num_rows, num_inputs), dtype=torch.uint8), scale.half(), (-8 * scale).half()
    )


def eight_bit(num_rows: int, num_inputs: int) -> EightBitWeight:
    scale = torch.randint(1, 100, (num_rows, num_inputs // 32)) / 4096
    return EightBitWeight(torch.randint(-128, 128, (num_rows, num_inputs), dtype=torch.int8), scale.half())


def assert_same_product(packed: LowBitWeight, weight: Tensor, x: Tensor) -> None:
    expected = x.double() @ weight.double().T
    actual = packed.matmul(x)
    assert actual.dtype == torch.bfloat16
    assert (actual.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


@given(st.integers(1, 13), st.integers(1, 9), st.integers(1, 6), st.integers(0, 1000))
@FIXED
def test_packed_4_bit_products_are_those_of_the_weight(rows: int, outs: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = four_bit(16 * outs, 32 * groups)
    assert_same_product(pack_four_bit(weight), weight.dequantize(), torch.randn(rows, 32 * groups).bfloat16())


@given(st.integers(1, 13), st.integers(1, 9), st.integers(1, 6), st.integers(0, 1000))
@FIXED
def test_packed_8_bit_products_are_those_of_the_weight(rows: int, outs: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = eight_bit(16 * outs, 32 * groups)
    assert_same_product(pack_eight_bit(weight), weight.dequantize(), torch.randn(rows, 32 * groups).bfloat16())


def test_packing_more_rows_than_are_packed_at_once_keeps_every_row() -> None:
    torch.manual_seed(0)
    weight = four_bit(4096 + 64 + 16, 32)
    assert_same_product(pack_four_bit(weight), weight.dequantize(), torch.randn(2, 32).bfloat16())


def test_every_8_bit_value_survives_being_split_in_two() -> None:
    values = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(16, 16).repeat(1, 2)
    weight = EightBitWeight(values, torch.ones(16, 1).half())
    one_hot = torch.eye(32).bfloat16()
    assert torch.equal(pack_eight_bit(weight).matmul(one_hot).T.float(), values.float())


def test_stacked_weights_give_the_stacked_products() -> None:
    torch.manual_seed(0)
    parts = [four_bit(16, 64), four_bit(32, 64)]
    stacked = stack_rows(parts).dequantize()
    assert torch.equal(stacked, torch.cat([part.dequantize() for part in parts]))


def test_requantised_weights_are_within_half_a_step() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    four = quantize_to_int4(weight)
    step = four.scale.repeat_interleave(32, dim=1)
    assert ((four.dequantize() - weight).abs() <= 0.5001 * step).all()
    eight = quantize_to_int8(weight)
    # the largest weight may be cut by the rounding of its scale to bf16, by at most 2**-9 of itself
    assert ((eight.dequantize() - weight).abs() <= 0.51 * eight.scale.float()[:, None] + weight.abs() * 2**-8).all()


def test_8_bit_rows_multiply_as_they_dequantise() -> None:
    torch.manual_seed(0)
    rows = quantize_to_int8(torch.randn(48, 64))
    assert_same_product(rows, rows.dequantize(), torch.randn(5, 64).bfloat16())


def test_all_zero_weights_stay_zero() -> None:
    zero = torch.zeros(16, 32)
    assert not quantize_to_int8(zero).dequantize().any()
    assert not quantize_to_int4(zero).dequantize().any()


@pytest.mark.parametrize(("shape", "fits"), [((16, 32), True), ((8, 32), False), ((16, 48), False), ((96, 576), True)])
def test_which_shapes_the_4_bit_kernel_takes(shape: tuple[int, int], fits: bool) -> None:
    assert can_pack(*shape) == fits


def test_few_and_many_rows_agree_and_add_the_bias() -> None:
    torch.manual_seed(0)
    weight = four_bit(32, 64)
    plain = PlainLinear(weight.dequantize().bfloat16(), torch.randn(32).bfloat16())
    linear = MixedLinear(pack_four_bit(weight), plain, max_few_rows=4)
    x = torch.randn(9, 64).bfloat16()
    few, many = linear(x[:4]), linear(x)[:4]
    assert (few - many).abs().max() <= 2**-6 * many.abs().max()
    assert torch.equal(linear(x), plain(x))


def test_a_wide_weight_keeps_its_precision_under_narrow_activations() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(8, 64), torch.randn(8).bfloat16(), torch.randn(3, 64).bfloat16()
    expected = (x.double() @ weight.double().T + bias.double()).bfloat16()
    assert torch.equal(WideLinear(weight, bias)(x), expected)

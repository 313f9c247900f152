"""RMSNorm of q and k over all heads together, against float64 loops over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from op_checks import DTYPES, assert_rounded, rand
from radio_triton import ops

op = torch.ops.radio_triton
EPS = 1e-6


def truth(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int) -> Tensor:
    out = qkv.double().clone()
    for token in out:
        for part, weight in ((token[0], q_weight), (token[1], k_weight)):
            # heads follow each other: channel h * D + d
            channels = [float(part[h, d]) for h in range(part.shape[0]) for d in range(part.shape[1])]
            mean_square = sum(c * c for c in channels[:embed_dim]) / embed_dim
            normalised = torch.tensor(channels, dtype=torch.float64) / (mean_square + eps) ** 0.5
            part.copy_((normalised * weight.double()).view(part.shape))
    return out


@pytest.mark.parametrize("embed_dim", [24, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_formula(dtype: torch.dtype, embed_dim: int):
    qkv, q_weight, k_weight = rand(7, 3, 3, 8, dtype=dtype), rand(24, dtype=dtype), rand(24, dtype=dtype)
    arguments = (qkv, q_weight, k_weight, EPS, embed_dim)
    got, want = op.qk_rms_norm(*arguments), truth(*arguments)
    assert got.dtype == dtype
    # two roundings: the normalised value, and its product with the weight
    assert_rounded(got, want, want.abs(), roundings=2)
    assert torch.equal(got[:, 2], qkv[:, 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_has_the_same_bits(dtype: torch.dtype):
    qkv, q_weight, k_weight = rand(7, 3, 3, 8, dtype=dtype), rand(24, dtype=dtype), rand(24, dtype=dtype)
    before = qkv.clone()
    want = op.qk_rms_norm(qkv, q_weight, k_weight, EPS, 16)
    assert torch.equal(qkv, before)
    assert op.qk_rms_norm_(qkv, q_weight, k_weight, EPS, 16) is None
    assert torch.equal(qkv, want)


def test_weight_multiplies_the_rounded_value():
    # vLLM's order: cast(x * rsqrt) * w, both in bf16
    qkv, weight = rand(40, 3, 2, 16, dtype=torch.bfloat16), rand(32, dtype=torch.bfloat16)
    normalised = truth(qkv, torch.ones(32), torch.ones(32), EPS, 32)[:, :2].bfloat16()
    want = normalised * weight.view(2, 16)
    once = truth(qkv, weight, weight, EPS, 32)[:, :2].bfloat16()
    got = op.qk_rms_norm(qkv, weight, weight, EPS, 32)[:, :2]
    assert (got != want).double().mean() < 0.01
    assert (once != want).double().mean() > 0.1


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_size_in_float64(data: st.DataObject):
    tokens, heads, size = (data.draw(st.integers(low, high)) for low, high in ((0, 5), (1, 4), (1, 6)))
    embed_dim = data.draw(st.integers(1, heads * size))
    qkv = torch.randn(tokens, 3, heads, size, dtype=torch.float64)
    weights = torch.randn(2, heads * size, dtype=torch.float64)
    want = truth(qkv, *weights, EPS, embed_dim)
    assert_rounded(op.qk_rms_norm(qkv, *weights, EPS, embed_dim), want, want.abs(), roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dummy_heads_do_not_change_the_real_ones(dtype: torch.dtype):
    qkv, q_weight, k_weight = rand(5, 3, 4, 8, dtype=dtype), rand(32, dtype=dtype), rand(32, dtype=dtype)
    real = op.qk_rms_norm(qkv[:, :, :3], q_weight[:24], k_weight[:24], EPS, 24)
    for value in (0.0, 1e3):
        qkv[:, :2, 3] = value
        padded = op.qk_rms_norm(qkv, q_weight, k_weight, EPS, 24)
        assert torch.equal(padded[:, :, :3], real)
        op.qk_rms_norm_(changed := qkv.clone(), q_weight, k_weight, EPS, 24)
        assert torch.equal(changed, padded)
    # they are scaled all the same
    want = truth(qkv, q_weight, k_weight, EPS, 24)
    assert_rounded(padded, want, want.abs(), roundings=2)


def test_heads_are_normalised_together():
    # one head of ones and one of zeros: the mean square over both is 1/2, over a head alone 1 and 0
    qkv = torch.zeros(1, 3, 2, 4)
    qkv[:, :, 0] = 1
    got = op.qk_rms_norm(qkv, torch.ones(8), 2 * torch.ones(8), 0.0, 8)
    assert torch.allclose(got[0, :, 0, 0], torch.tensor([2**0.5, 2 * 2**0.5, 1.0]))
    assert not got[:, :, 1].any()


def test_v_is_left_as_it_is():
    qkv = rand(3, 3, 2, 4)
    qkv[:, 2] = torch.nan
    op.qk_rms_norm_(qkv, torch.ones(8), torch.ones(8), EPS, 8)
    assert qkv[:, 2].isnan().all() and qkv[:, :2].isfinite().all()


def test_a_strided_buffer():
    wide = rand(6, 3, 2, 12)
    view = wide[::2, :, :, 4:8]
    weights = rand(8), rand(8)
    got = op.qk_rms_norm(view, *weights, EPS, 8)
    assert torch.equal(got, op.qk_rms_norm(view.contiguous(), *weights, EPS, 8))


@pytest.mark.parametrize("name", ["qk_rms_norm", "qk_rms_norm_"])
def test_refusals(name: str):
    call, ones = getattr(op, name), torch.ones(8)
    with pytest.raises(ValueError, match=r"packed buffer \(T, 3, H, D\), got \(5, 2, 2, 4\)"):
        call(torch.ones(5, 2, 2, 4), ones, ones, EPS, 8)
    with pytest.raises(ValueError, match=r"packed buffer \(T, 3, H, D\), got \(5, 24\)"):
        call(torch.ones(5, 24), ones, ones, EPS, 8)
    with pytest.raises(ValueError, match=r"over 8 channels needs weights \(8,\).*got \(4,\), \(8,\) and 8"):
        call(torch.ones(5, 3, 2, 4), torch.ones(4), ones, EPS, 8)
    for embed_dim in (0, 9):
        with pytest.raises(ValueError, match=rf"0 < embed_dim <= 8, got \(8,\), \(8,\) and {embed_dim}"):
            call(torch.ones(5, 3, 2, 4), ones, ones, EPS, embed_dim)


def test_layers_overwrite_only_what_needs_no_gradient():
    q_norm, k_norm = nn.RMSNorm(8, eps=0.5), nn.RMSNorm(8, eps=0.5)
    qkv = rand(3, 3, 2, 4)
    before = qkv.clone()
    got = ops.qk_rms_norm(qkv, q_norm, k_norm, 8)
    assert got.requires_grad and torch.equal(qkv, before)
    with torch.no_grad():
        assert ops.qk_rms_norm(qkv, q_norm, k_norm, 8) is qkv
    assert torch.equal(qkv, got)
    assert_rounded(got, truth(before, torch.ones(8), torch.ones(8), 0.5, 8), 4.0)

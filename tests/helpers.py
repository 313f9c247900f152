"""What several tests share."""

from torch import Tensor


def rel_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64; got and want must have one shape."""
    assert got.shape == want.shape, f"got {tuple(got.shape)}, want {tuple(want.shape)}"
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return float((got - want).norm() / want.norm())

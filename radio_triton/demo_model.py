"""`radio-tiny-meanshift`: a RADIO whose weights are a formula, not trained.

Every patch is described by its colour, texture and place; every block moves each description towards the mean
of the descriptions near it. That is the mean shift algorithm, so the patches of one segment end at one point.
A plain vision transformer computes it as follows, with C its width:

* A description `f` (32 slots) is stored as the token `(f, -f)`. Its mean is 0, so LayerNorm only rescales,
  and `R * LayerNorm(x) = x` wherever `|f| = K = R * sqrt(C / 2)`.
* One slot is always K, far more than the others hold. So all descriptions lie near one place of the sphere
  `|f| = K`, where it is nearly flat: a distance on it is the distance between colours, textures and places.
* On the sphere `q . k = K^2 - |q - k|^2 / 2`, so softmax(q . k) is a Gaussian kernel of width 1, and
  attention that returns the descriptions themselves is their mean under it. The units below are its widths.
* `gelu(a) - gelu(-a) = a`, so an MLP can be any linear map, and `gelu(a) + gelu(-a)` is nearly `|a|`.

The numbers R, STEP and SHARPNESS are such that no weight of a block is rounded in bfloat16 or float16.
"""

import math

import torch
from torch import Tensor

from radio_triton.config import RadioConfig
from radio_triton.model import RadioModel

PATCH, GRID, WIDTH, BLOCKS, CLASS_TOKENS, REGISTERS = 8, 64, 64, 7, 2, 2

# the slots of a description; those not named stay 0
SLOTS = WIDTH // 2
COLOUR, TEXTURE, ENERGY, PLACE, CONSTANT, FLAG = slice(0, 3), slice(3, 17), 17, slice(18, 20), 30, 31
FILTERS = 14

# what makes a distance of 1, in pixel values from 0 to 1 and in longer sides; found by looking at photos
COLOUR_UNIT, TEXTURE_UNIT, PLACE_UNIT = 0.06, 0.10, 0.15

R = 3.5
K = R * math.sqrt(WIDTH / 2)  # 19.8: larger is flatter, but coarser in bf16
STEP = 2.0  # weight of the mean beside the description: (1 + STEP) K < 64, where bf16 counts in quarters
SHARPNESS = 16.0  # scales what enters gelu, so that its round part near 0 is small


def demo_model(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> RadioModel:
    """The built-in model, frozen and in eval mode."""
    model = RadioModel(demo_config(), device="meta")  # draws no random numbers
    model.load_state_dict(demo_weights(), assign=True)
    return model.to(device=device, dtype=dtype).requires_grad_(False).eval()


def demo_config() -> RadioConfig:
    """The shape of the built-in model: 7 blocks of width 64, one head, patches of 8, 625 k parameters."""
    return RadioConfig(
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=1,
        intermediate_size=4 * WIDTH,
        patch_size=PATCH,
        position_grid=(GRID, GRID),
        num_cls_tokens=CLASS_TOKENS,
        num_registers=REGISTERS,
        summary_idxs=(0, 1),
    )


def demo_weights() -> dict[str, Tensor]:
    """Every weight and buffer of the model by its name in `RadioModel`; fp32, the summary indices int64."""
    config = demo_config()
    weights = {
        "embeddings.patch_projection.weight": patch_projection(torch.tensor(config.norm_std)),
        "embeddings.position_embedding": position_table(),
        "embeddings.cls_register_token": prefix_tokens(),
        "summary_idxs": torch.tensor(config.summary_idxs),
        "input_conditioner.norm_mean": torch.tensor(config.norm_mean).view(3, 1, 1),
        "input_conditioner.norm_std": torch.tensor(config.norm_std).view(3, 1, 1),
    }
    for i in range(BLOCKS):
        maps = texture_energy_block() if i == 0 else mean_shift_block()
        weights |= {f"encoder.layer.{i}.{name}": value for name, value in maps.items()}
    return weights


def mirrored(f: Tensor) -> Tensor:
    """Slots along the first dimension (32, ...) to the channels of a token (64, ...): f, then -f."""
    return torch.cat([f, -f])


def cosines() -> Tensor:
    """The texture filters (14, 8, 8): cosine waves of 1 to 4 half periods a patch, both axes together.

    Their RMS is 1 / 64, that of a mean over the patch, so that colour and texture have one scale.
    """
    t = (torch.arange(PATCH) + 0.5) / PATCH
    waves = [torch.ones(PATCH)] + [math.sqrt(2) * torch.cos(math.pi * a * t) for a in range(1, 5)]
    pairs = [(a, b) for a in range(5) for b in range(5) if 0 < a + b < 5]
    return torch.stack([torch.outer(waves[a], waves[b]) for a, b in pairs]) / PATCH**2


def patch_projection(std: Tensor) -> Tensor:
    """(64, 3 * 8 * 8), order (c, y, x): the mean opponent colours and the waves in the lightness."""
    lightness, red_green, yellow_blue = [1 / 3, 1 / 3, 1 / 3], [1, -1, 0], [1 / 2, 1 / 2, -1]
    opponents = torch.tensor([lightness, red_green, yellow_blue])
    f = torch.zeros(SLOTS, 3, PATCH, PATCH)
    f[COLOUR] = opponents[:, :, None, None] / PATCH**2 / COLOUR_UNIT
    f[TEXTURE] = opponents[0, :, None, None] * cosines()[:, None] / TEXTURE_UNIT
    f *= std[:, None, None]  # the pixels that arrive were divided by it
    return mirrored(f).flatten(1)


def position_table() -> Tensor:
    """(1, 64 * 64, 64): place and the constant. A ramp resampled is a ramp: any grid gets true places."""
    ramp = ((torch.arange(GRID) + 0.5) / GRID - 0.5) / PLACE_UNIT
    f = torch.zeros(SLOTS, GRID, GRID)
    f[PLACE] = torch.stack(torch.meshgrid(ramp, ramp, indexing="ij"))
    f[CONSTANT] = K
    return mirrored(f).flatten(1).T[None].contiguous()


def prefix_tokens() -> Tensor:
    """(4, 64): class and register tokens, which have no colour, texture or place, and carry the flag."""
    f = torch.zeros(SLOTS)
    f[[CONSTANT, FLAG]] = K
    return mirrored(f).repeat(CLASS_TOKENS + REGISTERS, 1)


def texture_energy_block() -> dict[str, Tensor]:
    """Block 0, without attention: the MLP adds the sum of the sizes of all textures, and takes them off.

    Patches of one material differ in the signs of their textures, but hardly in that sum.
    """
    slots = torch.eye(SLOTS)
    sizes = slots[:, [ENERGY] * FILTERS]
    fc1, fc2 = mlp(torch.eye(WIDTH)[TEXTURE], odd=-R * mirrored(slots[:, TEXTURE]), even=R * mirrored(sizes))
    zero = torch.zeros(WIDTH, WIDTH)
    return block(zero, zero, zero, zero, fc1, fc2)


def mean_shift_block() -> dict[str, Tensor]:
    """Blocks 1 to 6: attention adds STEP times the mean of the descriptions near by, and the MLP takes off
    STEP * K along the sum, which brings its length from (1 + STEP) K back to K."""
    same = torch.eye(WIDTH)
    # undoes LayerNorm in q and in k, attention's 1 / sqrt(C), and that f and -f count every product twice
    q = R**2 * math.sqrt(WIDTH) / 2 * same
    # throws the key of a flagged token to the far side of the sphere: all tokens attend to patches only
    away = torch.eye(SLOTS)
    away[CONSTANT, FLAG] = -16.0
    k = torch.block_diag(away, away)
    fc1, fc2 = mlp(same, odd=-STEP * R * same, even=torch.zeros(WIDTH, WIDTH))
    return block(q, k, same, STEP * R * same, fc1, fc2)


def mlp(take: Tensor, odd: Tensor, even: Tensor) -> tuple[Tensor, Tensor]:
    """fc1 and fc2 such that fc2 gelu(fc1 n) is odd a + even |a| with a = take n, nearly.

    `take` is (m, 64) with m at most 128, `odd` and `even` are (64, m); the odd part is exact.
    """
    m = len(take)
    fc1, fc2 = torch.zeros(4 * WIDTH, WIDTH), torch.zeros(WIDTH, 4 * WIDTH)
    fc1[: 2 * m] = torch.cat([take, -take]) * SHARPNESS
    fc2[:, : 2 * m] = torch.cat([even + odd, even - odd], dim=1) / SHARPNESS
    return fc1, fc2


def block(q: Tensor, k: Tensor, v: Tensor, proj: Tensor, fc1: Tensor, fc2: Tensor) -> dict[str, Tensor]:
    """The weights of one block by name, from its linear maps: norms that only rescale, and no bias."""
    linears = {"attention.qkv": torch.cat([q, k, v]), "attention.proj": proj, "mlp.fc1": fc1, "mlp.fc2": fc2}
    weights: dict[str, Tensor] = {}
    for name, weight in linears.items():
        weights |= {f"{name}.weight": weight, f"{name}.bias": torch.zeros(len(weight))}
    for name in ("norm1", "norm2"):
        weights |= {f"{name}.weight": torch.ones(WIDTH), f"{name}.bias": torch.zeros(WIDTH)}
    return weights

"""Small layers with adapters."""

import mlx.core as mx

WIDTH, RANK = 8, 2


def pair(seed: int = 0, dtype: mx.Dtype = mx.float32, rank: int = RANK) -> dict[str, mx.array]:
    a, b = mx.random.split(mx.random.key(seed))
    return {
        "layer.lora_a": mx.random.normal((WIDTH, rank), key=a).astype(dtype),
        "layer.lora_b": mx.random.normal((rank, WIDTH), key=b).astype(dtype),
    }


def same(x: mx.array, y: mx.array) -> bool:
    return bool(mx.allclose(x, y, atol=1e-4))

"""One run of mlx-lm's trainer."""

from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
from mlx_lm.tuner.datasets import CacheDataset, ChatDataset
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load

from train_parts.samples import Sample, conversations

BATCH, MOST_TOKENS = 4, 128


def train_adapter(sample: Sample, checkpoint: Path, folder: Path, iterations: int | None) -> None:
    """Trains the adapter, and writes adapters.safetensors in float16 to the folder."""
    np.random.seed(sample.seed)  # the trainer shuffles its batches with it
    mx.random.seed(sample.seed)
    model, tokenizer = load(str(checkpoint))
    model.set_dtype(mx.float32)
    model.freeze()
    linear_to_lora_layers(
        model,
        sample.layers,
        {"rank": sample.rank, "scale": sample.scale, "dropout": 0.0, "keys": set(sample.keys)},
    )
    data = ChatDataset(
        [{"messages": messages} for messages in conversations(sample)], tokenizer, mask_prompt=True
    )
    file = folder / "adapters.safetensors"
    train(
        model,
        optimizers.Adam(learning_rate=sample.learning_rate),
        CacheDataset(data),
        args=TrainingArgs(
            batch_size=BATCH,
            iters=iterations or sample.iterations,
            steps_per_report=10,
            max_seq_length=MOST_TOKENS,
            adapter_file=str(file),
        ),
    )
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    halved = {name: array.astype(mx.float16) for name, array in weights.items()}
    mx.save_safetensors(str(file), halved)

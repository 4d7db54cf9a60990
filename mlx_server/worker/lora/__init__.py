"""LoRA adapters in a model's layers: each row of a batch may use a different adapter."""

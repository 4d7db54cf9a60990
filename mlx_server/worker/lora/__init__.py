"""LoRA adapters as layers: each row of a batch may use another adapter."""

"""What the files of checkpoints, tokenizers and LoRA adapters say, read without loading weights."""

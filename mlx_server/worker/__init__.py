"""The MLX process: token ids in, token ids out. One thread of it owns MLX."""

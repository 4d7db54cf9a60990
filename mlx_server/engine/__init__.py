"""The server's side of the MLX process: starting it, messaging it and detecting its death."""

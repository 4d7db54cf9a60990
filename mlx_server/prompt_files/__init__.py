"""The files of the prompt cache's tier on disk: their names, their contents and their folder.

Nothing here uses MLX, so that `mlx-server cache` can look at the folder without an engine.
"""

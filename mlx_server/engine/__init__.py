"""The server's end of the MLX process: starts it, talks to it, notices when it is gone."""

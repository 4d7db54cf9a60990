"""`python -m mlx_server.limits` prints the table for SECURITY.md."""

from mlx_server.limits import table

print(table.markdown())  # noqa: T201

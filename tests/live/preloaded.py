"""What each server does first: done once, in the process that they are forked from."""

from mlx_server.config.settings import Settings, validated
from mlx_server.engine.engine_process import fast_blas

validated(Settings, {})
fast_blas()

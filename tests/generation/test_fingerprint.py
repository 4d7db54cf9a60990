"""The fingerprint changes with all that may change the tokens of a seed."""

from pathlib import Path

from mlx_server.generation.generate import system_fingerprint
from mlx_server.lora.catalog import AdapterSpec
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.prepare import ModelSpec, prepare


def test_it_is_that_of_the_files_the_adapter_and_the_cache(spec: ModelSpec) -> None:
    prepared = prepare(spec, lambda *_: None, upcast=True)
    adapters = [
        LeasedAdapter(AdapterSpec("sql", Path("sql"), digest, 8, 20, "lora", None, "mlx"))
        for digest in ("one", "two")
    ]
    found = [system_fingerprint(prepared, adapter) for adapter in (None, *adapters)]
    assert len(set(found)) == 3
    assert found == [system_fingerprint(prepared, adapter) for adapter in (None, *adapters)]

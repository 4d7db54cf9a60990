"""The environment by which MLX's backends know a group."""

import json

from mlx_server.engine.worker_arguments import RankGroup, RankHost

HOSTS = (
    RankHost("one.local", ("10.0.0.1", "10.0.1.1"), (None, "rdma_en2")),
    RankHost("two.local", ("10.0.0.2",), ("rdma_en3", None)),
)


def test_each_address_of_each_rank_has_a_port_of_its_own() -> None:
    group = RankGroup("tensor", HOSTS, port=5000)
    assert group.ports == 3
    assert json.loads(group.backend_files()["MLX_HOSTFILE"]) == [
        ["10.0.0.1:5000", "10.0.1.1:5001"],
        ["10.0.0.2:5002"],
    ]
    assert group.backend_variables() == {}


def test_jaccl_is_told_the_devices_and_where_rank_0_is() -> None:
    group = RankGroup("pipeline", HOSTS, port=5000, backend="jaccl-ring")
    devices = json.loads(group.backend_files()["MLX_IBV_DEVICES"])
    assert devices == [[None, "rdma_en2"], ["rdma_en3", None]]
    assert group.backend_variables() == {
        "MLX_JACCL_COORDINATOR": "10.0.0.1:5000",
        "MLX_JACCL_RING": "1",
    }

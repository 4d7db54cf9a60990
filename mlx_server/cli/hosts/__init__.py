"""For `mlx-server doctor --hostfile`: whether the hosts of a hostfile can hold a model together."""

"""A schema with many members."""

MANY = {f"a member of a large object, number {n}": {"type": "integer"} for n in range(400)}

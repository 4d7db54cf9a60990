"""How a list of items is asked for."""

from typing import Annotated, Literal

from fastapi import Query

After = Annotated[str | None, Query(description="Items behind this one.")]
Limit = Annotated[int, Query(ge=1, le=100)]
Sorted = Annotated[Literal["asc", "desc"], Query()]

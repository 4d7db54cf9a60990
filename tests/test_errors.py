import importlib
import re
from pathlib import Path

from mlx_server import errors

LINE = re.compile(r"^([│ ]*)[├└]── (\w+) +(\d*)", re.MULTILINE)
CLASS = re.compile(r"^class (\w+)\((\w+)\):", re.MULTILINE)
REPOSITORY = Path(__file__).parents[1]


def with_a_base() -> dict[str, tuple[str, str]]:
    """The modules and the bases of the project's classes that have one base."""
    found = {}
    for file in (REPOSITORY / "mlx_server").rglob("*.py"):
        module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        for name, base in CLASS.findall(file.read_text("utf-8")):
            found[name] = (module, base)
    return found


def server_errors() -> dict[str, tuple[str, str]]:
    """The modules and the parents of all errors of the tree."""
    classes, found = with_a_base(), {"ServerError"}
    while more := {name for name, (_, base) in classes.items() if base in found} - found:
        found |= more
    return {name: classes[name] for name in found - {"ServerError"}}


def test_the_drawing_has_every_error_under_its_parent_with_its_status() -> None:
    assert errors.__doc__
    drawn, above = {}, ["ServerError"]
    for indent, name, status in LINE.findall(errors.__doc__):
        depth = len(indent) // 4 + 1
        above[depth:] = [name]
        drawn[name] = (above[depth - 1], status)
    ours = server_errors()
    assert {name: parent for name, (parent, _) in drawn.items()} == {
        name: parent for name, (_, parent) in ours.items()
    }
    for name, (module, _) in ours.items():
        status = getattr(importlib.import_module(module), name).status
        assert drawn[name][1] in {"", str(status)}

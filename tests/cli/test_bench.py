"""`mlx-server bench`: what is measured, and its exit code. The load generator is faked."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner
from typer.testing import Result as CommandResult

from mlx_server.cli import app, bench
from mlx_server.clients.bench import Result, Target, Workload
from mlx_server.errors import SettingsError

URL = "http://studio.local:8000/v1"


class Bench:
    """Takes the place of `measure` and `target_of`."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.measured: list[tuple[Any, ...]] = []
        self.errors: tuple[str, ...] = ()

    def target_of(self, url: str, key: str | None, model: str | None, api: Any) -> Target:
        self.targets.append(Target(url, model or "first", key, api))
        return self.targets[-1]

    def measure(self, *given: Any, shared_prefix: bool) -> Iterator[Result]:
        self.measured.append((*given, shared_prefix))
        yield Result(Workload(1, 1, 64, 64), 1.0, (), self.errors)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Bench:
    faked = Bench()
    monkeypatch.setattr(bench, "target_of", faked.target_of)
    monkeypatch.setattr(bench, "measure", faked.measure)
    return faked


def run(*arguments: str) -> CommandResult:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_help_teaches_by_example() -> None:
    shown = run("--help")
    examples = [line for line in shown.output.splitlines() if "mlx-server bench http" in line]
    assert shown.exit_code == 0
    assert 2 <= len(examples) <= 4


def test_a_url_is_enough(faked: Bench) -> None:
    assert run(URL).exit_code == 0
    assert faked.targets == [Target(URL, "first", None, "chat")]
    assert faked.measured == [(faked.targets[0], [1, 4, 8, 16], [64, 512], 64, None, False)]


def test_every_flag_is_passed_on(faked: Bench) -> None:
    flags = "--api-key K --model m --concurrency 1,32 --prompt-tokens 2000 --max-tokens 9"
    more = "--requests 7 --shared-prefix --completions"
    assert run(URL, *flags.split(), *more.split()).exit_code == 0
    assert faked.targets == [Target(URL, "m", "K", "completions")]
    assert faked.measured == [(faked.targets[0], [1, 32], [2000], 9, 7, True)]


def test_the_exit_code_says_whether_requests_failed(faked: Bench) -> None:
    faked.errors = ("cut off",)
    failed = run(URL)
    assert (failed.exit_code, "1 failed: cut off" in failed.output) == (1, True)


@pytest.mark.parametrize("flag", ["--concurrency", "--prompt-tokens"])
def test_a_wrong_list_is_named_before_the_server_is_asked(faked: Bench, flag: str) -> None:
    error = run(URL, flag, "1,many").exception
    assert isinstance(error, SettingsError)
    assert f"{flag} should be a list like 1,4,16" in error.message
    assert faked.targets == []


@pytest.mark.parametrize("flags", [["--max-tokens", "1"], ["--requests", "0"]])
def test_what_could_not_be_measured_is_refused(faked: Bench, flags: list[str]) -> None:
    refused = run(URL, *flags)
    assert (refused.exit_code, flags[0] in refused.output) == (2, True)
    assert faked.targets == []

"""The pytest plugin, in pytest runs of its own: what fails there, and with which words."""

import re
import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

HEAD = """
    import os, re, signal, sys
    import httpx, pytest
    from mlx_server.testing import call, raw, say, think, tokens

    TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}

    def ask(kit, text="Well?", model="qwen3", **more):
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, **more}
        with httpx.Client(trust_env=False, timeout=60) as http:
            return http.post(f"{kit.base_url}/chat/completions", json=body)

    def text_of(response):
        return response.raise_for_status().json()["choices"][0]["message"]["content"]
"""

OTHERS = ("anyio", "langsmith_plugin")
WITHOUT_OTHERS = [option for name in OTHERS for option in ("-p", f"no:{name}")]
"""Plugins of other packages, which take seconds to import in each process."""


def run(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    # the output of the tests' own setup is no part of what is looked at
    pytester.makepyfile(test_app=f"{HEAD}\n{tests}")
    plugin = ("-p", "mlx_server.testing", "-p", "no:cacheprovider")
    return pytester.runpytest_subprocess("-W", "error", *plugin, *WITHOUT_OTHERS, *options)


def failures(result: pytest.RunResult) -> dict[str, str]:
    """What stands under the name of each test that failed."""
    parts = re.split(r"^_{3,} (\w+) _{3,}$", result.stdout.str(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_a_test_fails_unless_its_requests_and_its_answers_match(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
    def test_it_is_answered(mlx_replay):
        mlx_replay.answers("qwen3", [say("One."), say("Two.")])
        assert [text_of(ask(mlx_replay)), text_of(ask(mlx_replay))] == ["One.", "Two."]

    def test_it_asks_too_much(mlx_replay):
        mlx_replay.answers("qwen3", [say("One.")])
        ask(mlx_replay)
        assert ask(mlx_replay, "And then?").status_code == 400

    def test_it_asks_and_was_given_nothing(mlx_replay):
        text_of(ask(mlx_replay, "Anyone?"))

    def test_it_asks_too_little(mlx_replay):
        mlx_replay.answers("qwen3", [say("One."), say("Two.")])
        ask(mlx_replay)

    def test_it_fails_itself(mlx_replay):
        mlx_replay.answers("qwen3", [say("One.")])
        raise RuntimeError("of the app")

    def test_it_loses_its_server(mlx_replay):
        mlx_replay.answers("qwen3", [say("One.")])
        os.kill(mlx_replay._server.pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            ask(mlx_replay)

    def test_what_others_left_is_gone(mlx_replay):
        assert mlx_replay.requests == []
        mlx_replay.answers("qwen3", [say("Mine.")])
        assert text_of(ask(mlx_replay)) == "Mine."
    """,
    )
    result.assert_outcomes(passed=2, failed=5)
    found = failures(result)
    nobody = "There was no answer to the request for 'qwen3', turn 1, that ends with"
    assert f"{nobody} 'And then?'." in found["test_it_asks_too_much"]
    assert f"{nobody} 'Anyone?'." in found["test_it_asks_and_was_given_nothing"]
    assert "1 answer of 'qwen3' was not used." in found["test_it_asks_too_little"]
    assert "The server of mlx_replay does not answer" in found["test_it_loses_its_server"]
    assert "RuntimeError: of the app" in found["test_it_fails_itself"]
    assert "1 answer of 'qwen3' was not used." in found["test_it_fails_itself"]


def test_each_worker_of_xdist_has_a_server(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
    @pytest.mark.parametrize("number", range(6))
    def test_it(mlx_replay, number, worker_id):
        mlx_replay.answers("qwen3", [say(f"{number}."), say(f"{number}!")])
        assert text_of(ask(mlx_replay)) == f"{number}."
        assert text_of(ask(mlx_replay)) == f"{number}!"
        with open(f"{worker_id}.url", "a") as file:
            file.write(f"{mlx_replay.url}\\n")
    """,
        *("-n", "2"),
    )
    result.assert_outcomes(passed=6)
    urls = [set(path.read_text().splitlines()) for path in pytester.path.glob("*.url")]
    assert [len(each) for each in urls] == [1, 1]
    assert len(set.union(*urls)) == 2


def test_a_run_without_the_fixture_imports_next_to_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
    import sys

    def test_it():
        ours = {name for name in sys.modules if name.partition(".")[0] == "mlx_server"}
        assert ours == {"mlx_server", "mlx_server.testing"}
        assert not {"httpx", "httpx2", "pydantic", "fastapi", "openai", "mlx"} & set(sys.modules)
    """
    )
    result = pytester.runpytest_subprocess("-p", "mlx_server.testing", *WITHOUT_OTHERS)
    result.assert_outcomes(passed=1)


def test_the_server_starts_before_the_first_test_that_needs_it_and_leaves_nothing(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = pytester.mkdir("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    result = run(
        pytester,
        """
    import psutil

    def servers():
        children = psutil.Process().children()
        return [each for each in children if "mlx_server" in " ".join(each.cmdline()[:3])]

    def test_it_does_not_need_it():
        assert len(servers()) == 1

    def test_it_needs_it(mlx_replay):
        assert any(name.startswith("mlx_replay-") for name in os.listdir(os.environ["TMPDIR"]))
        mlx_replay.answers("qwen3", [say("One.")])
        assert text_of(ask(mlx_replay)) == "One."
        (server,) = servers()
        lines = [" ".join(each.cmdline()) for each in server.children()]
        python = [line for line in lines if line.startswith(sys.executable)]
        started = {re.search(r"(worker|grammars|sandbox)[./]", line)[1] for line in python}
        assert len(python) == len(started) <= 3, lines

    @pytest.mark.skipif("sys.platform")
    def test_it_is_skipped(mlx_replay):
        pass
    """,
        "--basetemp=own",
    )
    result.assert_outcomes(passed=2, skipped=1)
    assert not list(temporary.glob("mlx_replay-*"))


@pytest.mark.parametrize("options", [("--collect-only",), ("-k", "not needs")])
def test_no_server_starts_in_vain(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    pytester.makeconftest(
        """
    import mlx_server.testing
    mlx_server.testing.TestRunServer = None  # to start it would fail
    """
    )
    result = run(
        pytester,
        """
    def test_it_does_not():
        pass

    def test_it_needs_it(mlx_replay):
        pass
    """,
        *options,
    )
    assert result.ret == 0


NOT_NEEDED = ("mlx", "mlx_lm", "numpy", "rich", "typer", "sentencepiece", "google", "openai", "mcp")


def test_the_server_imports_nothing_that_it_does_not_need_to_start() -> None:
    code = "import mlx_server.app, mlx_server.api.replay, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert {name.partition(".")[0] for name in found}.isdisjoint(NOT_NEEDED)


def test_it_can_be_turned_off(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(mlx_replay): pass")
    options = ("-p", "no:mlx_server.testing", *WITHOUT_OTHERS)
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*fixture 'mlx_replay' not found*")

"""LangChain's standard tests of chat models, and LangGraph's agent, on ChatMLX."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from conformance_parts.outcomes import Outcome, Verdict
from conformance_parts.talks import QUIET

SUITE = "langchain-tests"
FOLDER = Path(__file__).parent / "langchain_suite"
ANSWERS = FOLDER / "answers.yaml"
MODEL = "langchain-suite"
SECONDS = 600.0

QUIETLY = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={FOLDER}")
ASYNC = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")


def langchain(python: Path, url: str) -> Iterator[Outcome]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, **QUIET, "OPENAI_BASE_URL": f"{url}/v1", "PYTHONPATH": str(root)}
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", *QUIETLY, *ASYNC, "--benchmark-disable"]
        done = subprocess.run(
            [*command, f"--junit-xml={report}", str(FOLDER)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if not report.is_file():
            yield Outcome(SUITE, MODEL, "all of it", "failed", (done.stdout[-500:],))
            return
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314
            yield _outcome(case)


def _outcome(case: ElementTree.Element) -> Outcome:
    name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    found = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
    if found is None:
        return Outcome(SUITE, MODEL, name, "passed")
    verdict: Verdict = "skipped" if found.tag == "skipped" else "failed"
    return Outcome(SUITE, MODEL, name, verdict, (found.get("message", ""),))

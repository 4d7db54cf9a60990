"""Tests IBM's own package, alone and within our `ModelInference`, over the same recorded HTTP."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from conformance_parts import installed
from conformance_parts.outcomes import Outcome, Verdict

SUITE = "watsonx"
SECONDS = 300.0
ROOT = Path(__file__).parents[2]
TESTS = "tests/clients/watsonx"

CODE = "import sys; sys.path.append(sys.argv.pop(1)); import pytest; sys.exit(pytest.main())"
"""Runs pytest with the package and its dependencies after this server's own on the path."""


def watsonx() -> Iterator[Outcome]:
    try:
        programs = installed.programs(installed.WATSONX)
    except installed.Missing as missing:
        yield Outcome(SUITE, installed.WATSONX, "all of it", "skipped", (str(missing),))
        return
    (packages,) = programs.parent.glob("lib/python*/site-packages")
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junit-xml={report}", TESTS]
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(packages), *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if not report.is_file():
            yield Outcome(SUITE, installed.WATSONX, "all of it", "failed", (done.stdout[-500:],))
            return
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314
            yield _outcome(case)


def _outcome(case: ElementTree.Element) -> Outcome:
    name = str(case.get("name"))
    found = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
    if found is None:
        return Outcome(SUITE, installed.WATSONX, name, "passed")
    verdict: Verdict = "skipped" if found.tag == "skipped" else "failed"
    return Outcome(SUITE, installed.WATSONX, name, verdict, (found.get("message", ""),))

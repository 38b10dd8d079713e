"""Prints what the tests measured."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    measured = [
        (report.nodeid.rpartition("/")[2], report.user_properties)
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        if report.when == "call" and report.user_properties
    ]
    if measured:
        terminalreporter.section("measured")
    for name, properties in measured:
        values = ", ".join(f"{key}: {value}" for key, value in properties)
        terminalreporter.write_line(f"{name}: {values}")

"""A headless Chromium: what a page shows to a person, and what it complains of."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

__all__ = ["browser", "complaints"]

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@contextmanager
def browser(*arguments: str, width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """A browser with a profile of its own.

    Raises `FileNotFoundError` if it is not installed.
    """
    binary, driver = (_find(name) for name in ("chromium", "chromedriver"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ChromeOptions()
        options.binary_location = binary
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        window = f"--window-size={width},{height}"
        profile = f"--user-data-dir={Path(folder) / 'profile'}"
        for argument in (*_ARGUMENTS, window, profile, *arguments):
            options.add_argument(argument)
        chrome = Chrome(options, Service(driver))
        try:
            yield chrome
        finally:
            chrome.quit()


def complaints(chrome: Chrome) -> list[str]:
    """What the console has had since the last call, errors and warnings alike."""
    log: list[dict[str, object]] = chrome.get_log("browser")  # type: ignore[no-untyped-call]
    return [str(entry["message"]) for entry in log]


def _find(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"{name} is not installed: scripts/install-servers chromium installs it on Debian"
        )
    return found

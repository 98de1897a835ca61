"""Every agent test has a home without a profile: login shells must not depend on whose machine this is."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def home_without_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _empty_home(home_without_profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a profile does takes time, and may wait for a lock that a killed shell has left behind."""
    monkeypatch.setenv("HOME", str(home_without_profile))

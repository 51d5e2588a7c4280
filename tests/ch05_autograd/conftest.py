import pathlib
import sys

import pytest

from minicompile import driver

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def little_is_compiled(monkeypatch):
    """The regions of these tests are small, and would be left to eager."""
    monkeypatch.setattr(driver, "NODE", 0)

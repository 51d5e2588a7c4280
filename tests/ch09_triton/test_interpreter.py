"""Triton decides when it is imported whether it interprets, so the tests of kernels on the CPU run in a process of their own."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.processes
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
@pytest.mark.parametrize("module", ["test_pointwise", "test_reductions", "test_columns"])
def test_kernels_under_the_interpreter(module):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
                           str(Path(__file__).with_name(module + ".py"))],
                          env=dict(os.environ, TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-4000:]

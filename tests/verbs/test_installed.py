"""The installed package on an adapter. NDPY_INSTALLED names the ndpy command of an environment with the wheel in it."""

import os
import subprocess

import pytest
from kit.helpers import STRESS

INSTALLED = os.environ.get("NDPY_INSTALLED")

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="NDPY_INSTALLED names no installed ndpy"),
    pytest.mark.timeout(300),
]


def installed(folder, *words):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NDPY_", "PYTHON"))}
    command = [INSTALLED, *words]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=280)


def test_installed_ndpy_lists_the_adapter(adapter_name, tmp_path):
    done = installed(tmp_path, "devices", adapter_name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert adapter_name in done.stdout


@pytest.mark.skipif(not STRESS, reason="with NDPY_STRESS=1 only: the smoke test once more")
def test_installed_ndpy_passes_the_smoke_test(adapter_name, tmp_path):
    done = installed(tmp_path, "smoke", adapter_name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed, " in done.stdout.splitlines()[-1]

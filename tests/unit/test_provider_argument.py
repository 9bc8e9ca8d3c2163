"""open_adapter(provider=...) on a system whose providers are not DLLs."""

import sys
from pathlib import Path

import pytest

import ndpy


@pytest.mark.skipif(sys.platform == "win32", reason="Windows loads it")
@pytest.mark.parametrize("path", ["softnd.dll", Path("softnd.dll")])
@pytest.mark.parametrize("call", [ndpy.open_adapter, ndpy.list_adapters])
def test_naming_a_dll_is_refused_with_a_reason(call, path):
    with pytest.raises(ndpy.UnsupportedError, match=r"'softnd\.dll'.*only Windows loads"):
        call(provider=path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has it")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("call", [ndpy.open_adapter, ndpy.list_adapters])
def test_asking_for_a_version_of_networkdirect_is_refused_with_a_reason(call, version):
    with pytest.raises(ndpy.UnsupportedError, match=rf"version={version}.*NetworkDirect.*only Windows"):
        call(version=version)

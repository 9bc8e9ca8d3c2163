"""rig/freethreaded.sh: what a download that was cut off leaves behind. apt is a stand-in, and nothing is compiled."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from kit import linux_only as linux_only
from kit.deadlines import patient
from kit.rig import RIG

ARCHIVE = "python3.14_3.14.0.orig.tar.gz"
# apt-get source writes to the folder that it runs in. The first time it is cut off.
APT = f"""#!/bin/sh
case "$*" in
*" source "*)
    echo source >>"$log"
    if [ "$(grep -c source "$log")" -le "$cut_off" ]; then head -c 60 "$whole" >{ARCHIVE}; exit 1; fi
    cp "$whole" {ARCHIVE}
    ;;
esac
"""
CONFIGURE = "#!/bin/sh\necho configured >&2\nexit 1\n"


def whole_archive(folder: Path) -> Path:
    tree = folder / "tree/Python-3.14.0"
    tree.mkdir(parents=True)
    (tree / "configure").write_text(CONFIGURE)
    (tree / "configure").chmod(0o755)
    with tarfile.open(folder / "whole.tar.gz", "w:gz") as archive:
        archive.add(tree, tree.name)
    return folder / "whole.tar.gz"


@pytest.fixture
def run(tmp_path):
    """run(cut_off) runs the script, whose first downloads are cut off, as far as the compiler. Returns what it said."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    shutil.copytree(RIG, checkout / "rig", ignore=shutil.ignore_patterns("windows"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apt-get").write_text(APT)
    (tmp_path / "bin/apt-get").chmod(0o755)
    keyring = tmp_path / "keyring"
    keyring.write_text("")
    archive = checkout / "rig/debian_archive.sh"
    archive.write_text(archive.read_text().replace("/usr/share/keyrings/debian-archive-keyring.gpg", str(keyring)))
    whole = whole_archive(tmp_path)

    def once(cut_off: int) -> str:
        done = subprocess.run(
            ["rig/freethreaded.sh"],
            cwd=checkout,
            env={
                "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
                "DEBIAN_MIRROR": "http://mirror.invalid/debian",
                "VERSION": "3.14",
                "log": str(tmp_path / "log"),
                "whole": str(whole),
                "cut_off": str(cut_off),
            },
            capture_output=True,
            text=True,
            timeout=patient(60),
        )
        assert done.returncode == 1
        return done.stderr

    return once


def test_a_download_that_was_cut_off_is_not_taken(run):
    assert "has no source of a Python" in run(cut_off=2)
    assert "configured" in run(cut_off=2)


def test_a_damaged_archive_is_removed_and_fetched_again(run, tmp_path):
    assert "configured" in run(cut_off=0)
    (archive,) = (tmp_path / "checkout/.rig/freethreaded").glob("*.orig.tar.gz")
    archive.write_bytes(archive.read_bytes()[:60])
    assert "was damaged and is removed" in run(cut_off=0)
    assert "configured" in run(cut_off=0)

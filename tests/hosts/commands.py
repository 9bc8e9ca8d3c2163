"""Commands of the system, for both hosts."""

import subprocess


def run(command: list[str], timeout_s: float = 60) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout

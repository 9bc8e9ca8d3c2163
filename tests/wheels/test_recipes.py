"""The action for GitHub, the container's recipe and conda's recipe, as far as they can be run here: no engine of
containers and no channel of conda is there. Most of it runs with NDPY_STRESS=1 only.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from environments import PLACE, PROVIDED, ROOT, linux_environment, output_of, run
from kit.helpers import only_under_stress

import ndpy

if not PROVIDED:
    pytest.skip("needs what rig/setup.sh provides", allow_module_level=True)

# Packages are fetched, and the files of a release may be built for the first test.
pytestmark = pytest.mark.timeout(900)

# ---- the action ----

ACTION = (ROOT / "action.yml").read_text()
SUDO = '#!/bin/sh\necho "$@" >>"$SAID"\n'


def steps() -> dict[str, str]:
    """The script of each step, by the step's name."""
    found = re.findall(r"^    - name: (.+)\n((?:      .*\n|\n)+)", ACTION, re.MULTILINE)
    return {name: textwrap.dedent(rest.partition("run: |\n")[2]) for name, rest in found}


def inputs() -> dict[str, str]:
    """The defaults of the inputs."""
    return dict(re.findall(r"^  (\w+):\n    description: .+\n    default: (.+)$", ACTION, re.MULTILINE))


def test_the_action_has_the_parts_that_github_wants():
    assert set(steps()) == {"Check the inputs", "Install packages", "Install ndpy", "Give the adapter"}
    assert inputs() == {"adapter": "soft0", "version": "source", "python": "python3"}
    for name in ("adapter", "version", "python"):
        assert f"${{{{ inputs.{name} }}}}" in ACTION
    # Each step of a composite action names its shell. Values come by the environment, so that no input is code.
    assert ACTION.count("      shell: sh\n") == ACTION.count("      run: |\n") == len(steps())
    assert all("${{" not in script for script in steps().values())


@pytest.mark.parametrize("adapter", ["soft1", "", "vm; echo"])
def test_the_action_refuses_another_adapter(adapter):
    done = run("sh", "-e", "-c", steps()["Check the inputs"], WANTED=adapter)
    assert done.returncode == 1
    assert done.stdout == f"::error::adapter is soft0 or vm, not {adapter}\n"


@only_under_stress
@pytest.mark.parametrize("adapter", ["soft0", "vm"])
def test_the_steps_of_the_action_give_the_adapter(release, adapter):
    folder = PLACE / f"action-{adapter}"
    environment = linux_environment(folder, release.linux, "pip", "virtme-ng")
    python = environment / "bin/python"
    output_of(python, "-m", "pip", "uninstall", "--yes", "ndpy")
    sudo = folder / "stand-in/sudo"
    sudo.parent.mkdir()
    sudo.write_text(SUDO)
    sudo.chmod(0o755)
    said, variables, outputs = (folder / name for name in ("said", "variables", "outputs"))
    for path in (said, variables, outputs):
        path.touch()
    given = {
        "WANTED": adapter, "VERSION": ndpy.__version__, "PYTHON": str(python), "SOURCE": str(ROOT),
        "GITHUB_ENV": str(variables), "GITHUB_OUTPUT": str(outputs), "SAID": str(said),
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(release.linux.parent),
        "PATH": f"{sudo.parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    for script in steps().values():
        output_of("sh", "-e", "-c", script, cwd=folder, **given)
    wanted = {"soft0": "NDPY_ADAPTER=soft0\n", "vm": ""}[adapter]
    assert variables.read_text() == wanted
    assert outputs.read_text() == f"adapter={'soft0' if adapter == 'soft0' else 'rxe0'}\n"
    assert "apt-get install -y gcc make libibverbs-dev librdmacm-dev" in said.read_text()
    code = "import ndpy; print(ndpy.open_adapter('soft0').info.name)"
    assert output_of(python, "-W", "ignore", "-c", code, cwd=folder) == "soft0\n"


# ---- the container ----

CONTAINERFILE = (ROOT / "Containerfile").read_text()


def instructions() -> list[list[tuple[str, str]]]:
    """The instructions of each stage, as (word, rest)."""
    lines = [line for line in CONTAINERFILE.splitlines() if line and not line.startswith("#")]
    stages: list[list[tuple[str, str]]] = []
    for line in lines:
        word, _, rest = line.partition(" ")
        stages += [[]] if word == "FROM" else []
        stages[-1].append((word, rest))
    return stages


def test_the_container_is_of_one_base_and_its_last_stage_has_no_compiler():
    first, last = instructions()
    assert first[0][1].partition(" ")[0] == last[0][1]
    assert not [rest for word, rest in last if word == "RUN" and re.search(r"\b(gcc|make|\S+-dev)\b", rest)]
    assert ("ENTRYPOINT", '["ndpy"]') in last


@only_under_stress
def test_the_lines_of_the_container_run_in_a_fresh_debian(release):
    """In place of an engine: debootstrap makes the base, and each RUN is a chroot."""
    if os.geteuid() or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap")
    place = PLACE / "container"
    place.mkdir()
    base = place / "base"
    mirror = os.environ.get("NDPY_DEBIAN_MIRROR") or first_mirror()
    output_of("debootstrap", "--variant=minbase", "bookworm", base, mirror)
    shutil.copytree("/etc/apt", base / "etc/apt", dirs_exist_ok=True, symlinks=True)
    # How this machine reaches the archives, and whose certificates it trusts. A package may write /etc/ssl anew.
    for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf"):
        if Path(path).exists():
            shutil.copy(path, base / path[1:])
    if trusted := os.environ.get("SSL_CERT_FILE"):
        shutil.copy(trusted, f"{base}{TRUSTED}")
    roots: dict[str, Path] = {}
    for stage in instructions():
        root = place / f"stage{len(roots)}"
        output_of("cp", "-a", base, root)
        roots[stage[0][1].rpartition(" AS ")[2] if " AS " in stage[0][1] else "last"] = root
        for word, rest in stage[1:]:
            if word == "RUN":
                in_root(root, rest)
            elif word == "COPY" and rest.startswith("--from="):
                name, source, target = rest.removeprefix("--from=").split()
                output_of("cp", "-a", f"{roots[name]}{source}", f"{root}{target}")
            elif word == "COPY":
                # The checkout without what .containerignore leaves out: the contents of the source archive.
                (root / rest.split()[1][1:]).mkdir()
                command = ("tar", "-x", "-z", "--strip-components=1", "-C", root / rest.split()[1][1:], "-f")
                output_of(*command, release.sdist)
    said = in_root(roots["last"], "/opt/ndpy/bin/ndpy --version; /opt/ndpy/bin/ndpy smoke soft0 --only send-receive")
    assert f"ndpy, version {ndpy.__version__}\n" in said
    assert " 0 failed, " in said.splitlines()[-1]
    shutil.rmtree(place)


def first_mirror() -> str:
    sources = "\n".join(path.read_text() for path in Path("/etc/apt").rglob("*.list"))
    sources += "\n".join(path.read_text() for path in Path("/etc/apt").rglob("*.sources"))
    (mirror, *_) = re.findall(r"(?:^deb (?:\[.*?\] )?|^URIs: )(\S+)", sources, re.MULTILINE)
    return str(mirror)


TRUSTED = "/trusted.crt"


def in_root(root: Path, command: str) -> str:
    """Run a line in a chroot, with its own view of processes and files."""
    inside = f'mount -t proc proc {root}/proc && mount --bind /dev {root}/dev && exec chroot {root} /bin/sh -e -c "$1"'
    variables = {"DEBIAN_FRONTEND": "noninteractive"}
    if Path(f"{root}{TRUSTED}").exists():
        variables |= dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"), TRUSTED)
    return output_of("unshare", "--mount", "--fork", "--pid", "sh", "-c", inside, "sh", command, **variables)


# ---- conda ----


@only_under_stress
def test_the_recipe_of_conda_is_rendered_and_asks_for_what_ndpy_needs():
    """Nothing is built: that needs the packages of a channel."""
    tools = PLACE / "rattler"
    output_of(sys.executable, "-m", "pip", "--quiet", "install", "--target", tools, "py-rattler-build>=0.60")
    code = textwrap.dedent(
        """
        import sys, rattler_build
        (made,) = rattler_build.Stage0Recipe.from_file(sys.argv[1]).render()
        recipe = made.recipe.to_dict()
        print(recipe["package"]["version"], *recipe["requirements"]["run"])
        """
    )
    recipe = ROOT / "conda/recipe.yaml"
    words = output_of(sys.executable, "-c", code, recipe, PYTHONPATH=str(tools), NDPY_VERSION=ndpy.__version__).split()
    assert words[0] == ndpy.__version__
    project = (ROOT / "pyproject.toml").read_text()
    (needed,) = re.findall(r"^dependencies = \[(.+)\]$", project, re.MULTILINE)
    assert set(re.findall(r'"(\w+)', needed)) <= set(words)

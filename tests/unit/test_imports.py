"""What may import what, what `import ndpy` costs, and that it needs no RDMA library."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "ndpy"

# Who may import whom; everything may use the leaves. `provider` is the one place that chooses the platform.
LEAVES = {
    "addresses",
    "endpoint",
    "errors",
    "finding",
    "flags",
    "forking",
    "info",
    "pending",
    "placement",
    "quirks",
    "unraisable",
}
PUBLIC = {
    "adapter",
    "adapter_thread",
    "buffer",
    "completion",
    "completion_queue",
    "connection",
    "connection_parameters",
    "listener",
    "memory",
    "poller",
    "queue_pair",
    "resource",
}
# The registration cache, on the public classes only.
CACHE = {"cache", "_lease"}
PLATFORMS = {"verbs", "networkdirect"}
BUILT = {"_verbs", "_networkdirect"}
TOOLS = {"aio", "cli", "testing", "softroce", "__main__"}
LIMIT_S = 0.1


def layer(module: str) -> str:
    """The first name below ndpy of a dotted module name; "" for ndpy itself."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """(module, whether only for type checking) of every import of ndpy in a file, those inside of functions too."""
    found = []

    def visit(node: ast.AST, typing_only: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, typing_only)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, typing_only) for alias in node.names if alias.name.split(".")[0] == "ndpy")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "ndpy":
                submodules = {path.stem for path in PACKAGE.iterdir()}
                found.extend(
                    (f"ndpy.{alias.name}" if alias.name.split(".")[0] in submodules else "ndpy", typing_only)
                    for alias in node.names
                )
            elif node.module and node.module.startswith("ndpy."):
                found.append((node.module, typing_only))
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only)

    visit(ast.parse(path.read_text()), False)
    return found


def allowed(source: str, target: str) -> bool:
    """Whether a module of layer `source` may import one of layer `target`."""
    if target in LEAVES:
        return True
    if source in LEAVES:
        return False
    if source in TOOLS:
        return target not in BUILT
    if source in PLATFORMS:
        own = {"verbs": "_verbs", "networkdirect": "_networkdirect"}[source]
        return target in {source, own} | PUBLIC
    if source in PUBLIC:
        return target in PUBLIC | {"provider"}
    if source == "provider":
        return target in PLATFORMS | PUBLIC
    if source == "__init__":
        return target in PUBLIC | CACHE | {"provider"}
    if source in CACHE:
        return target in PUBLIC | CACHE
    # What stands on the public classes only.
    return target in PUBLIC | {"", source}


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path):
    source = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module, typing_only in imports_of(path):
        target = layer(module)
        if typing_only and source in LEAVES | PUBLIC and target in LEAVES | PUBLIC:
            continue
        assert allowed(source, target), f"{path.relative_to(ROOT)} imports {module}"


def test_the_platforms_do_not_know_each_other():
    for platform in PLATFORMS:
        for path in (PACKAGE / platform).rglob("*.py"):
            other = (PLATFORMS - {platform}).pop()
            assert not [module for module, _ in imports_of(path) if layer(module) == other], path


def test_one_place_chooses_the_platform():
    choosers = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] not in PLATFORMS | TOOLS
        and any(layer(module) in PLATFORMS for module, _ in imports_of(path))
    }
    assert choosers == {"provider.py"}


def test_only_the_platforms_touch_the_built_modules():
    for path in MODULES:
        if any(layer(module) in BUILT for module, _ in imports_of(path)):
            assert path.relative_to(PACKAGE).parts[0] in PLATFORMS, path


def test_without_its_extension_module_the_cache_says_what_to_do():
    done = run(
        "import sys; sys.modules['ndpy._lease'] = None; import ndpy; print(ndpy.alloc(1)); ndpy.RegistrationCache"
    )
    assert done.returncode == 1
    assert "<memory" in done.stdout
    assert "ProviderNotFoundError: ndpy's extension module for the registration cache" in done.stderr


def test_the_checker_sees_imports_inside_of_functions(tmp_path):
    sample = tmp_path / "sample.py"
    sample.write_text("def f():\n    from ndpy.verbs import adapter\n    import ndpy.cli\n    from ndpy import verbs\n")
    assert [layer(module) for module, _ in imports_of(sample)] == ["verbs", "cli", "verbs"]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The adapter of a test run must not reach the programs that a test starts.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NDPY_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def least_work(code: str, runs: int = 7) -> float:
    """Processor time, which other programs lengthen less than time."""
    times = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(code).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_import_takes_at_most_100_ms():
    """More than a bare interpreter, the least of several runs each."""
    run("import ndpy")
    cost = least_work("import ndpy") - least_work("pass")
    print(f"import ndpy: {cost * 1000:.0f} ms")
    assert cost <= LIMIT_S


def test_import_loads_no_rdma_library_and_none_of_the_tools():
    found = run(
        "import ndpy, sys; maps = open('/proc/self/maps').read();"
        "print([n for n in ('libibverbs', 'librdmacm') if n in maps],"
        "[n for n in ('rich', 'click', 'asyncio', 'ndpy.cli') if n in sys.modules])"
    )
    assert found.stdout.strip() == "[] []", found


@pytest.mark.parametrize(("variable", "package"), [("NDPY_LIBIBVERBS", "libibverbs"), ("NDPY_LIBRDMACM", "librdmacm")])
@pytest.mark.parametrize("call", ["list_adapters", "open_adapter", "open_adapter_by_name"])
def test_without_the_libraries_import_works_and_use_names_the_package(variable, package, call):
    use = {"open_adapter_by_name": "ndpy.open_adapter('rxe0')"}.get(call, f"ndpy.{call}()")
    result = run(
        "import ndpy\nprint('imported')\n"
        f"try:\n    {use}\n"
        "except ndpy.ProviderNotFoundError as error:\n    assert isinstance(error, OSError)\n    print(error)\n",
        **{variable: "/nonexistent/library.so.1"},
    )
    imported, _, message = result.stdout.partition("\n")
    assert imported == "imported", result
    assert "/nonexistent/library.so.1" in message
    assert package in message
    assert variable in message


def test_a_library_without_its_symbols_is_named_too(tmp_path):
    source, library = tmp_path / "empty.c", tmp_path / "libempty.so"
    source.write_text("int nothing;\n")
    try:
        subprocess.run(["cc", "-shared", "-o", library, source], check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    result = run(
        "import ndpy\ntry:\n    ndpy.list_adapters()\nexcept ndpy.ProviderNotFoundError as error:\n    print(error)\n",
        NDPY_LIBIBVERBS=str(library),
    )
    assert "no symbol ibv_" in result.stdout
    assert "libibverbs" in result.stdout


def test_what_is_imported_late_is_there_at_the_first_look():
    code = "import ndpy; assert 'RegistrationCache' in dir(ndpy); assert isinstance(ndpy.RegistrationCache, type)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

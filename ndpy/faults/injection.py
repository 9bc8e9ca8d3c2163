"""A scenario for programs: what their environment has, and what they have reported."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from ndpy.errors import ProviderNotFoundError
from ndpy.faults import kinds, places
from ndpy.faults.places import Passages
from ndpy.faults.report import Report
from ndpy.faults.scenario import Scenario
from ndpy.platforms.networkdirect import softnd_installation
from ndpy.platforms.verbs import softverbs

#: The environment variable with the path of a scenario in the plain form.
VARIABLE = "NDPY_FAULTS"
#: The executor for the libraries of any adapter, by LD_PRELOAD.
SHIM = "libndpyfaults.so"
# The environment variable with the path of the NetworkDirect provider that ndpy uses.
_PROVIDER = "NDPY_PROVIDER"


class Injection:
    """The files of a scenario. The end of the block removes them.

    Parameters:
        scenario: it.
        executor: "engine", "shim" or "softnd". Default: "engine", on Windows "softnd".
        counting: whether counts() is wanted.
    Raises:
        ScenarioError: the executor cannot make one of the faults.
        ProviderNotFoundError: this installation has no such executor.
    """

    def __init__(self, scenario: Scenario, executor: str = kinds.HERE[0], *, counting: bool = False) -> None:
        scenario.check_for(executor)
        if executor not in kinds.HERE:
            raise ProviderNotFoundError(f"{executor} makes no faults on this system; {kinds.one_of(kinds.HERE)} does")
        self._scenario = scenario
        self._executor = executor
        if executor == "shim":
            _shim()
        if executor == "softnd":
            self._provider = os.environ.get(_PROVIDER) or str(softnd_installation.find())
        self._folder = Path(tempfile.mkdtemp(prefix="ndpy-faults-"))
        self._report = self._folder / "report"
        self._counts = self._folder / "counts" if counting else None
        self._ends = contextlib.ExitStack()
        self._ends.callback(shutil.rmtree, self._folder, ignore_errors=True)
        #: The file in the plain form.
        self.path = self._folder / "scenario"
        self.path.write_text(scenario.plain(executor, self._report, self._counts), "utf-8", newline="\n")

    def __enter__(self) -> Injection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    def begin(self) -> None:
        """Let this process have the faults until the end of the block, and programs that it starts.

        With "shim", adapters that are opened from now on have them. load_shim() was called. softverbs and softnd look
        for the scenario themselves when an adapter is opened.
        """
        if self._executor == "shim":
            from ndpy.platforms.verbs import native_calls

            native_calls.begin_faults(str(self.path))
            self._ends.callback(native_calls.end_faults)
        for name, value in self.variables(os.environ).items():
            self._ends.callback(_set, name, os.environ.get(name))
            os.environ[name] = value

    def variables(self, former: Mapping[str, str]) -> dict[str, str]:
        """What names the scenario to programs that have the adapter already, in place of a former environment's."""
        made = {VARIABLE: str(self.path)}
        if self._executor == "shim":
            made["LD_PRELOAD"] = ":".join(entry for entry in (str(_shim()), former.get("LD_PRELOAD", "")) if entry)
        return made

    def environment(self, former: Mapping[str, str] | None = None) -> dict[str, str]:
        """An environment, by default that of this process, with the scenario. With "engine" soft0, and with "softnd"
        softnd is the adapter of programs that have it.
        """
        made = dict(os.environ if former is None else former)
        if self._executor == "softnd":
            made[_PROVIDER] = self._provider
        elif self._executor == "engine":
            made = softverbs.environment(softverbs.folder(), made)
        return {**made, **self.variables(made)}

    def report(self) -> Report:
        """What has become of the scenario until now."""
        return Report.read(self._scenario, self._report)

    def counts(self) -> list[Passages]:
        """The places that the programs have passed until now."""
        return places.read(self._counts) if self._counts is not None else []


def load_shim() -> None:
    """Open the shim in this process, for Injection.begin(). Its thread and descriptors stay.

    Raises ProviderNotFoundError: this installation has none, or the process has it already by LD_PRELOAD.
    """
    from ndpy.platforms.verbs import native_calls

    native_calls.load_shim(str(_shim()))


def _shim() -> Path:
    shim = softverbs.folder() / SHIM
    if not shim.is_file():
        raise ProviderNotFoundError(f"this installation has no shim: there is no {shim}")
    return shim


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value

"""A scenario for programs: what their environment has, and what they have reported."""

from __future__ import annotations

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
        if executor == "shim" and not (shim := softverbs.folder() / SHIM).is_file():
            raise ProviderNotFoundError(f"this installation has no shim: there is no {shim}")
        if executor == "softnd":
            self._provider = os.environ.get(_PROVIDER) or str(softnd_installation.find())
        self._folder = Path(tempfile.mkdtemp(prefix="ndpy-faults-"))
        self._report = self._folder / "report"
        self._counts = self._folder / "counts" if counting else None
        #: The file in the plain form.
        self.path = self._folder / "scenario"
        self.path.write_text(scenario.plain(executor, self._report, self._counts), "utf-8", newline="\n")

    def __enter__(self) -> Injection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def environment(self, former: Mapping[str, str] | None = None) -> dict[str, str]:
        """An environment, by default that of this process, with the scenario. With "engine" soft0, and with "softnd" softnd
        is the adapter of programs that have it.
        """
        made = dict(os.environ if former is None else former)
        if self._executor == "softnd":
            made[_PROVIDER] = self._provider
        elif self._executor == "engine":
            made = softverbs.environment(softverbs.folder(), made)
        else:
            shim = str(softverbs.folder() / SHIM)
            made["LD_PRELOAD"] = ":".join(entry for entry in (shim, made.get("LD_PRELOAD", "")) if entry)
        return {**made, VARIABLE: str(self.path)}

    def report(self) -> Report:
        """What has become of the scenario until now."""
        return Report.read(self._scenario, self._report)

    def counts(self) -> list[Passages]:
        """The places that the programs have passed until now."""
        return places.read(self._counts) if self._counts is not None else []

"""Adapters with faults, for one test."""

from __future__ import annotations

import contextlib
from types import TracebackType

import pytest

import ndpy
from ndpy.faults import Fault, Report, Scenario
from ndpy.faults.injection import Injection, load_shim
from ndpy.testing import leaks, session


class Faults:
    """What the fixture rdma_faults is: call it once, before anything that should have the faults.

    Attributes:
        failed: whether the test has failed, so that a fault that never fired says nothing more.
    """

    def __init__(self, adapter_name: str, environment: dict[str, str]) -> None:
        self._adapter_name = adapter_name
        self.failed = False
        self._executor = session.executor(adapter_name) or pytest.skip(
            f"{adapter_name} has no faults: softnd makes them, which --rdma soft takes"
        )
        if self._executor == "shim":
            try:
                load_shim()
            except ndpy.ProviderNotFoundError as error:
                pytest.skip(f"{adapter_name} has no faults: {error}")
        self._environment = environment
        self._injection: Injection | None = None
        self._stack = contextlib.ExitStack()
        self._allow_unfired = False

    def __call__(self, *faults: Fault, seed: int = 0, allow_unfired: bool = False) -> ndpy.Adapter:
        """Return an adapter with these faults, open until the test ends.

        The process's other adapters have them too until then: those of soft0 all, others if they are opened later. So
        have the programs and peers that the test starts. Each process counts for itself.

        Parameters:
            faults: of a scenario.
            seed: its seed.
            allow_unfired: whether the test may end before each of them has fired.
        Raises:
            ScenarioError: the adapter cannot have such a fault.
        """
        if self._injection is not None:
            raise RuntimeError("a test has one scenario: give all faults to one call of rdma_faults()")
        self._allow_unfired = allow_unfired
        self._injection = self._stack.enter_context(Injection(Scenario(faults, seed), self._executor))
        self._injection.begin()
        self._environment.update(self._injection.variables(self._environment))
        return self._stack.enter_context(leaks.closing(ndpy.open_adapter(self._adapter_name)))

    def report(self) -> Report:
        """What has fired until now."""
        if self._injection is None:
            return Report(Scenario(), ())
        return self._injection.report()

    def __enter__(self) -> Faults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        report = self.report()
        self._stack.close()
        if report.never and not self._allow_unfired and not self.failed:
            older = (
                "\n(adapters that were open before rdma_faults() have no faults)" if self._executor == "shim" else ""
            )
            pytest.fail(f"{report}{older}", pytrace=False)

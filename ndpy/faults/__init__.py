"""A faulty adapter: what goes wrong, when, and what has become of it.

    scenario = Scenario([Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")])

docs/faults.md describes it, and the command `ndpy faults` runs programs in any language with such a scenario.
"""

from ndpy.faults.report import Fired as Fired
from ndpy.faults.report import NeverFiredError as NeverFiredError
from ndpy.faults.report import Report as Report
from ndpy.faults.scenario import Fault as Fault
from ndpy.faults.scenario import Scenario as Scenario
from ndpy.faults.scenario import ScenarioError as ScenarioError

__all__ = ["Fault", "Fired", "NeverFiredError", "Report", "Scenario", "ScenarioError"]

"""Names what is wrong with a run: rules over its metrics and episodes, each with evidence and a remedy.

`diagnose(folder)` reads a run that has ended or still trains; `LiveDiagnosis` looks at each step while it trains.
docs/diagnosis.md explains every finding. A rule is a pure function of a `RunView`.
"""

from roll_flash.diagnosis.findings import Evidence, Finding
from roll_flash.diagnosis.live import LiveDiagnosis
from roll_flash.diagnosis.rules import diagnose, find

__all__ = ["Evidence", "Finding", "LiveDiagnosis", "diagnose", "find"]

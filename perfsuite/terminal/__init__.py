"""What people read in the terminal: the summary of a run, the plan of one, the line of a case that is being sampled.

Pure: records in, text out. The text has no newline at its end and no line wider than asked for.
"""

from perfsuite.terminal.live import progress_line
from perfsuite.terminal.overview import summary
from perfsuite.terminal.planned import PlanRow, plan

__all__ = ["PlanRow", "plan", "progress_line", "summary"]

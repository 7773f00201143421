"""The errors that perfsuite shows to people: one line that names the place, the value and the remedy."""

from __future__ import annotations


class PerfsuiteError(Exception):
    """The root of the tree; the message is one line and is shown without a traceback."""


class UsageError(PerfsuiteError):
    """What was asked for cannot be done here: an option, a marker, a name. pytest exits 4."""


class HardwareError(UsageError):
    """The named hardware is unknown, ambiguous, absent or unusable. pytest exits 4."""


class CaseError(PerfsuiteError):
    """A case declares something that cannot be measured; the message names the case or the argument."""


class UncountableError(CaseError):
    """An operator whose FLOPs are not known; the message names it."""


class FileError(PerfsuiteError):
    """A file that perfsuite reads or writes is unusable; the message names file and field. pytest exits 4."""


class WorkerError(PerfsuiteError):
    """A worker process could not start or broke the protocol. pytest exits 4."""

"""Errors that LCT raises beside the built-in ``TypeError`` and ``ValueError`` for bad arguments."""


class LctError(Exception):
    """Base class of LCT's own errors."""


class CorruptPayloadError(LctError, ValueError):
    """A payload contradicts its description: a wrong size, version, header, marker, reference."""


class CorruptFileError(LctError, ValueError):
    """A file is truncated, damaged or not of the expected format."""


class ArenaExhaustedError(LctError, RuntimeError):
    """The overflow arena cannot take what may spill; nothing was overwritten."""

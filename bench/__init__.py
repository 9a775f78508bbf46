"""Measuring and recording: timers, where a number was measured, and the one CSV schema of the repository."""

from bench.provenance import Provenance, device_name, provenance
from bench.records import ResultsFileError, Row, append_rows, check_results_file

__all__ = ["Provenance", "ResultsFileError", "Row", "append_rows", "check_results_file", "device_name", "provenance"]

"""Errors of training that a user can fix."""


class TrainingError(RuntimeError):
    """Training cannot start or go on; the text says why and what to do."""

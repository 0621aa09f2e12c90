"""What can go wrong outside gateway, engine and tiers; the command line prints these as one line and exits with their code.

OpsError                 exit 1
├── ConfigError          exit 2   a key, a value or a file of the configuration: fix it and start again
├── ModelError           exit 3   the model can't be fetched, converted or read
├── NotRunning           exit 4   nobody answers at that address
├── AlreadyRunning       exit 5   the data directory or the port is taken
└── BadData              exit 6   `verify` found damage
"""

from __future__ import annotations


class OpsError(Exception):
    """Message says what happened and what to do about it."""

    exit_code = 1


class ConfigError(OpsError):
    exit_code = 2


class ModelError(OpsError):
    exit_code = 3


class NotRunning(OpsError):
    exit_code = 4


class AlreadyRunning(OpsError):
    exit_code = 5


class BadData(OpsError):
    exit_code = 6

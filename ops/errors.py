"""What can go wrong outside gateway, engine and tiers; the command line prints these as one line and exits with their code.

OpsError                 exit 1
├── ConfigError          exit 2   a key, a value or a file of the configuration: fix it and start again
├── ModelError           exit 3   the model can't be fetched, converted, read or served
├── NotRunning           exit 4   nobody answers at that address
├── StateRefused         exit 5   not in this state: stop or start something first, or confirm
│   └── AlreadyRunning            the data directory or the port is taken
└── BadData              exit 6   damage was found
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


class StateRefused(OpsError):
    exit_code = 5


class AlreadyRunning(StateRefused):
    pass


class BadData(OpsError):
    exit_code = 6

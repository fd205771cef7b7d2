"""Every error dear-tune raises on purpose.

DearTuneError
├── MissingExtraError            an optional dependency is not installed
├── ConfigurationError           a service cannot run with the settings it was given
├── InvalidSpaceError            a study whose search space makes no sense
├── ServiceError                 anything between a client and the service
│   ├── InvalidUrlError          what was given as the service's address is none
│   ├── ServiceUnavailableError  no usable answer came: try again later
│   └── RequestRefusedError      the service answered 4xx, with a problem document
│       ├── NotFoundError        404
│       └── ConflictError        409
└── TrainingError                raised in a training process
    ├── UnsupportedError         the engine refuses a model or optimizer it would get wrong
    ├── StaleParameterError      a parameter was used before its update was applied
    ├── GradientError            a gradient came, or changed, after it was communicated
    └── CommunicationError       a collective failed: a peer died or the network broke
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dear_tune.contract import Problem

__all__ = [
    "CommunicationError",
    "ConfigurationError",
    "ConflictError",
    "DearTuneError",
    "GradientError",
    "InvalidSpaceError",
    "InvalidUrlError",
    "MissingExtraError",
    "NotFoundError",
    "RequestRefusedError",
    "ServiceError",
    "ServiceUnavailableError",
    "StaleParameterError",
    "TrainingError",
    "UnsupportedError",
]


class DearTuneError(Exception):
    """The root of the tree: catch this to catch everything dear-tune raises on purpose."""


class MissingExtraError(DearTuneError, ImportError):
    """A command or class needs an optional dependency that is not installed.

    Args:
        what: what was asked for, as the user would call it.
        extra: the extra of the `dear-tune` distribution that brings it.
    """

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{what} needs the extra [{extra}]. Install it with:\n  pip install 'dear-tune[{extra}]'")


class ConfigurationError(DearTuneError):
    """A service cannot run as configured: a setting, its database or its address is of no use."""


class InvalidSpaceError(DearTuneError, ValueError):
    """A study's layers, default and bounds contradict each other."""


class ServiceError(DearTuneError):
    """Anything that goes wrong between a client and the tuning service."""


class InvalidUrlError(ServiceError, ValueError):
    """What was given as the service's address is no HTTP address."""


class ServiceUnavailableError(ServiceError):
    """No usable answer came from the service, also after retries; trying again later may help."""


class RequestRefusedError(ServiceError):
    """The service understood the request and refused it (4xx).

    Args:
        problem: the problem document (RFC 9457) of the answer.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        fields = "".join(f"\n  {error.field}: {error.message}" for error in problem.errors)
        super().__init__(f"{problem.title}: {problem.detail}{fields}")


class NotFoundError(RequestRefusedError):
    """No such study or trial (404)."""


class ConflictError(RequestRefusedError):
    """The request contradicts what the service already holds (409)."""


class TrainingError(DearTuneError, RuntimeError):
    """Raised in a training process, where going on would mean wrong numbers."""


class UnsupportedError(TrainingError):
    """The engine refuses a model, optimizer or process group that it would get wrong."""


class StaleParameterError(TrainingError):
    """A parameter was used in forward before its pending update was applied."""


class GradientError(TrainingError):
    """A gradient appeared, or was changed, after it had been communicated."""


class CommunicationError(TrainingError):
    """A collective failed: a peer died, timed out, or the network broke."""

"""Every error that Cardan raises on purpose.

It does not know where an error is shown: the server maps these to HTTP, the CLI to an exit code.

::

    CardanError
    ├── ConfigError                 a flag or setting is wrong, or two contradict each other
    ├── ModelError                  something about the model that was asked for
    │   ├── ModelNotFoundError      no such folder, file, alias or hub id
    │   ├── CheckpointError         weights are missing, truncated, corrupted or of a refused kind
    │   ├── ModelConfigError        its config lacks a field or contradicts itself
    │   └── UnsupportedModelError   no implementation for this architecture
    ├── PlatformError
    │   ├── PlatformNotFoundError   no plugin of that name, or none can run here
    │   ├── PlatformLoadError       the plugin is there and cannot be loaded
    │   ├── PlatformApiError        the plugin was written for another PLATFORM_API
    │   └── UnsupportedError        the platform cannot do what was asked, and says why
    ├── PluginError                 a general plugin fails to load or does not fit
    ├── GoldenFileError             a golden file is damaged, of a later version, or does not fit the other
    ├── MemoryPlanError             weights, pool and head-room do not fit
    ├── RequestError                one request is wrong (HTTP 400)
    │   ├── PromptTooLongError      prompt beyond the context or the pool
    │   └── UnknownModelError       the model name in the request is not served (HTTP 404)
    ├── QueueFullError              too many waiting requests (HTTP 503, Retry-After)
    ├── EngineBusyError             the engine does not answer in time, and may later (HTTP 503, Retry-After)
    ├── RequestTimeoutError         the request ran longer than the server lets one run (HTTP 504)
    ├── RequestAbortedError         the request was aborted by the user, the client or shutdown
    └── EngineDeadError             a process of the engine ended; open requests get this
"""

from __future__ import annotations


class CardanError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(CardanError, ValueError):
    """A setting is wrong or contradicts another; the message names the flag."""


class ModelError(CardanError):
    """Something about the model that was asked for."""


class ModelNotFoundError(ModelError):
    """No such folder, file, alias or hub id."""


class CheckpointError(ModelError):
    """Weights are missing, truncated, corrupted, or of a kind that is refused."""


class ModelConfigError(ModelError):
    """The model's config lacks a field or contradicts itself."""


class UnsupportedModelError(ModelError):
    """No implementation for this architecture."""


class PlatformError(CardanError):
    """Something about a platform plugin."""


class PlatformNotFoundError(PlatformError):
    """No plugin of that name is installed, or none can run on this machine."""


class PlatformLoadError(PlatformError):
    """The plugin is installed and failed to load."""


class PlatformApiError(PlatformError):
    """The plugin was written for another version of the platform API."""


class UnsupportedError(PlatformError):
    """The platform cannot do what was asked; the message has the reason and an alternative."""


class PluginError(CardanError):
    """A general plugin fails to load, or implements no hook that exists."""


class GoldenFileError(CardanError):
    """A golden file is missing, damaged, of a later version, or does not fit what it is compared with."""


class MemoryPlanError(CardanError):
    """Weights, KV pool and head-room do not fit into the memory that may be used."""


class RequestError(CardanError, ValueError):
    """One request is wrong.

    Attributes:
        param: the request field at fault, where there is one.
        code: a short machine-readable word, such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLongError(RequestError):
    """The prompt does not fit the context length or the KV pool."""


class UnknownModelError(RequestError):
    """The model named in the request is not the one served."""


class QueueFullError(CardanError):
    """Too many requests are waiting.

    Attributes:
        retry_after_s: when to come back, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineBusyError(CardanError):
    """The engine does not answer in time; it may later.

    Attributes:
        retry_after_s: when to come back, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(CardanError):
    """The request ran longer than the server lets one run; it was aborted."""


class RequestAbortedError(CardanError):
    """The request was aborted."""


class EngineDeadError(CardanError):
    """A process of the engine ended, so no request can be answered any more."""

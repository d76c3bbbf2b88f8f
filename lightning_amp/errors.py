"""Define the errors that a user can cause; each states what was found, what is allowed and what to do."""


class AmpError(Exception):
    """Base of every error that lightning_amp raises for a user's mistake; the command line exits with 2 on it."""


class DataError(AmpError):
    """A data file or directory cannot be used as asked."""


class PlanError(AmpError):
    """No legal plan answers the request, or a plan asks for something illegal or not yet built."""


class InstallError(AmpError):
    """A plan does not fit the module it is installed on; the module is left as it was."""


class ModelError(AmpError):
    """The reference model was given settings or a batch that it cannot use."""


class ShardError(AmpError):
    """An operator cannot be computed on the parts of a sharded tensor."""


STATUS_OF_INTERRUPT = 130
"""Exit status of a process that SIGINT has ended, as shells have it."""

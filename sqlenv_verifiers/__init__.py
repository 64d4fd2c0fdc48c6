"""SQLEnv for `verifiers`, and so for prime-rl: a taskset of questions, and the tools that explore and answer.

    eval sqlenv-verifiers --env.taskset.data spider:PATH

It needs the package `verifiers` (0.4 and its kin), which SQLEnv does not install.
"""

from sqlenv_verifiers.taskset import SQLEnvTaskset

__all__ = ["SQLEnvTaskset"]

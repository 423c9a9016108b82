"""Load and call a user's function that scores a finished session: `module:function` or `path/to/file.py:function`.

Its argument is the trajectory (messages, tokens; `task.kwargs` is the session's metadata). It returns a number, or a
number and a dict of info, in which `success` says if the task was solved. It may be a coroutine function.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Mapping
from typing import Any

from roll_flash.config.user_code import described, load_function
from roll_flash.errors import RollFlashError
from roll_flash.processes.background import call_sync_or_async
from roll_flash.types import Trajectory, as_reward

TIMEOUT_S = 600.0


class VerifierError(RollFlashError):
    """The verifier raised, hung, or returned an invalid reward."""


class Verifier:
    def __init__(self, reference: str) -> None:
        """Raises ConfigError if the function cannot be loaded."""
        self.reference = reference
        self._function = load_function(reference, "--verifier")

    async def score(self, episode: Trajectory) -> tuple[float, dict[str, Any]]:
        """Call the verifier. Raises VerifierError."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await call_sync_or_async(self._function, episode)
        except TimeoutError:
            raise VerifierError(f"{self.reference} took longer than {TIMEOUT_S:g} s") from None
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise VerifierError(f"{self.reference} raised {described(error)}") from error
        reward, info = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(info, Mapping):
            raise VerifierError(f"{self.reference} returned {reprlib.repr(found)}, not a number, or one and a dict")
        try:
            return as_reward(reward, f"what {self.reference} returned"), dict(info)
        except ValueError as error:
            raise VerifierError(str(error)) from None

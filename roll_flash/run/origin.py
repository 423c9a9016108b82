"""Tells the runs that this user made on this machine from folders that came from elsewhere.

What a run's files name is code: environments with their arguments, functions, images, addresses that get keys. Commands
that use it require that the folder was made here. `RunDir` marks it, by a hash that only this user can make, of the
config and of the number of its file: a copy has another number.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from roll_flash.checked_files import read_checked
from roll_flash.errors import ConfigError, RunError

MARK = ".made_here"
KEY_BYTES = 32


def mark_as_own(folder: Path) -> None:
    """Mark a run folder with a config. Without a home that can be written, there is no mark."""
    try:
        key = _key() or _new_key()
    except OSError:
        return
    (folder / MARK).write_text(_hash(key, folder))


def require_own(folder: Path, *, trusted: bool) -> None:
    """Raises ConfigError for a run that was not made here, unless the user trusts it."""
    if not trusted and not _is_own(folder):
        raise ConfigError(
            f"{folder}: was not made here by you, and this runs what its files name: programs, images, addresses; if "
            "you trust whoever made it, add --trust"
        )


def _is_own(folder: Path) -> bool:
    try:
        key = _key()
        mark = read_checked(folder / MARK, 2 * KEY_BYTES)
        return key is not None and hmac.compare_digest(mark, _hash(key, folder).encode())
    except (OSError, RunError):
        return False


def _hash(key: bytes, folder: Path) -> str:
    config = folder / "config.yaml"
    return hmac.new(key, f"{config.stat().st_ino}\n".encode() + read_checked(config), "sha256").hexdigest()


def _key_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "roll-flash" / "key"


def _key() -> bytes | None:
    try:
        key = read_checked(_key_file(), KEY_BYTES)
    except FileNotFoundError:
        return None
    return key if len(key) == KEY_BYTES else None


def _new_key() -> bytes:
    """Make the key of this user, whole at once: another run may begin now."""
    file, key = _key_file(), secrets.token_bytes(KEY_BYTES)
    file.parent.mkdir(0o700, parents=True, exist_ok=True)
    own = file.with_name(f"key.{secrets.token_hex(8)}")
    own.touch(0o600)
    own.write_bytes(key)
    try:
        os.link(own, file)
    except FileExistsError:
        key = _key() or key
    finally:
        own.unlink()
    return key

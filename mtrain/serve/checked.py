"""Checks a service's model, key and libraries before torch is loaded, also on a login node."""

import os
import secrets
from importlib import import_module
from pathlib import Path

from mtrain.arch.adapters import keys_of_full_training
from mtrain.base.errors import ConfigError
from mtrain.base.files import disk_faults
from mtrain.base.plain_files import read_plain_file
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection

_LIBRARIES = ("starlette", "uvicorn", "google.protobuf", "pyarrow")
"""Libraries of the extra `serve`."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_BYTES = 4096


def check_served(model: ModelSection, adapter: AdapterSection | None) -> None:
    """Refuses a model that clients cannot train, and adapters that cannot share it."""
    if model.output.head_rows or model.layers_ahead:
        raise ConfigError("mtrain serve serves a language model without a head and without model.mtp_depths")
    if adapter is not None and (keys := keys_of_full_training(model, adapter)):
        raise ConfigError(
            f"mtrain serve trains adapters on one frozen model, but {', '.join(keys)} trains a part of it; remove it"
        )


def check_libraries() -> None:
    for name in _LIBRARIES:
        try:
            import_module(name)
        except ModuleNotFoundError:
            raise ConfigError(
                f"mtrain serve needs {name}, which is not installed; pip install 'mtrain[serve]'"
            ) from None


def check_token(host: str, token: str | None) -> None:
    """Refuses a service that others could use without a key, or a key that no client could send."""
    if token is None and host not in _LOOPBACK:
        raise ConfigError(f"other machines can reach --host {host}, but there is no key; give --token-file FILE")
    if token is not None and not (token.startswith("tml-") and token.isascii() and len(token) >= 20):
        raise ConfigError("the key in --token-file must be tml- and at least 16 more letters, as clients require")


def read_token(path: Path) -> str:
    try:
        return read_plain_file(path, _MOST_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"--token-file {path} cannot be read: {fault}; write the key into it") from None


def make_token(path: Path) -> None:
    """Writes a new key into a file that only the user can read, unless the file exists."""
    if path.exists():
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} holds the key of a service, but others can read it; run chmod 600 on it")
        return
    with disk_faults(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL: never replaces a file that appeared meanwhile
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"tml-{secrets.token_hex(24)}\n")

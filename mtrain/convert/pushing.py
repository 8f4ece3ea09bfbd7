"""Uploads an exported folder to the Hugging Face Hub with huggingface_hub."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.base.errors import ConfigError, MachineError, MtrainError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)


def logged_in(name: str) -> "HfApi":
    """Checks before an export that a folder can be uploaded under a name.

    Raises:
        ConfigError: The name is not `org/name`, or nobody is logged in.
        MachineError: The Hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    if not _NAME.fullmatch(name):
        raise ConfigError(f"--push {name} is not the name of a repository on the hub; write it as org/name")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    with _named_faults(f"--push {name}: {api.endpoint} cannot be reached", "export without it, and upload later"):
        try:
            api.whoami()
        except LocalTokenNotFoundError:
            raise ConfigError(f"--push {name} needs a login; run hf auth login, or set HF_TOKEN") from None
        except HfHubHTTPError as fault:
            if fault.response is not None and fault.response.status_code == 401:
                raise ConfigError(
                    f"--push {name}: the token is not valid; run hf auth login, or set HF_TOKEN"
                ) from None
            raise
    return api


def push(folder: Path, name: str, api: "HfApi") -> str:
    """Uploads a folder in one commit; creates a private repository if it does not exist.

    Returns:
        Address of the commit.

    Raises:
        MachineError: The upload failed; the folder stays.
    """
    with _named_faults(f"{folder} is complete, but was not uploaded", f"run hf upload {name} {folder}"):
        api.create_repo(name, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload an export of mtrain")
        return commit.commit_url


@contextlib.contextmanager
def _named_faults(what: str, remedy: str) -> Iterator[None]:
    """Turns errors of huggingface_hub and of its connections into one message."""
    try:
        yield
    except MtrainError:
        raise
    except Exception as fault:  # errors of connections come from its HTTP library
        line = " ".join(str(fault).split())[:300] or type(fault).__name__
        raise MachineError(f"{what}: {line}; {remedy}") from fault

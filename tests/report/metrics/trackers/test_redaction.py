"""Secrets stay on the machine."""

import pytest

from mtrain.report.metrics.trackers.open import is_secret_name, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "apiKey",
        "hub.api_key",
        "AWS_SECRET_ACCESS_KEY",
        "db-password",
        "data.auth",
        "x.accessKey",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["data.tokenizer", "train.tokens_per_micro_batch", "loss.chunk_tokens", "author", "keyboard", "model.keys"]
)
def test_other_names_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_secrets_are_taken_out_by_name_by_value_and_of_addresses() -> None:
    values = {
        "train.lr": 0.1,
        "hub.token": "abc",
        "hub.empty_token": None,
        "run.notes": "started with s3cr3t-value here",
        "data.path": "https://me:pw@host/x",
        "data.train": [{"path": "a", "api_key": "k"}, "s3cr3t-value"],
    }
    environment = {"HF_TOKEN": "s3cr3t-value", "SHORT_TOKEN": "a", "HOME": "host"}
    assert without_secrets(values, environment) == {
        "train.lr": "0.1",
        "hub.token": "<redacted>",
        "hub.empty_token": "null",
        "run.notes": "started with <redacted> here",
        "data.path": "https://<redacted>@host/x",
        "data.train": '[{"path": "a", "api_key": "<redacted>"}, "<redacted>"]',
    }

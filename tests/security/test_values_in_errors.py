"""Error blocks, which notebooks save, show no values of variables whose names speak of secrets, and none at all on request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from monarch_kernel.actor import ProcMesh
from monarch_kernel.errors import RemoteError
from monarch_kernel.notebook.view.errors import error_block
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.module_errors import model_notes
from monarch_kernel.runtime.diagnostics.reprs import SWITCH, describe_variable
from tests.support.waiting import LONG_S

VALUE = "hunter2-hunter2"
NAMES = [
    "token",
    "hf_token",
    "HF_TOKEN",
    "accessToken",
    "password",
    "db_passwd",
    "passphrase",
    "pwd",
    "secret",
    "CLIENT_SECRET",
    "credentials",
    "key",
    "api_key",
    "apikey",
    "ssh_keys",
    "cookie",
    "bearer",
    "auth",
    "basic_auth",
    "authHeader",
    "Authorization",
    "cookies",
    "cred",
    "db_creds",
    "dsn",
    "SENTRY_DSN",
    "jwt",
    "user.pw",
    "connection_string",
    "conn_str",
    "db_pass",
    "dbPass",
    "smtp.pass",
    "pass1",
    "PASSCODE",
    "card_pin",
    "private_key_pem",
    "pem",
    "sas",
    "totp",
    "session_id",
    "sessionid",
    "csrf",
    "mnemonic",
    "seed_phrase",
    "slack_webhook",
    "connectionString",
    "self.config.api_key",
    "secrets.aws",
]


OTHERS = (
    "pin_memory",
    "compass",
    "bypass",
    "passes",
    "spin",
    "seed",
    "side",
    "sigma",
    "sass",
    "webhdfs",
    "open",
    "stem",
)


@pytest.mark.parametrize(
    "value",
    [VALUE, VALUE.encode(), [VALUE], (VALUE,), {VALUE: 1}, {VALUE}, 12345678, 1.5, True, np.float64(1.5), VALUE * 99],
)
def test_a_name_that_speaks_of_a_secret_hides_its_value(value: object) -> None:
    assert {name: describe_variable(name, value) for name in NAMES} == dict.fromkeys(NAMES, "…")


def test_shapes_and_types_are_no_content() -> None:
    assert describe_variable("tokens", torch.zeros(8, 128, dtype=torch.int64)) == "Tensor[8, 128] int64 cpu"
    assert describe_variable("key", torch.tensor(17)) == "Tensor[] int64 cpu"
    assert describe_variable("keys", np.zeros((2, 3))) == "ndarray[2, 3] float64"
    assert describe_variable("tokenizer", Tokenizer()) == "Tokenizer"
    assert describe_variable("lr", 0.1) == "0.1"
    for name in (
        "author",
        "authors",
        "authority",
        "patch",
        "path",
        "sacred",
        "credit",
        "spawn",
        "url",
        "optimizer",
        *OTHERS,
    ):
        assert describe_variable(name, "me") == "'me'"


TOKENS = [
    "sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12",
    "sk-ant-api03-Ab12Cd34Ef56Gh78Ij90-Kl12_Mn34",
    "sk_live_Ab12Cd34Ef56Gh78Ij90",
    "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "ghp_Ab12Cd34Ef56Gh78Ij90Kl12Mn34Op56Qr78",
    "gho_Ab12Cd34Ef56Gh78Ij90Kl12Mn34Op56Qr78",
    "github_pat_11Ab12Cd34Ef56Gh78_Ij90Kl12Mn34",
    "glpat-Ab12Cd34_Ef56-Gh78Ij",
    "xoxb-123456789012-Ab12Cd34Ef56",
    "https://hooks.slack.com/services/T01/B02/Ab12Cd34Ef56",
    "ASIAABCDEFGHIJKLMNOP",
    "AIzaSyAb12Cd34Ef56Gh78Ij90Kl12Mn34Op56",
    "npm_Ab12Cd34Ef56Gh78Ij90Kl12Mn34Op56Qr78",
    "pypi-AgEIcHlwaS5vcmcCJDAb12Cd34",
    "nvapi-Ab12Cd34Ef56Gh78Ij90Kl12",
    "gsk_Ab12Cd34Ef56Gh78Ij90Kl12",
    "SG.Ab12Cd34Ef56Gh78Ij.Kl12Mn34Op56Qr78St90",
    "12345678:AAAb12Cd34Ef56Gh78Ij90Kl12Mn34Op56",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl",
]
"""Made up, each in the form of a well-known one."""

WORDS = [
    "Asia-Pacific-region",
    "asia_pacific_dataset.csv",
    "eyjafjallajokull_2010.png",
    "sk-learn-contrib-package",
    "sk-SK.UTF-8",
    "hf_model_name_or_path",
    "hf_hub_download_folder",
    "ghp_import_of_pages",
    "task-0123456789abcdef",
    "disk-0123456789abcdef0123",
    "npm_config_registry_path",
    "layers.0.attention.key.weight",
    "d41d8cd98f00b204e9800998ecf8427e",
    "12:30:15 AA",
    "AKIAs are the ids of keys",
    "0x7f8a9b0c1d2e3f40",
    "550e8400-e29b-41d4-a716-446655440000",
    "model.safetensors.index.json",
    "gpt2-xl-1.5b-instruct-v0.2",
    "https://example.org/plot?sig=significant&sigma=0.123456789",
]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (f"https://me:{VALUE}@example.org/x", "'https://me:…@example.org/x'"),
        (f"https://{VALUE}@example.org/x.git", "'https://…@example.org/x.git'"),
        (f"postgresql+psycopg://me:{VALUE}@db:5432/runs", "'postgresql+psycopg://me:…@db:5432/runs'"),
        (f"redis://:{VALUE}@cache/0", "'redis://:…@cache/0'"),
        (f"https://me:{VALUE * 20}@example.org", "'https://me:…@example.org'"),
        (f"https://example.org/x?a=1&token={VALUE}&b=2", "'https://example.org/x?a=1&token=…&b=2'"),
        (f"https://example.org/x?X-Amz-Signature={VALUE}", "'https://example.org/x?X-Amz-Signature=…'"),
        ("https://x.blob/y?se=1&sig=Ab12Cd34%2BEf56Gh78%3D&sp=r", "'https://x.blob/y?se=1&sig=…&sp=r'"),
        (f"Bearer {VALUE}", "'Bearer …'"),
        (f"Authorization: Bearer {VALUE}", "'Authorization: …'"),
        (f"Cookie: id={VALUE}", "'Cookie: …'"),
        ("Basic aHVudGVyMjpodW50ZXIy", "'Basic …'"),
        (f"host=db user=me password={VALUE}", "'host=db user=me password=…'"),
        (f'{{"api_key": "{VALUE}"}}', """'{"api_key": "…"}'"""),
        ("hf_" + "x" * 34, "'…'"),
        ("sk-" + "x" * 48, "'…'"),
        ("ghp_" + "x" * 36, "'…'"),
        ("AKIA" + "X" * 16, "'…'"),
        *((token, "'…'") for token in TOKENS),
        *((f"use {token}, please", "'use …, please'") for token in TOKENS),
        *((token.encode(), "b'…'") for token in TOKENS),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "'…'"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE", "'-----BEGIN RSA PRIVATE KEY-----…'"),
        (f"https://me:{VALUE}@example.org".encode(), "b'https://me:…@example.org'"),
        (["Bearer hunter2", 1], "['Bearer …', 1]"),
        (["login", "--password", VALUE], "['login', '--password', …]"),
        (["-pass", 1234], "['-pass', …]"),
        (("api_key", VALUE), "('api_key', …)"),
        (["tokens", "labels"], "['tokens', 'labels']"),
        (("tokens", "labels", "keys"), "('tokens', 'labels', 'keys')"),
        (f"webhook: https://example.org/{VALUE}", "'webhook: …'"),
        (f"aws_secret_access_key={VALUE}", "'aws_secret_access_key=…'"),
        (f"accessKey: {VALUE}", "'accessKey: …'"),
        (f'{{"smtp": {{"pass": "{VALUE}"}}}}', """'{"smtp": {"pass": "…"}}'"""),
        (f"curl -u me:{VALUE} https://x", "'curl -u me:… https://x'"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_under_any_name(value: object, shown: str) -> None:
    assert describe_variable("x", value) == shown


@pytest.mark.parametrize(
    "value",
    [
        "https://example.org:8080/a/b@c",
        "https://example.org/a?b=1",
        "s3://bucket/key@2",
        "the bearer of news",
        "Basic training",
        "token 17 of 20",
        "me@example.org",
        "skip-connection",
        "12:30:15",
        "max_tokens is 5",
        "",
        *WORDS,
    ],
)
def test_other_texts_are_shown_whole(value: str) -> None:
    assert describe_variable("x", value) == repr(value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (VALUE, "str"),
        (5, "int"),
        ([VALUE], "list"),
        (torch.tensor(5), "Tensor[] int64 cpu"),
        (np.int64(5), "int64"),
        (None, "NoneType"),
    ],
)
def test_the_setting_leaves_out_all_values(monkeypatch: pytest.MonkeyPatch, value: object, shown: str) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert describe_variable("x", value) == shown


class Tokenizer: ...


class Attention(torch.nn.Module):
    def forward(self, key: Any, password: str) -> Any:
        raise ValueError("no")


def fails(api_key: str, url: str, password: str) -> None:
    raise MemoryError(f"at {url}", len(api_key + password))


def test_no_part_of_a_report_has_the_value() -> None:
    secrets = VALUE * 200_000, VALUE
    with pytest.raises(MemoryError) as caught:
        fails(secrets[0], "here", secrets[1])
    failure = describe(caught.value)
    assert VALUE not in repr(failure.frames)
    assert "('url', \"'here'\")" in repr(failure.frames)
    assert VALUE not in "\n".join(failure.notes)
    with pytest.raises(ValueError, match="no") as refused:
        Attention()(torch.zeros(2), VALUE)
    assert model_notes(refused.value)[0].endswith("called with key: Tensor[2] float32 cpu")


class Refuses(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.check()

    def check(self) -> None:
        raise ValueError("no")


def test_the_constructor_of_a_module_is_not_its_forward() -> None:
    with pytest.raises(ValueError, match="no") as refused:
        Refuses()
    assert model_notes(refused.value) == ()


CELL = """
import os
os.environ["MONARCH_ERROR_VALUES"] = "SETTING"
api_key, url = "".join(["hunter2", "-", "hunter2"]), "https://example.org"
def fetch(api_key, url):
    return 1 / (len(api_key + url) * 0)
fetch(api_key, url)
"""


@pytest.mark.parametrize(("setting", "shown"), [("1", ("…", "'https://example.org'")), ("0", ("str", "str"))])
def test_the_block_of_a_cell_has_no_secret(procs: ProcMesh, setting: str, shown: tuple[str, str]) -> None:
    with pytest.raises(RemoteError) as caught:
        procs.run(CELL.replace("SETTING", setting)).get(LONG_S)
    for verbose in (False, True):
        block = "\n".join([*error_block(caught.value, color=False, verbose=verbose), ""])
        assert VALUE not in block
        assert f"api_key: {shown[0]}\n" in block
        assert f"url: {shown[1]}\n" in block

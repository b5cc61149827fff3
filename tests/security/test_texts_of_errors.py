"""Texts of exceptions, which notebooks save, show no secrets that the process knows or that their form gives away."""

from __future__ import annotations

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.errors import RemoteError
from monarch_kernel.notebook.view.errors import error_block
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.masking import Mask, _variables, mask_forms, secrets_near
from tests.security.test_values_in_errors import TOKENS, WORDS
from tests.support.waiting import LONG_S

VALUE = "hunter2-hunter2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"401 for https://me:{VALUE}@example.org/x", "401 for https://me:…@example.org/x"),
        (f"git clone https://{VALUE}@example.org/x failed", "git clone https://…@example.org/x failed"),
        (f"Bearer {VALUE} was refused: 403\nsee the log", "Bearer … was refused: 403\nsee the log"),
        (f"Authorization: Bearer {VALUE} failed", "Authorization: Bearer … failed"),
        (f"{{'Authorization': 'Bearer {VALUE}', 'x': 1}}", "{'Authorization': 'Bearer …', 'x': 1}"),
        ("Cookie: id=abc; x=y\n403", "Cookie: …\n403"),
        ("host=db password=swordfish user=me", "host=db password=… user=me"),
        ('{"api_key": "swordfish", "n": 5}', '{"api_key": "…", "n": 5}'),
        ("password: hunter2", "password: …"),
        (f"GET /x?a=1&token={VALUE}&b=2", "GET /x?a=1&token=…&b=2"),
        ("403 for https://x.blob/y?sig=Ab12Cd34%2BEf56Gh78%3D&sp=r", "403 for https://x.blob/y?sig=…&sp=r"),
        ("Incorrect API key provided: sk-proj-abcdefghijklmnop.", "Incorrect API key provided: …."),
        ("invalid hf_" + "x" * 34, "invalid …"),
        ("HTTP 401: token abcdef0123456789abcdef is invalid", "HTTP 401: token … is invalid"),
        ("AccountName=x;AccountKey=Ab12Cd34==;EndpointSuffix=y", "AccountName=x;AccountKey=…;EndpointSuffix=y"),
        ("Command '['git', '--password', 'swordfish']' returned 1", "Command '['git', '--password', '…']' returned 1"),
        ("Command 'x --api-key hunter2 -v' returned 1", "Command 'x --api-key … -v' returned 1"),
        ("Command 'curl -u me:swordfish https://x' returned 1", "Command 'curl -u me:… https://x' returned 1"),
        ("[('x-api-key', 'swordfish'), ('a', 'b')]", "[('x-api-key', '…'), ('a', 'b')]"),
        ('{"smtp": {"pass": "swordfish"}}', '{"smtp": {"pass": "…"}}'),
        ("{'auth': 'swordfish', 'pin': b'1234'}", "{'auth': '…', 'pin': b'…'}"),
        *((f"401 with {token}: expired", "401 with …: expired") for token in TOKENS),
        *((f"{{'x': '{token}'}}", "{'x': '…'}") for token in TOKENS),
        ("bad -----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nhere", None),
    ],
)
def test_a_secret_is_hidden_and_the_rest_of_the_text_stays(text: str, shown: str | None) -> None:
    assert mask_forms(text) == (shown or "bad -----BEGIN RSA PRIVATE KEY-----…\nhere")


@pytest.mark.parametrize(
    "text",
    [
        "name 'token' is not defined",
        "no bearer token",
        "cookie: monster",
        "password: must be a string",
        "max_tokens=5, got tokens: 7",
        "size mismatch for token_embeddings: copying a param with shape torch.Size([3])",
        "bad signature: foo(x, y2)",
        "expects tokens: Tensor[8, 128] int64",
        "secret: str | None = None",
        "unexpected token model.layers.constructor",
        "no such file: https://example.org:8080/a/b@c",
        "KeyError: 'layers.0.weight'",
        "account key: must be a string",
        "argument --token: expected one argument",
        "unrecognized arguments: --max-tokens 5 --password",
        "the option --password is required",
        "docker run -u 1000:1000 image",
        "expected ('tokens', 'labels'), got ('secret', )",
        "{'pass': 3, 'auth': None}",
        "bypass 'pass' or 'fail'",
        *(f"no such value: {word}" for word in WORDS),
    ],
)
def test_a_text_without_a_secret_stays(text: str) -> None:
    assert mask_forms(text) == text


@pytest.mark.parametrize(
    "part",
    [
        "a-",
        "a.",
        "x",
        "://",
        "a://b",
        "token",
        "token ",
        "bearer ",
        "a=b&",
        "key: '",
        "sk-",
        "eyJ",
        "SG.a",
        "--token ",
        "-u a",
        "'pass' ",
    ],
)
def test_a_long_text_ends(part: str) -> None:
    assert mask_forms(part * 2_000) == part * 2_000


def login(api_key: str, key: str, token: str, path_secret: str) -> None:
    problem = ValueError(f"refused {api_key!r} for {key} {token} in {path_secret}")
    if hasattr(problem, "add_note"):
        problem.add_note(f"key {api_key}")
    raise problem


def failing(api_key: str = VALUE) -> BaseException:
    try:
        try:
            login(api_key, "layers.0.weight", "hello", "/run/secrets/db")
        except ValueError as error:
            raise RuntimeError(f"no login with {api_key}") from error
    except RuntimeError as error:
        return error


def test_values_of_variables_with_the_names_of_secrets_are_hidden_in_the_whole_report() -> None:
    failure = describe(failing())
    assert failure.message == "no login with …"
    assert failure.chain[0].message == "refused '…' for layers.0.weight hello in /run/secrets/db"
    assert VALUE not in repr((failure.traceback, failure.notes, failure.added_notes, failure.chain, failure.frames))


def test_values_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "swordfish")
    monkeypatch.setenv("SOME_KEY", "a0b1c2d3e4f5a6b7c8d9")  # looks like a random one
    for name, value in (
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_TOKEN_PATH", "/home/me/token"),
        ("HOT_KEY", "ctrl-alt-1"),
    ):
        monkeypatch.setenv(name, value)
    assert secrets_near(ValueError()) & {
        "swordfish",
        "a0b1c2d3e4f5a6b7c8d9",
        "false",
        "/home/me/token",
        "ctrl-alt-1",
    } == {
        "swordfish",
        "a0b1c2d3e4f5a6b7c8d9",
    }
    assert describe(ValueError("swordfish, ctrl-alt-1: false")).message == "…, ctrl-alt-1: false"


class Client:
    __slots__ = ("__dict__", "config")

    def __init__(self) -> None:
        self.token = "a0b1c2d3e4f5a6b7c8d9"
        self.config = {"password": "swordfish", "lr": "constant", "key": "layers.0.weight"}

    @property
    def password(self) -> str:
        raise AssertionError("it was asked")

    def connect(self) -> None:
        config = self.config
        raise ConnectionError(f"{self.token}: {config['password']} {config['lr']} {config['key']}")


def test_values_of_attributes_and_of_keys_with_the_names_of_secrets_are_hidden() -> None:
    with pytest.raises(ConnectionError) as caught:
        Client().connect()
    failure = describe(caught.value)
    assert failure.message == "…: … constant layers.0.weight"
    assert "swordfish" not in repr((failure.traceback, failure.frames))


class Asks(type):
    """A metaclass that raises while this test runs; afterwards others may look at all classes."""

    is_watched = False

    def __getattribute__(cls, name: str) -> object:
        assert not Asks.is_watched, "it was asked"
        return super().__getattribute__(name)

    def __hash__(cls) -> int:
        assert not Asks.is_watched, "it was asked"
        return super().__hash__()


class Odd(metaclass=Asks):
    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise AssertionError("it was asked")


def test_no_code_of_an_object_runs_when_its_attributes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(odd: object, kind: object) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        fails(Odd(), Odd)
    monkeypatch.setattr(Asks, "is_watched", True)
    names = {name for name, _ in _variables(caught.value)}
    monkeypatch.undo()
    assert {"odd", "kind"} <= names


def test_many_objects_are_searched_soon() -> None:
    many = [dict.fromkeys(map(str, range(10_000)), "x") for _ in range(100)]
    names = {f"part{i}": each for i, each in enumerate(many)}
    with pytest.raises(ValueError, match="x") as caught:
        exec("raise ValueError('x')", {}, names)
    assert len(list(_variables(caught.value))) < 30_000


class Deprecated:
    """An object that prints a warning when something asks for its class, as torch.distributed.reduce_op does."""

    @property
    def __class__(self) -> type:
        raise AssertionError("it was asked")

    @__class__.setter
    def __class__(self, value: type) -> None: ...


def test_no_object_is_asked_for_its_class() -> None:
    def fails(api_key: object, password: str) -> None:
        raise ValueError(f"no {password}")

    with pytest.raises(ValueError, match="no hunter2") as caught:
        fails(Deprecated(), "hunter2")
    assert describe(caught.value).message == "no …"


def test_a_value_within_another_one_is_hidden_after_it() -> None:
    assert Mask(["hunter2", VALUE])(f"{VALUE} hunter2") == "… …"


def test_a_secret_at_the_cut_of_a_long_text_is_hidden() -> None:
    secret = "s3cr3t" * 500  # longer than what the cut leaves out around it
    try:
        password = secret
        raise ValueError("x" * 14_000 + password + "y" * 4_000)
    except ValueError as error:
        message = describe(error).message
    assert "s3cr3t" not in message


CELL = """
db_password = "-".join(["hunter2", "hunter2"])
raise ConnectionError(f"403 for https://me:{db_password}@example.org with {db_password}")
"""


def test_the_block_of_a_cell_hides_it(procs: ProcMesh) -> None:
    with pytest.raises(RemoteError) as caught:
        procs.run(CELL).get(LONG_S)
    for verbose in (False, True):
        block = "\n".join(error_block(caught.value, color=False, verbose=verbose))
        assert VALUE not in block
        assert "ConnectionError: 403 for https://me:…@example.org with …" in block

"""The settings of `sqlenv serve`: flags, else SQLENV_* variables, else defaults.

Guarantees: a wrong value is one line that names the flag or the variable and what is wrong with it (SettingsError); a
server that others can reach has a token, or says aloud that it has none; the token is never shown.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from env_server.cache import default_cache_dir
from env_server.data.loading import DEFAULT_SPEC
from env_server.errors import SQLEnvError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from sqlenv.parser import Parser

PREFIX = "SQLENV_"


class SettingsError(SQLEnvError):
    """A setting has a wrong value; the text names it and says what to set."""


class ServiceSettings(BaseSettings):
    """Everything that `sqlenv serve` can be told. What is not given is read from SQLENV_* variables."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    data: str = DEFAULT_SPEC
    """the data set: synthetic[:SEED], scrambled[:SEED], spider:PATH, bird:PATH, or a folder of your own"""
    answer_mode: AnswerMode = AnswerMode.VALUE
    """what ANSWER carries: a value, or a query that yields it"""
    step_budget: int = Field(default=15, gt=0)
    """steps in an episode"""
    host: str = Field(default="127.0.0.1", min_length=1)
    """address to bind; 0.0.0.0 for every IPv4 address of this machine"""
    port: int = Field(default=8000, ge=0, le=65535)
    """port to bind; 0 for a free one"""
    token: SecretStr | None = None
    """bearer token that clients must send; better set as the variable, since flags show in the list of processes"""
    insecure: bool = False
    """serve beyond loopback without a token"""
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """web pages that may connect besides the server's own, as origins separated by commas: https://lab.example.org"""
    workers: int = Field(default=1, ge=1, le=256)
    """processes that serve; as many as cores"""
    max_sessions: int = Field(default=1024, gt=0)
    """sessions that may be open at once; with several workers each has its share"""
    queue_size: int = Field(default=128, ge=0)
    """connections that may wait for a session; with several workers each has its share"""
    queue_timeout_s: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """seconds that a connection waits for a session before it is refused"""
    idle_timeout_s: float = Field(default=900.0, gt=0, allow_inf_nan=False)
    """seconds without a frame after which a session is closed"""
    max_frame_bytes: int = Field(default=1_048_576, ge=1024)
    """largest frame, and largest HTTP body, that a client may send"""
    messages_per_s: int = Field(default=200, ge=0)
    """frames that a session may send each second, with a burst of two seconds; 0: no limit"""
    grace_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """seconds that running episodes have to finish in when the server is told to stop"""
    query_workers: Annotated[tuple[int, int], NoDecode] = (4, 1)
    """query processes of each worker, for queries that take longer and for those that take very long: FAST,SLOW"""
    cache_dir: Path = Field(default_factory=default_cache_dir)
    """where generated data sets, imported tables and variants are kept"""
    docs: bool = False
    """serve the interactive API description at /docs even when a token is set"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """which events are logged on stderr"""

    @property
    def environment(self) -> EnvSettings:
        """What decides an episode."""
        return EnvSettings(step_budget=self.step_budget)

    @property
    def slots(self) -> int:
        """A worker's share of `max_sessions`."""
        return -(-self.max_sessions // self.workers)

    @property
    def queue_slots(self) -> int:
        """A worker's share of `queue_size`."""
        return -(-self.queue_size // self.workers)

    @field_validator("allowed_origins", "query_workers", mode="before")
    @classmethod
    def _split(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str):
            return value
        parts = tuple(part.strip() for part in value.split(",") if part.strip())
        if info.field_name == "query_workers" and len(parts) != 2:
            raise ValueError("there are two pools, FAST,SLOW. Write two numbers, as in 1,1")
        return parts

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        return host.removeprefix("[").removesuffix("]")

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            url = urlsplit(origin)
            if url.scheme not in ("http", "https") or f"{url.scheme}://{url.netloc}".lower() != origin.lower():
                raise ValueError(f"{origin!r} is no origin. Write a scheme and a host, as in https://lab.example.org")
        return tuple(origin.lower() for origin in origins)

    @field_validator("query_workers")
    @classmethod
    def _pools_have_workers(cls, sizes: tuple[int, int]) -> tuple[int, int]:
        if min(sizes) < 1:
            raise ValueError("each pool needs a process, as in 1,1")
        return sizes

    @field_validator("token")
    @classmethod
    def _fits_into_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        if token is None or not token.get_secret_value():
            return None
        if not all("!" <= character <= "~" for character in token.get_secret_value()):
            raise ValueError("the token may hold visible ASCII characters only, and no spaces")
        return token

    @field_validator("cache_dir")
    @classmethod
    def _at_home(cls, path: Path) -> Path:
        return path.expanduser()

    @model_validator(mode="after")
    def _others_need_a_token(self) -> ServiceSettings:
        if self.token is None and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached from other machines, and no token is set. Set {PREFIX}TOKEN to a secret "
                "that clients send, or --host 127.0.0.1, or, where the network is trusted, --insecure"
            )
        return self


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach the host: an address or `localhost`; any other name is taken as not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_settings(argv: Sequence[str]) -> tuple[ServiceSettings, str]:
    """Return the settings for the flags and this process's variables, and a text that shows them resolved.

    Raises SettingsError for a wrong value; exits as argparse does for --help and flags that do not exist.
    """
    parser = add_settings(Parser(prog="sqlenv serve", description=_DESCRIPTION, epilog=_EXAMPLES))
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    settings = make_settings(given)
    return settings, _resolved(settings, given, os.environ)


def make_settings(given: Mapping[str, str]) -> ServiceSettings:
    """Return the settings for the values of flags and this process's variables. Raises SettingsError."""
    try:
        return ServiceSettings(**given)  # type: ignore[arg-type]  # pydantic reads them
    except ValidationError as error:
        raise SettingsError("; ".join(_wrong(details, given) for details in error.errors())) from None


_DESCRIPTION = """\
Serve the environment over the network, in OpenEnv's wire format: one WebSocket is one session. Training runs point
at it with --env ws://HOST:PORT; a browser finds a playground at http://HOST:PORT.
"""
_EXAMPLES = """\
examples:
  sqlenv serve                                             the built-in data set, for this machine alone
  sqlenv serve --data spider:data/spider --workers 4       one process per core, one capacity
  SQLENV_TOKEN=$(openssl rand -hex 32) sqlenv serve --host 0.0.0.0
                                                           for other machines; clients send the token
  sqlenv serve --port 0 --max_sessions 64 --queue_size 0   a free port; refuse at once when full

A flag wins over its variable. SIGTERM and Ctrl-C let running episodes finish for --grace_s seconds; a second one ends
the server at once. Events are logged on stderr, one JSON object a line.
"""


def add_settings(parser: Parser, names: Collection[str] = ServiceSettings.model_fields) -> Parser:
    """Give a parser the flags of these settings, and return it."""
    for name in names:
        field = ServiceSettings.model_fields[name]
        text = f"{field.description} (default: {_default(name, field)}; {_variable(name)})".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(f"--{name}", nargs="?", const="true", metavar="BOOL", help=text)
        else:
            parser.add_argument(f"--{name}", metavar=_metavar(field), help=text)
    return parser


def _metavar(field: FieldInfo) -> str:
    kind = field.annotation
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(member.value for member in kind) + "}"
    if get_origin(kind) is tuple:
        return "A,B"
    return {int: "N", float: "SECONDS", Path: "FOLDER"}.get(kind, "TEXT") if isinstance(kind, type) else "TEXT"


def _default(name: str, field: FieldInfo) -> str:
    return "the user's cache" if name == "cache_dir" else _shown(field.default)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _wrong(details: Mapping[str, Any], given: Mapping[str, str]) -> str:
    message = str(details["msg"]).removeprefix("Value error, ")
    if not details["loc"]:
        return message
    name = str(details["loc"][0])
    message = message[:1].lower() + message[1:]
    if name in given:
        value = "" if name == "token" else f" {given[name]}"
        return f"--{name}{value}: {message}"
    value = "" if name == "token" else f"={os.environ.get(_variable(name), '')}"
    return f"{_variable(name)}{value}: {message}"


def _resolved(settings: ServiceSettings, given: Mapping[str, str], variables: Mapping[str, str]) -> str:
    lines = []
    for name in ServiceSettings.model_fields:
        origin = f"--{name}" if name in given else _variable(name) if variables.get(_variable(name)) else ""
        lines.append(f"  {name:<16} {_shown(getattr(settings, name)):<24} {origin}".rstrip())
    return "\n".join(lines)


def _shown(value: object) -> str:
    match value:
        case None | ():
            return "none"
        case SecretStr():
            return "set, not shown"
        case tuple():
            return ",".join(map(str, value))
        case Enum():
            return str(value.value)
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
    return str(value)

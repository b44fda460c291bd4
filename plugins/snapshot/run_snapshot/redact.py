"""Secrets out of whatever is stored: by setting name, by the look of the value, in URLs, patches and texts.

A name is split into words, so that `api_key`, `apiKey` and `API-KEY` are one, and `max_tokens`, `tokenizer` or
`key_size` are none. Names like `*_token`, which models use for `pad_token`, count only before known words (`hf_token`)
or over a value that looks random.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

__all__ = [
    "REDACTED",
    "Scrubber",
    "is_secret_file",
    "is_secret_name",
    "looks_random",
    "redact",
    "redact_patch",
    "redact_text",
]

REDACTED = "***"

Style = Literal["code", "settings"]


def _words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALONE = _words_of(
    "password passwd pwd passphrase passcode secret secrets credential credentials apikey privatekey authorization "
    "cookie accesskey secretkey authtoken accesstoken pat dsn"
)
_BEFORE_KEY = _words_of(
    "api access private secret signing encryption account service ssh auth master storage app client license shared "
    "subscription deploy webhook hmac session"
)
_BEFORE_TOKEN = _words_of(
    "access auth api bearer refresh session hf hub huggingface github gitlab gh wandb bot security csrf deploy personal "
    "private secret oauth jwt slack discord telegram mlflow databricks npm pypi registry vault login user service aws "
    "azure gcp openai anthropic tracking id write read notion sentry"
)
_HARMLESS_END = _words_of(
    "file path env name names length len size count policy min max enabled required type field header format prompt "
    "dir folder fraction ratio rate weight budget attempts scheme provider hash manager"
)
_URL_USER = re.compile(
    r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)(?P<userinfo>[^\s/?#'\"<>@]*(?:@[^\s/?#'\"<>@]*)*)@(?=[\w\[])"
)
_QUERY = re.compile(r"(?P<lead>[?&;](?P<name>[\w.-]+)=)(?P<value>[^&#;\s'\"]+)")
_QUERY_SIGNATURES = _words_of(
    "sig signature key x-amz-signature x-amz-credential x-amz-security-token x-goog-signature"
)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z0-9 ]*(?:PRIVATE KEY|CERTIFICATE REQUEST)[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)"
    r"|\bhf_[A-Za-z0-9]{16,}|\bapi_org_[A-Za-z0-9]{16,}"
    r"|\bsk-(?:ant-|proj-|or-|svcacct-)?[A-Za-z0-9_-]{16,}|\b[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|\bwhsec_[A-Za-z0-9]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bgl(?:pat|dt|rt|ptt|soat|cbt)-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA|AGPA|AROA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bya29\.[\w-]{16,}|\bGOCSPX-[\w-]{16,}"
    r"|\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bxapp-[A-Za-z0-9-]{10,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|\bnpm_[A-Za-z0-9]{20,}|\bpypi-[\w-]{16,}|\bdckr_pat_[\w-]{16,}"
    r"|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bdapi[0-9a-f]{32}\b|\bdo[opr]_v1_[0-9a-f]{32,}|\bhv[sb]\.[\w-]{16,}|\bshp(?:at|ca|pa|ss)_[0-9a-f]{32}"
    r"|\br8_[A-Za-z0-9]{20,}|\bgsk_[A-Za-z0-9]{20,}|\bnvapi-[\w-]{20,}|\bpplx-[A-Za-z0-9]{20,}|\blin_api_[A-Za-z0-9]{20,}"
    r"|\bPMAK-[A-Za-z0-9-]{20,}|\bgl(?:sa|c)_[A-Za-z0-9_=]{20,}|\btskey-[\w-]{16,}|\bAGE-SECRET-KEY-1[A-Z0-9]{20,}"
    r"|\bsq0[a-z]{3}-[\w-]{16,}|\b\d{8,10}:AA[\w-]{30,}|\bntn_[A-Za-z0-9]{20,}|\bwandb_v1_[\w-]{16,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=discord\.com/api/webhooks/)[\w/-]+",
    re.DOTALL,
)
_HEADER = re.compile(r"(?i)(?P<lead>\b(?:bearer|basic)\s+)(?P<value>[A-Za-z0-9._~+/=-]{8,})")
_CONNECTION = re.compile(r"(?i)(?P<lead>\b(?:password|pwd|accountkey|sharedaccess\w+)\s*=\s*)(?P<value>[^;\s'\"&]+)")
_NETRC = re.compile(r"(?P<lead>\blogin\s+\S+\s+password\s+)(?P<value>\S+)")
_FLAG = re.compile(r"(?P<lead>--?(?P<name>[A-Za-z][\w.-]*)[ =])(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s'\"]+)")
_ASSIGN = re.compile(
    r"(?P<lead>(?P<name>[A-Za-z_][\w.-]*)(?:[\"']\s*\])?[\"']?(?:\s*:\s*(?:str|bytes))?\s*(?:=>|:=|=|:)[ \t]*)"
    r"(?P<value>[rbuf]{0,2}\"\"\"[\s\S]*?\"\"\"|[rbuf]{0,2}\"(?:[^\"\\\n]|\\.)*\"|[rbuf]{0,2}'(?:[^'\\\n]|\\.)*'|[^\s,;\"'#{}\[\]()]+)"
)
_SETTINGS_FILES = (".env", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".json", ".sh", ".properties", ".conf", ".tfvars")
_SECRET_FILES = re.compile(
    r"(?i)(?:^|/)(?:\.env(?:\..+)?|.*\.(?:pem|key|p12|pfx|jks|keystore|kdbx)|id_(?:rsa|dsa|ecdsa|ed25519)|\.netrc|_netrc|\.pypirc|"
    r"\.npmrc|\.git-credentials|credentials(?:\..+)?|secrets?(?:\.[^/]+)?|.*service[-_]account.*\.json|token(?:\.txt)?)$"
)


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret.

    >>> is_secret_name("OPENAI_API_KEY"), is_secret_name("max_tokens"), is_secret_name("key_size")
    (True, False, False)
    """
    words = _words(name)
    return bool(words) and words[-1] not in _HARMLESS_END and (_holds_secret(words) or words == ["token"])


def looks_random(value: str) -> bool:
    """Whether a text looks generated: 16 characters or more, letters and digits mixed, no spaces, not a path or URL."""
    return (
        len(value) >= 16
        and re.fullmatch(r"[A-Za-z0-9+=_.~-]+", value) is not None
        and any(c.isdigit() for c in value)
        and any(c.isalpha() for c in value)
        and not re.search(r"\.\w{1,5}$", value)
        and len(set(value)) >= 8
    )


def redact_text(text: str, *, style: Style = "code") -> str:
    """`text` without the users of its URLs, without known shapes of keys, and without values given to secret names.

    In `code` only quoted values of secret names are taken out; in `settings` (YAML, .env) bare ones too.

    >>> redact_text("postgresql://ada:pw@db/mlflow")
    'postgresql://***@db/mlflow'
    """
    text = _SHAPES.sub(REDACTED, text)
    text = _URL_USER.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _QUERY.sub(_query_value, text)
    for pattern in (_HEADER, _CONNECTION, _NETRC):
        text = pattern.sub(lambda match: _bare(match, style), text)
    text = _FLAG.sub(lambda match: _named(match, "settings", quoted_only=False), text)
    return _ASSIGN.sub(lambda match: _named(match, style, quoted_only=style == "code"), text)


def redact(value: Any, name: str = "") -> Any:
    """A copy of nested settings, as plain types, with secrets replaced.

    >>> redact({"api_key": "abc", "max_tokens": 16})
    {'api_key': '***', 'max_tokens': 16}
    """
    if isinstance(value, Mapping):
        named = value.get("name", value.get("key"))
        pair = isinstance(named, str) and is_secret_name(named)
        return {str(k): REDACTED if pair and k == "value" else redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(item, name) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_secret_name(name) or (isinstance(value, str) and _random_token(name, value)):
        return REDACTED
    if isinstance(value, int | float):
        return value
    return redact_text(str(value))


def redact_patch(patch: str) -> str:
    """A git patch with the secrets of its lines replaced; each file in its own style."""
    parts = re.split(r"(?m)^(?=diff --git )", patch)
    return "".join(redact_text(part, style=_style(part)) for part in parts)


def is_secret_file(path: str) -> bool:
    """Whether a file of this name (`.env`, `*.pem`, `credentials.json`) is kept by digest only."""
    return _SECRET_FILES.search(path) is not None


class Scrubber:
    """Takes out known secret values wherever they turn up, besides all that `redact_text` takes out."""

    def __init__(self, sources: Iterable[Mapping[str, Any]] = ()) -> None:
        self._values: set[str] = set()
        for source in sources:
            self._collect(source, "")

    def text(self, text: str, *, style: Style = "code") -> str:
        """`text` without secrets."""
        return self.known(redact_text(text, style=style))

    def tree(self, value: Any) -> Any:
        """Nested plain values without secrets."""
        return self.known_in(redact(value))

    def known_in(self, value: Any) -> Any:
        """Nested plain values without the known secrets; names say nothing of what they hold."""
        if isinstance(value, dict):
            return {self.known(key): self.known_in(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.known_in(item) for item in value]
        return self.known(value) if isinstance(value, str) else value

    def known(self, text: str) -> str:
        """`text`, redacted already, without the known values."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return text

    def _collect(self, value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                self._collect(item, str(key))
        elif isinstance(value, list | tuple):
            for item in value:
                self._collect(item, name)
        elif isinstance(value, str) and len(value) >= 8 and (is_secret_name(name) or _random_token(name, value)):
            self._values.add(value)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def _holds_secret(words: list[str]) -> bool:
    if any(word in _ALONE or word.endswith(("password", "passphrase", "apikey")) for word in words):
        return True
    pairs = set(pairwise(words))
    return any((b == "key" and a in _BEFORE_KEY) or (b == "token" and a in _BEFORE_TOKEN) for a, b in pairs)


def _random_token(name: str, value: str) -> bool:
    words = _words(name)
    return bool(words) and words[-1] in ("token", "key", "auth") and looks_random(value)


def _query_value(match: re.Match[str]) -> str:
    name = match["name"]
    secret = is_secret_name(name) or name.lower() in _QUERY_SIGNATURES
    return f"{match['lead']}{REDACTED}" if secret else match[0]


def _bare(match: re.Match[str], style: Style) -> str:
    """A header's or connection string's value; in code a variable or a call is no value."""
    value = match["value"]
    if style == "code" and match["lead"].rstrip().endswith("=") and not any(c.isdigit() for c in value):
        return match[0]
    if REDACTED in value or re.fullmatch(r"[a-z]{1,12}", value):
        return match[0]
    return f"{match['lead']}{REDACTED}"


def _named(match: re.Match[str], style: Style, *, quoted_only: bool) -> str:
    name, value = match["name"], match["value"]
    quote = re.match(r"[rbuf]{0,2}(\"\"\"|\"|')", value)
    content = value[quote.end() : -len(quote[1])] if quote else value
    if not content or REDACTED in content or not _is_value(content, bool(quote), style, quoted_only):
        return match[0]
    secret = is_secret_name(name) and (_words(name) != ["token"] or looks_random(content) or style == "settings")
    if not secret and not _random_token(name, content):
        return match[0]
    return f"{match['lead']}{quote[0]}{REDACTED}{quote[1]}" if quote else f"{match['lead']}{REDACTED}"


def _is_value(content: str, quoted: bool, style: Style, quoted_only: bool) -> bool:
    """Whether this can be a secret itself, not a type, a variable, a placeholder or a switch."""
    if content.lower() in ("none", "null", "true", "false", "str", "int", "bytes", "optional") or content.startswith(
        "$"
    ):
        return False
    if quoted or not quoted_only:
        return True
    return looks_random(content) and style == "code" and "." not in content and not content.isidentifier()


def _style(part: str) -> Style:
    head = part.split("\n", 1)[0].strip().strip('"')
    return "settings" if head.endswith(_SETTINGS_FILES) or re.search(r"/\.env\b", head) else "code"

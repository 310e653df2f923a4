"""Free text with everything private replaced by placeholders that are the same in all files of a bundle."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fsdp_doctor.bundle.addresses import without_addresses, without_hosts
from fsdp_doctor.bundle.private_kinds import IS_PLACEHOLDER, PLACEHOLDER, SECRET_KINDS, PrivateKind
from fsdp_doctor.bundle.private_text import BEGIN, HOSTS, NOBODY, NOT_SECRET, PUBLIC_HOSTS, RULES, USERS

_SHORTEST_NAME = 3
# A secret that was found by its name is replaced wherever it stands, if no word of a text can be like it.
_SHORTEST_SECRET = 8


class Redactor:
    """Replaces what is private. Let it learn all texts first, then clean them.

    homes, hosts, users: names that are private wherever they stand.
    counts: how often each kind was replaced.
    """

    def __init__(self, homes: Iterable[str] = (), hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self.counts: Counter[PrivateKind] = Counter()
        self._placeholders: dict[str, str] = {}
        # A text is of the kind that it was first taken for, wherever it stands.
        self._kinds: dict[str, PrivateKind] = {}
        self._of_kind: Counter[PrivateKind] = Counter()
        self._homes = {home for home in homes if len(home) > 1}
        self._hosts = {host for host in hosts if _is_name(host)}
        self._users = {user for user in users if _is_name(user)}
        self._secrets: set[str] = set()
        self._cleaned: dict[str, str] = {}

    @classmethod
    def of_this_machine(cls) -> Redactor:
        """One that knows the names of this host and user from the start."""
        host = socket.gethostname()
        users = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
        with contextlib.suppress(OSError, KeyError, ImportError):
            users.append(getpass.getuser())
        found = cls(homes=[os.path.expanduser("~")], users=users)
        for name in (host, os.environ.get("HOSTNAME", "")):
            found.learn_host(name)
        return found

    def learn(self, text: str) -> None:
        """Takes in the names of hosts and users and the secrets that ``text`` shows to be such."""
        self._hosts |= {name for name in _found(HOSTS, text) if _is_name(name) and not PUBLIC_HOSTS.fullmatch(name)}
        self._users |= {name for name in _found(USERS, text) if _is_name(name)}
        for rule in RULES:
            if rule.kind in SECRET_KINDS:
                for value in filter(_is_remarkable, _found([rule.pattern], text)):
                    self._secrets.add(value)
                    self._kinds.setdefault(value, rule.kind)

    def learn_host(self, name: str) -> None:
        """Takes in the name of a host."""
        self._hosts |= {part for part in (name, name.split(".")[0]) if _is_name(part)}

    def learn_values(self, value: Any) -> None:
        """The same of all strings in JSON."""
        self.learn("\n".join(dict.fromkeys(_strings(value))))

    def clean(self, text: str) -> str:
        """``text`` without what is private."""
        for home in sorted(self._homes, key=len, reverse=True):
            text = _whole(home).sub(self._as("home directory"), text)
        for rule in RULES:
            text = rule.pattern.sub(self._group(rule.kind), text)
        text = self._without_names(text, "named key or secret", self._secrets)
        text = without_hosts(text, lambda host: self._placeholder("host", host))
        text = without_addresses(text, lambda address: self._placeholder(_address_kind(address), address))
        text = self._without_names(text, "host", self._hosts)
        return self._without_names(text, "user name", self._users)

    def clean_values(self, value: Any) -> Any:
        """JSON with all its strings cleaned, and not its keys."""
        match value:
            case str():
                return self._clean_again(value)
            case list():
                return [self.clean_values(item) for item in value]
            case dict():
                return {key: self.clean_values(item) for key, item in value.items()}
            case _:
                return value

    def _clean_again(self, text: str) -> str:
        """A report has the same traceback in hundreds of cases; what is replaced in it is counted once."""
        if text not in self._cleaned:
            self._cleaned[text] = self.clean(text)
        return self._cleaned[text]

    def _without_names(self, text: str, kind: PrivateKind, names: Iterable[str]) -> str:
        present = sorted((name for name in names if name in text), key=len, reverse=True)
        if not present:
            return text
        pattern = re.compile(rf"{BEGIN}(?:{'|'.join(map(re.escape, present))})(?![A-Za-z0-9])")
        return pattern.sub(self._as(kind), text)

    def _as(self, kind: PrivateKind) -> Callable[[re.Match[str]], str]:
        return lambda match: self._placeholder(kind, match[0])

    def _group(self, kind: PrivateKind) -> Callable[[re.Match[str]], str]:
        def replaced(match: re.Match[str]) -> str:
            value = match["x"]
            begin, end = (at - match.start() for at in match.span("x"))
            # Code has the name as its value, too: password=password.
            harmless = kind in SECRET_KINDS and (NOT_SECRET.fullmatch(value) or value in match[0][:begin])
            if harmless or IS_PLACEHOLDER.match(value):
                return match[0]
            return match[0][:begin] + self._placeholder(kind, value) + match[0][end:]

        return replaced

    def _placeholder(self, kind: PrivateKind, value: str) -> str:
        if IS_PLACEHOLDER.match(value):
            return value
        kind = self._kinds.setdefault(value, kind)
        self.counts[kind] += 1
        if value not in self._placeholders:
            self._of_kind[kind] += 1
            self._placeholders[value] = f"{PLACEHOLDER[kind]}_{self._of_kind[kind]}"
        return self._placeholders[value]


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _strings(item)
        case dict():
            for item in value.values():
                yield from _strings(item)


def _found(patterns: Iterable[re.Pattern[str]], text: str) -> set[str]:
    return {match["x"].rstrip(".") for pattern in patterns for match in pattern.finditer(text)}


def _is_name(name: str) -> bool:
    plain = len(name) >= _SHORTEST_NAME and NOBODY.fullmatch(name) is None
    return plain and not name.isdigit() and IS_PLACEHOLDER.match(name) is None


def _address_kind(address: str) -> PrivateKind:
    return "IPv6 address" if ":" in address else "IPv4 address"


def _is_remarkable(value: str) -> bool:
    mixed = any(letter.isdigit() for letter in value) and any(letter.isalpha() for letter in value)
    return mixed and len(value) >= _SHORTEST_SECRET and not NOT_SECRET.fullmatch(value)


def _whole(path: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])")

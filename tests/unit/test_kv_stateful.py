"""The in-memory reference against a plain dict, over random sequences of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rdzv_plugins.kv import Entry, MemoryClient, MemoryServer, Version

NAMESPACES = st.sampled_from(["run", "run/2"])
KEYS = st.sampled_from(["a", "a/b", "a/c", "b", "é"])
VALUES = st.binary(max_size=3)


class MemoryMachine(RuleBasedStateMachine):
    versions: Bundle[Version] = Bundle("versions")

    def __init__(self) -> None:
        super().__init__()
        server = MemoryServer()
        self.clients = {name: MemoryClient(server, name) for name in ("run", "run/2")}
        self.model: dict[str, dict[str, bytes]] = {"run": {}, "run/2": {}}
        # What each version was handed out with: none may stand for anything else, ever.
        self.meant: dict[Version, tuple[str, str, bytes]] = {}

    def learn(self, namespace: str, key: str, entry: Entry) -> Version:
        fact = (namespace, key, entry.value)
        assert self.meant.setdefault(entry.version, fact) == fact
        return entry.version

    @rule(target=versions, namespace=NAMESPACES, key=KEYS, value=VALUES)
    def put(self, namespace: str, key: str, value: bytes) -> Version:
        version = self.clients[namespace].put(key, value)
        assert version not in self.meant
        self.model[namespace][key] = value
        return self.learn(namespace, key, Entry(value, version))

    @rule(
        namespace=NAMESPACES,
        key=KEYS,
        value=VALUES,
        expected=st.none() | consumes(versions) | st.integers(),
    )
    def compare_and_set(
        self, namespace: str, key: str, value: bytes, expected: Version | None
    ) -> None:
        held = self.model[namespace]
        before = self.clients[namespace].get(key)
        assert (before.value if before else None) == held.get(key)
        entry, written = self.clients[namespace].compare_and_set(key, value, expected)
        assert written == (expected == (before.version if before else None))
        if written:
            assert entry is not None
            assert entry.value == value
            assert entry.version not in self.meant
            held[key] = value
        else:
            assert entry == before
        if entry is not None:
            self.learn(namespace, key, entry)

    @rule(target=versions, namespace=NAMESPACES, key=KEYS)
    def read(self, namespace: str, key: str) -> Version:
        entry = self.clients[namespace].get(key)
        assert (entry.value if entry else None) == self.model[namespace].get(key)
        return self.learn(namespace, key, entry) if entry else "never handed out"

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, max_size=3))
    def delete(self, namespace: str, keys: list[str]) -> None:
        self.clients[namespace].delete_many(keys)
        for key in keys:
            self.model[namespace].pop(key, None)

    @rule(namespace=NAMESPACES, delta=st.integers(-5, 5))
    def add(self, namespace: str, delta: int) -> None:
        held = self.model[namespace]
        total = int(held.get("count", b"0")) + delta
        assert self.clients[namespace].add("count", delta) == total
        held["count"] = str(total).encode()

    @rule(namespace=NAMESPACES, values=st.dictionaries(KEYS, VALUES, max_size=3))
    def put_many(self, namespace: str, values: dict[str, bytes]) -> None:
        self.clients[namespace].put_many(values)
        self.model[namespace] |= values

    @rule(namespace=NAMESPACES, key=KEYS, version=st.none() | versions)
    def wait(self, namespace: str, key: str, version: Version | None) -> None:
        client = self.clients[namespace]
        entry = client.get(key)
        changed = entry is not None and entry.version != version
        assert client.wait(key, version, 0) == (entry if changed else None)

    @rule(namespace=NAMESPACES)
    def expire(self, namespace: str) -> None:
        self.clients[namespace].expire(0)
        self.model[namespace].clear()

    @rule(namespace=NAMESPACES)
    def interrupt(self, namespace: str) -> None:
        self.clients[namespace].interrupt()

    @invariant()
    def every_namespace_holds_what_the_model_holds(self) -> None:
        for namespace, client in self.clients.items():
            held = self.model[namespace]
            entries = client.list("")
            assert {key: entry.value for key, entry in entries.items()} == held
            below = {key for key in held if key.startswith("a/")}
            assert client.list("a/").keys() == below
            assert client.get_many(["a", "absent"]).keys() == held.keys() & {"a"}
            for key, entry in entries.items():
                self.learn(namespace, key, entry)


MemoryMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestMemory = MemoryMachine.TestCase

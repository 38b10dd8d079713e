"""Many clients, and many threads of one client, at once."""

from __future__ import annotations

from functools import partial

from rdzv_plugins.kv import Entry, KeyValueClient
from rdzv_plugins.testing.harness import Harness, Open, present
from rdzv_plugins.testing.threads import together

WRITERS = 6


class ConcurrencyTests(Harness):
    def test_every_creation_has_one_winner(self, open: Open) -> None:
        keys = [f"key-{number}" for number in range(100)]

        def run(client: KeyValueClient, name: bytes) -> dict[str, tuple[Entry | None, bool]]:
            return {key: client.compare_and_set(key, name, None) for key in keys}

        clients = [open() for _ in range(WRITERS)]
        results = together([partial(run, c, b"%d" % i) for i, c in enumerate(clients)])
        stored = clients[0].get_many(keys)
        for key in keys:
            won = [i for i, result in enumerate(results) if result[key][1]]
            assert len(won) == 1, f"{key} has the winners {won}"
            # A refused write returns the winner's entry.
            assert all(result[key][0] == stored[key] for result in results)
            assert stored[key].value == b"%d" % won[0]

    def test_every_version_is_replaced_once(self, open: Open) -> None:
        """If two writers replaced the same version, an increment would be lost."""
        each = 40

        def run(client: KeyValueClient) -> set[int]:
            written: set[int] = set()
            entry, won = client.get("key"), False
            while len(written) < each:
                number = int(present(entry).value) + 1
                entry, won = client.compare_and_set("key", b"%d" % number, present(entry).version)
                if won:
                    written.add(number)
            return written

        clients = [open() for _ in range(WRITERS)]
        clients[0].put("key", b"0")
        results = together([partial(run, client) for client in clients])
        assert present(clients[0].get("key")).value == b"%d" % (each * WRITERS)
        assert set().union(*results) == {*range(1, each * WRITERS + 1)}

    def test_additions_are_all_counted(self, open: Open) -> None:
        each = 40

        def run(client: KeyValueClient) -> list[int]:
            return [client.add("count", 1) for _ in range(each)]

        results = together([partial(run, open()) for _ in range(WRITERS)])
        sums = sorted(number for result in results for number in result)
        assert sums == [*range(1, each * WRITERS + 1)]

    def test_one_client_serves_many_threads(self, client: KeyValueClient) -> None:
        def run(name: str) -> None:
            for number in range(15):
                value = f"{name} {number}".encode()
                key = f"{name}/key"
                entry, won = client.compare_and_set(key, value, None)
                assert won
                assert client.get(key) == entry
                assert client.put(key, value + b"!") != present(entry).version
                assert client.wait(key, present(entry).version, 5) == client.get(key)
                client.put_many({f"{name}/{i}": value for i in range(3)})
                assert {*client.list(f"{name}/")} == {key, *(f"{name}/{i}" for i in range(3))}
                assert client.add(f"counts/{name}", 1) == number + 1
                client.delete_many([key, *(f"{name}/{i}" for i in range(3))])
                assert client.list(f"{name}/") == {}
                client.delete(f"{name}/none")

        together([partial(run, f"thread-{index}") for index in range(WRITERS)])

    def test_reader_sees_only_whole_values(self, open: Open) -> None:
        size = min(open().capabilities.max_value_bytes, 50_000)

        def write(client: KeyValueClient) -> None:
            for number in range(40):
                client.put("key", bytes([number]) * size)

        def read(client: KeyValueClient) -> None:
            for _ in range(40):
                entry = client.get("key")
                assert entry is None or entry.value == entry.value[:1] * size

        together([partial(write, open()), partial(write, open()), partial(read, open())])

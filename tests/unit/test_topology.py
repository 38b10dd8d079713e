"""A node's domain: given, told by Slurm or NVML; and the ranks of nodes of four domains."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv_plugins.process import factory
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.settings.topology import find_domain, levels

from .crowd import Crowd, Member

pytestmark = pytest.mark.rule("rank order")

NOTHING: dict[str, str] = {}


class TestGiven:
    def test_levels_are_separated_by_slashes(self) -> None:
        assert levels("spine1/leaf3/rack7") == ["spine1", "leaf3", "rack7"]
        assert find_domain("rack7", {"SLURM_TOPOLOGY_ADDR": "leaf.node"}) == "rack7"

    def test_an_empty_level_does_not_count(self) -> None:
        """It stands for a label that a node of the cluster does not have."""
        assert find_domain("/leaf3//rack7/", NOTHING) == "leaf3/rack7"

    @pytest.mark.parametrize("domain", ["", "//", "r" * 201])
    def test_what_names_no_domain_is_refused(self, domain: str) -> None:
        with pytest.raises(ValueError, match=r"option 'domain': '.*' must have 1 to 200"):
            Settings(domain=domain)

    @pytest.mark.parametrize("domain", ["$(SPINE)/rack7", "rack 7", "rack\n7"])
    def test_what_nobody_means_is_refused(self, domain: str) -> None:
        with pytest.raises(ValueError, match=r"must have neither spaces nor \$\(\.\.\.\)"):
            Settings(domain=domain)


class TestSlurm:
    @pytest.mark.parametrize(
        ("address", "pattern", "domain"),
        [
            ("root.cell1.iswi1r4.node386", "switch.switch.switch.node", "root/cell1/iswi1r4"),
            ("block7.node3", "block.node", "block7"),
            ("leaf[1-2].node3.example.org", "switch.node", "leaf[1-2]"),
            ("leaf1.node3", "", "leaf1"),
            ("node3", "node", None),
            ("node3.example.org", "node", None),
            ("", "", None),
        ],
    )
    def test_switches_and_blocks_are_levels(
        self, address: str, pattern: str, domain: str | None
    ) -> None:
        environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
        assert find_domain(None, environ) == domain


class Info(ctypes.Structure):
    """As nvidia-ml-py 13 declares it."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    )


class OldInfo(ctypes.Structure):
    """As earlier versions do: a string of 80 bytes, which a zero seems to end."""

    _fields_ = (("version", ctypes.c_uint), ("clusterUuid", ctypes.c_char * 80), *Info._fields_[2:])


class TestNvml:
    """No machine of the tests has GPUs: what NVML would answer there."""

    @pytest.fixture
    def nvml(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        nvml: Any = types.ModuleType("pynvml")
        nvml.NVMLError, nvml.NVML_SUCCESS, nvml.NVML_GPU_FABRIC_STATE_COMPLETED = LookupError, 0, 3
        nvml.c_nvmlGpuFabricInfoV_t = Info
        nvml.uuid, nvml.state, nvml.began, nvml.ended = bytes(range(16)), 3, 0, 0

        def begin() -> None:
            nvml.began += 1

        def end() -> None:
            nvml.ended += 1

        def tell(device: int, reference: Any) -> None:
            info = reference._obj
            ctypes.memmove(ctypes.byref(info, type(info).clusterUuid.offset), nvml.uuid, 16)
            # The first GPU is not in the fabric yet.
            info.state, info.status, info.cliqueId = (nvml.state if device else 1), 0, 7

        nvml.nvmlInit, nvml.nvmlShutdown, nvml.nvmlDeviceGetGpuFabricInfoV = begin, end, tell
        nvml.nvmlDeviceGetCount, nvml.nvmlDeviceGetHandleByIndex = lambda: 2, lambda index: index
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    @pytest.mark.parametrize("declared", [Info, OldInfo])
    def test_the_cluster_and_the_clique_are_levels(self, nvml: Any, declared: Any) -> None:
        nvml.c_nvmlGpuFabricInfoV_t = declared
        found = find_domain(None, NOTHING)
        assert found == "00010203-0405-0607-0809-0a0b0c0d0e0f/7"
        assert nvml.began == nvml.ended == 1

    def test_slurm_knows_better(self, nvml: Any) -> None:
        assert find_domain(None, {"SLURM_TOPOLOGY_ADDR": "leaf1.node3"}) == "leaf1"
        assert nvml.began == 0

    @pytest.mark.parametrize("lacks", ["cluster", "fabric", "driver", "function"])
    def test_a_host_without_a_fabric_has_no_domain(self, nvml: Any, lacks: str) -> None:
        def fail() -> None:
            raise LookupError("Driver Not Loaded")

        match lacks:
            case "cluster":
                nvml.uuid = bytes(16)
            case "fabric":
                nvml.state = 0
            case "driver":
                nvml.nvmlInit = fail
            case "function":
                del nvml.c_nvmlGpuFabricInfoV_t
        assert find_domain(None, NOTHING) is None
        assert nvml.began == nvml.ended

    def test_it_is_not_asked_where_no_option_needs_a_domain(self, nvml: Any) -> None:
        params = RendezvousParameters("redis", "", "run", 2, 4)
        assert factory._placed(Settings(node_unit=2), params).domain is None
        assert nvml.began == 0
        assert factory._placed(Settings(segment=2), params).domain
        assert nvml.began == 1


class TestAtTheStart:
    def placed(self, low: int, high: int, **options: Any) -> Settings:
        params = RendezvousParameters("redis", "", "run", low, high)
        return factory._placed(Settings(**options), params)

    def test_what_can_never_start_is_refused(self) -> None:
        with pytest.raises(ValueError, match="--nnodes=4:6 allows no multiple of 8 nodes"):
            self.placed(4, 6, node_unit=8)

    def test_segments_need_a_domain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SLURM_TOPOLOGY_ADDR", raising=False)
        with pytest.raises(ValueError, match="segment=2 needs the domain of this node"):
            self.placed(2, 4, segment=2)
        assert self.placed(2, 4, segment=2, domain="r1").domain == "r1"
        assert self.placed(2, 4, rank_order="topology").domain is None

    def test_slurms_domain_is_found_where_it_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "spine1.leaf2.node3")
        assert self.placed(2, 4, segment=2).domain == "spine1/leaf2"
        assert self.placed(2, 4).domain is None


class TestRanksOfFourDomains:
    """Sixteen nodes, four to a rack, whose names say nothing of it."""

    RULES = Rules(
        min_nodes=8,
        max_nodes=16,
        lease=15.0,
        interval=5.0,
        last_call_timeout=10.0,
        rank_order="topology",
    )

    def begin(self) -> tuple[Crowd, dict[str, Member]]:
        crowd = Crowd()
        members = {}
        for number in range(16):
            members[f"n{number}"] = crowd.join(f"n{number}", self.RULES, f"s/r{number % 4}")
            crowd.play(0.01)
        crowd.play_until(lambda: all(member.given for member in members.values()), 60.0)
        return crowd, members

    @staticmethod
    def ranks(crowd: Crowd, round_: int, size: int = 16) -> dict[str, int]:
        crowd.play_until(
            lambda: (crowd.document.round, crowd.document.phase) == (round_, Phase.RUNNING), 60.0
        )
        assert len(crowd.document.participants) == size
        return {node: rank for rank, node in enumerate(crowd.document.participants)}

    def test_each_rack_is_in_one_piece(self) -> None:
        crowd, _ = self.begin()
        ranks = self.ranks(crowd, 0)
        for rack in range(4):
            here = [ranks[f"n{rack + 4 * number}"] for number in range(4)]
            assert here == [*range(4 * rack, 4 * rack + 4)]

    @pytest.mark.parametrize("victim", ["n0", "n5", "n14"])
    @pytest.mark.parametrize("comes", ["before", "after"])
    def test_a_replacement_has_the_rank_of_the_lost_node(self, victim: str, comes: str) -> None:
        """``n0`` leads and is rank 0; the replacement is a spare, or comes before the last call."""
        crowd, members = self.begin()
        before = self.ranks(crowd, 0)
        rack = int(victim[1:]) % 4
        new = "a-replacement" if victim == "n14" else "n99"
        if comes == "before":
            # Another spare's name comes first, but it is of another rack.
            crowd.join("a-spare", self.RULES, f"s/r{(rack + 1) % 4}")
            crowd.join(new, self.RULES, f"s/r{rack}")
            crowd.play(12.0)
            assert crowd.document.round == 0
        members[victim].crash()
        if comes == "after":
            crowd.play(5.0)
            crowd.join(new, self.RULES, f"s/r{rack}")
        after = self.ranks(crowd, 1)
        assert after == {(new if node == victim else node): rank for node, rank in before.items()}

    def test_a_node_that_comes_later_is_the_last_of_its_rack(self) -> None:
        crowd, members = self.begin()
        self.ranks(crowd, 0)
        members["n5"].crash()
        fewer = self.ranks(crowd, 1, 15)
        assert [fewer[node] for node in ("n1", "n9", "n13", "n2")] == [4, 5, 6, 7]
        crowd.join("n5-again", self.RULES, "s/r1")
        ranks = self.ranks(crowd, 2)
        assert [ranks[node] for node in ("n1", "n9", "n13", "n5-again", "n2")] == [4, 5, 6, 7, 8]

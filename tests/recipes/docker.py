"""A Docker engine of our own, with images that are made of this host's files."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

from rdzv_plugins.testing.harness import until
from tests.recipes.pages import ROOT

# An image of this tree has no files of its own: /usr is the host's.
_FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp")
_LINKS = ("bin", "sbin", "lib", "lib64")


class Engine:
    """Debian's engine, which lies unpacked in $RDZV_RECIPES/docker, with Compose's own binary."""

    def __init__(self, folder: Path) -> None:
        recipes = Path(os.environ["RDZV_RECIPES"])
        root = recipes / "docker" / "usr"
        socket = f"unix://{folder}/docker.sock"
        extensions = next(root.glob("lib/*/xtables"))
        plugins = folder / "config" / "cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(Path(sys.executable).with_name("docker-compose"))
        # Debian chooses between two of these when the package is installed.
        commands = folder / "bin"
        commands.mkdir()
        for name in ("iptables", "ip6tables"):
            (commands / name).symlink_to(root / "sbin" / "xtables-nft-multi")
        self.environ = {
            **os.environ,
            "DOCKER_HOST": socket,
            "DOCKER_CONFIG": str(folder / "config"),
            "LD_LIBRARY_PATH": str(extensions.parent),
            "XTABLES_LIBDIR": str(extensions),
            "PATH": f"{commands}:{root}/bin:{root}/sbin:{os.environ['PATH']}",
        }
        self._log = folder / "dockerd.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    "dockerd", "--storage-driver=vfs", f"--data-root={folder}/data",
                    f"--exec-root={folder}/exec", f"--pidfile={folder}/docker.pid",
                    f"--host={socket}", "--bridge=none", "--iptables=false", "--ip6tables=false",
                    "--ip-forward=false", "--ip-masq=false",
                ],
                stdout=output, stderr=subprocess.STDOUT, env=self.environ, start_new_session=True,
            )  # fmt: skip
        ready = until(lambda: self.run("docker", "version").returncode == 0, 60)
        assert ready, self._log.read_text()[-4000:]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=120, check=False
        )

    def import_image(self, name: str) -> None:
        """Make an image that is complete once this host's /usr is mounted into it."""
        tree = io.BytesIO()
        with tarfile.open(fileobj=tree, mode="w") as archive:
            for folder in _FOLDERS:
                member = tarfile.TarInfo(folder)
                member.type, member.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
                archive.addfile(member)
            for link in _LINKS:
                member = tarfile.TarInfo(link)
                member.type, member.linkname = tarfile.SYMTYPE, f"usr/{link}"
                archive.addfile(member)
            archive.add("/etc/passwd", "etc/passwd")
        done = subprocess.run(
            ["docker", "import", "-", name], input=tree.getvalue(), env=self.environ,
            capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def close(self) -> None:
        # It ends its containers.
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def mounts() -> list[str]:
    """The folders of this host that the images lack, and those of the two environments."""
    folders = {"/usr", str(ROOT), os.environ["RDZV_RECIPES"]}
    if not sys.base_prefix.startswith("/usr"):
        folders.add(sys.base_prefix)
    return [f"{folder}:{folder}:ro" for folder in sorted(folders)]

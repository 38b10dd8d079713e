"""A worker in uninterruptible sleep, as where a disk or a GPU hangs; its argument is a file's name.

It waits for a child that shares its memory, as between vfork and exec, and the child for the other
end of a pipe of that name. SIGTERM does not wake it; SIGKILL does.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.mkfifo(sys.argv[1])
    opens = (os.POSIX_SPAWN_OPEN, 3, sys.argv[1], os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[opens])

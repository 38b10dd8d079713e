"""A member as a process of its own; its arguments: ``CLUSTER ADDRESS:PORT ADDRESS:PORT...``.

The first place is its own, the others are those of all members.
"""

import sys

from rdzv_plugins.peers.addresses import listen
from rdzv_plugins.settings.endpoint import parse_endpoint
from rdzv_plugins.stores.quorum.members import Members, Options
from rdzv_plugins.stores.quorum.server import MemberThread

if __name__ == "__main__":
    cluster, own, *every = sys.argv[1:]
    (place,) = parse_endpoint(own, default_port=0).hosts
    members = Members.of(",".join(every), Options(cluster=cluster))
    listener, index = listen(place[0], [place[1]]), members.hosts.index(place)
    member = MemberThread(listener, members.dialled, index, members.greeting, b"")
    member.start()
    member.join()

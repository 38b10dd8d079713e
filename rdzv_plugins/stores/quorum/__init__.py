"""Members of a quorum on a network, and their client: sockets around `rdzv_plugins.register`."""

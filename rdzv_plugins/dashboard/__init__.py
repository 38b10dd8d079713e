"""A page that shows all runs of a store while they go on; see docs/dashboard.md.

`poller` reads the store, `server` serves what it has read, ``page.*`` show it in the browser.
"""

"""Tests against real servers.

They stand on these modules:

- `stores`: the table of stores, and their servers; `topologies`: Redis in several processes;
  `credentials`: users, rights and certificates.
- `agents`: agents of one run, played by threads; `jobs`: real agents and their workers;
  `launchers`: torchrun under a change; `forked`: how programs start quickly.
- `hosts`: hosts with a network, and jobs on them.
- `pages`: the commands of the docs; `browser`: a page as a person sees it; `wheels`: the package.
- `programs`: what workers run, and a gateway.
"""

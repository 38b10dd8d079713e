"""``rdzv check``: will a job with these arguments work, and how well?

`job`, `host` and `store` check and yield `Finding`s. Facts about a store's server come from its
client's `KeyValueClient.inspect`. `plan` has the order of the checks, and their common meaning.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rdzv_plugins.cli.options import Access, print_json


def check(
    access: Access,
    run_id: Annotated[
        str | None,
        typer.Option("--rdzv-id", "-i", envvar="RDZV_ID", help="also check that this id is free"),
    ] = None,
    nnodes: Annotated[str, typer.Option(help="as for torchrun: N or MIN:MAX")] = "",
    local_addr: Annotated[str, typer.Option(help="as for torchrun: this node's address")] = "",
    peers: Annotated[str, typer.Option(help="host[:port],...: other nodes, to be dialled")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="write JSON, which rdzv docs check describes")
    ] = False,
) -> None:
    """Check before a job all that it needs: options, address, peers, store and run id.

    The store is tried in a temporary run, which is deleted. Exit status: 0, all is well; 1, it
    works, with warnings; 2, it will not work. See rdzv docs check.
    """
    from rdzv_plugins.cli.check import plan
    from rdzv_plugins.cli.check.job import Job

    job = Job.of(access, run_id, nnodes, local_addr, peers)
    made = []
    for finding in plan.carry_out(job):
        made.append(finding)
        if not as_json:
            plan.show(finding)
    status = plan.status(made)
    if as_json:
        print_json(plan.report(made))
    else:
        typer.echo(f"verdict: {plan.sentence(made)}")
    raise typer.Exit(status)

"""A TorchX component: rdzv run on any store, on any TorchX scheduler."""

from torchx import specs


def elastic(
    script: str,
    endpoint: str,
    backend: str = "quorum",
    nodes: str = "1:2",
    processes: int = 1,
    image: str = "train",
) -> specs.AppDef:
    """Starts an agent of rdzv run on each node.

    Args:
        script: the training script
        endpoint: the store: --rdzv-endpoint
        backend: its kind: --rdzv-backend
        nodes: MIN:MAX: --nnodes
        processes: processes of a node
        image: the image, or with local_cwd anything
    """
    least, most = (int(number) for number in nodes.split(":"))
    return specs.AppDef(
        name="train",
        roles=[
            specs.Role(
                name="train",
                image=image,
                min_replicas=least,
                num_replicas=most,
                entrypoint="rdzv",
                args=[
                    "run",
                    f"--rdzv-backend={backend}",
                    f"--rdzv-endpoint={endpoint}",
                    f"--rdzv-id={specs.macros.app_id}",
                    "--rdzv-conf=last_call_timeout=1",
                    f"--nnodes={nodes}",
                    f"--nproc-per-node={processes}",
                    script,
                ],
            )
        ],
    )

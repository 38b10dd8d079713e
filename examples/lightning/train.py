import os
import time

import lightning
import torch

import rdzv_plugins

CHECKPOINT = "checkpoint.ckpt"  # on all nodes the same file


class Checkpoint(lightning.Callback):
    """Save every 20 steps; and on all ranks at the same step, before a node leaves."""

    def on_train_batch_end(self, trainer, model, outputs, batch, index):
        step = trainer.global_step
        asked = rdzv_plugins.step(step)
        if asked or step % 20 == 0:
            trainer.save_checkpoint(CHECKPOINT)
            if trainer.is_global_zero:
                size, loss = trainer.world_size, outputs["loss"]
                print(f"step {step} in a world of {size}, loss {loss:.4f}", flush=True)
            rdzv_plugins.saved(step)


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            inputs = torch.randn(64, 8)
            yield inputs, inputs.sum(1, keepdim=True)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        time.sleep(0.05)  # stands for more work
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


trainer = lightning.Trainer(
    accelerator="cpu",  # with GPUs: "gpu"
    strategy="ddp",
    # Lightning compares these with the world's size, which changes from round to round.
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    max_steps=600,
    callbacks=[Checkpoint()],
    enable_checkpointing=False,
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(
    Model(),
    torch.utils.data.DataLoader(Batches(), batch_size=None),
    ckpt_path=CHECKPOINT if os.path.exists(CHECKPOINT) else None,
)

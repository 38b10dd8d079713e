import os
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


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

    def on_train_batch_end(self, outputs, batch, index):
        step, size = self.trainer.global_step, self.trainer.world_size
        if self.trainer.is_global_zero and step % 20 == 0:
            print(f"step {step} in a world of {size}, loss {outputs['loss']:.4f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


trainer = lightning.Trainer(
    accelerator="cpu",  # with GPUs: "gpu"
    strategy="ddp",
    # Lightning compares these with the world's size, which changes from round to round.
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    max_steps=600,
    callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=20, save_last=True)],
    logger=False,
    enable_progress_bar=False,
)
# "last": from the newest checkpoint, if there is one.
trainer.fit(Model(), torch.utils.data.DataLoader(Batches(), batch_size=None), ckpt_path="last")

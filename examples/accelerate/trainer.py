import time
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import rdzv_plugins

CHECKPOINTS = Path("checkpoints")  # on all nodes the same folder


class Checkpoint(TrainerCallback):
    """Have the Trainer save also when the run asks: on all ranks at the same step."""

    def on_step_end(self, arguments, state, control, **others):
        asked = rdzv_plugins.step(state.global_step)
        control.should_save = control.should_save or asked
        time.sleep(0.05)  # stands for more work

    def on_save(self, arguments, state, control, **others):
        if state.is_world_process_zero:
            print(f"step {state.global_step} in a world of {arguments.world_size}", flush=True)
        rdzv_plugins.saved(state.global_step)


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            inputs = torch.randn(8)
            yield {"inputs": inputs, "targets": inputs.sum(0, keepdim=True)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, inputs, targets):
        return {"loss": torch.nn.functional.mse_loss(self.layer(inputs), targets)}


arguments = TrainingArguments(
    output_dir=CHECKPOINTS,
    max_steps=600,
    save_steps=20,
    save_total_limit=2,
    use_cpu=True,  # with GPUs: leave it out
    disable_tqdm=True,
    report_to="none",
    remove_unused_columns=False,
)
trainer = Trainer(Model(), arguments, train_dataset=Batches(), callbacks=[Checkpoint()])
# The Trainer writes this file last: a checkpoint without it was cut short by a kill.
complete = CHECKPOINTS.glob("checkpoint-*/trainer_state.json")
newest = max(complete, key=lambda it: int(it.parent.name.split("-")[1]), default=None)
trainer.train(resume_from_checkpoint=newest and str(newest.parent))

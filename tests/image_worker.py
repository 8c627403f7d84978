"""A run of the digits by several processes, or one, that writes down the loss of each step. Started by torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from experiments.engine import task as tasks
from experiments.engine.queue import Options, perform
from experiments.engine.task import Task
from experiments.engine.trainer import Classifier
from experiments.registry import EXPERIMENTS


def run(out: Path, changes: dict[str, Any]) -> None:
    """Losses go to out/losses-RANK.jsonl as [epoch, step, loss], the number of the process to out/pid-RANK."""
    rank, plain = int(os.environ.get("RANK", "0")), Classifier.training_step

    def training_step(self: Classifier, batch: Any, batch_idx: int) -> Any:
        loss = plain(self, batch, batch_idx)
        with (out / f"losses-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.trainer.current_epoch, batch_idx, float(loss.detach())]) + "\n")
        return loss

    (out / f"pid-{rank}").write_text(str(os.getpid()))
    tasks.RECORDS, tasks.RUNS = out / "records", out / "runs"
    Classifier.training_step = training_step
    try:
        perform(Task(EXPERIMENTS["digits"], "smoke", changes), Options(), lambda done, text: None)
    finally:
        Classifier.training_step = plain


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))

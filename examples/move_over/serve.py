"""Serving: the checkpoint of the sharded training in the module of before, in one process, without any strategy.

python examples/move_over/serve.py --data adult.data.gz
"""

import argparse
from types import SimpleNamespace

import torch
from before import IncomeModel, make_data
from torchmetrics.classification import BinaryAUROC


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="adult.data, plain or .gz (default: synthetic data)")
    model = IncomeModel.load_from_checkpoint("after.ckpt", weights_only=True).eval()
    data = make_data(parser.parse_args().data)
    auc = BinaryAUROC(thresholds=1000)
    for rank in range(2):  # the rows that the two ranks of the training have tested
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2, current_epoch=0)
        data.setup("test")
        with torch.inference_mode():
            for batch in data.test_dataloader():
                auc.update(torch.sigmoid(model(batch)), batch.labels.long())
    print(f"served: test AUC {auc.compute():.6f}")


if __name__ == "__main__":
    main()

"""On a host of Ray's cluster: python examples/cluster/ray_train.py --workers=16 --folder=/shared/run1

Ray starts a worker for each rank, and starts all again if one fails, ten times at most.
"""

from datetime import timedelta
from typing import Any

from lightning_overlap.ray import RayOverlapStrategy  # isort: skip  # first: it says what to install if there is no Ray

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer
from train import make_parser, train


def worker(arguments: dict[str, Any]) -> str:
    strategy = RayOverlapStrategy(timeout=timedelta(minutes=5))
    return train(**arguments, devices="auto", strategy=strategy, plugins=[RayLightningEnvironment()])


if __name__ == "__main__":
    parser = make_parser()
    parser.add_argument("--workers", type=int, default=2, help="ranks; each has a CPU, with use_gpu=True a GPU")
    arguments = vars(parser.parse_args())
    num_workers, folder = arguments.pop("workers"), arguments["folder"].absolute()  # workers start in another folder
    trainer = TorchTrainer(
        worker,
        train_loop_config=arguments | {"folder": folder},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="ray",
            storage_path=str(folder),  # the same folder for each start of the run
            failure_config=FailureConfig(max_failures=10),
        ),
    )
    print(trainer.fit().return_value)  # rank 0's

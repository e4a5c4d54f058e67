"""A fit of a module that keeps a weight in a list. Functions that ranks run."""

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_strategy, make_trainer


def error_of_fit() -> str:
    module = Model(TABLE_WISE)
    module.tied = [module.ebc.embedding_bags["t0"].weight]
    try:
        make_trainer(make_strategy(module)).fit(module, datamodule=Batches(TABLE_WISE, 2))
    except ValueError as err:
        return f"ValueError: {err}"
    return "no error"

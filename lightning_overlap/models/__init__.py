"""Example models, DLRM and SparseNN: plain LightningModules with TorchRec tables."""

from .dlrm import DLRM as DLRM
from .sparse_nn import SparseNN as SparseNN

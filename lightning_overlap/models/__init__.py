"""Models to train with: ordinary LightningModules with TorchRec tables."""

from .dlrm import DLRM as DLRM
from .sparse_nn import SparseNN as SparseNN

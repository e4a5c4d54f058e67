"""Free the ids of a batch once they have been sent (`release_features`)."""

from typing import Any, NoReturn

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torch import never_compiled
from ..compat.torchrec import parts_of, set_values, set_weights


class FreedTensor:
    """Replaces the values or weights of a KeyedJaggedTensor: it has their device and type, and no numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.dtype, self.is_cuda = tensor.device, tensor.dtype, tensor.is_cuda

    def record_stream(self, stream: Any) -> None:
        """Do nothing: there is no memory to keep."""

    @never_compiled
    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "the ids of this batch were sent to the ranks that look them up, and release_features=True has given their "
            "memory back: a step can hand this KeyedJaggedTensor to its embedding module, once, and read its keys and "
            "lengths. To read its values or weights too, train with release_features=False."
        )

    @never_compiled
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks any object for these, for example to copy it
            raise AttributeError(name)
        self._refuse()

    __len__ = __iter__ = __getitem__ = __add__ = __mul__ = __array__ = _refuse

    @classmethod
    @never_compiled
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls._refuse(None)  # type: ignore[arg-type]


def release(kjt: KeyedJaggedTensor) -> None:
    """Let go of a KeyedJaggedTensor's values and weights, which an all-to-all under way may still hold."""
    values, _, weights = parts_of(kjt)
    for tensor, replace in ((values, set_values), (weights, set_weights)):
        if isinstance(tensor, Tensor):
            replace(kjt, FreedTensor(tensor))  # type: ignore[arg-type]

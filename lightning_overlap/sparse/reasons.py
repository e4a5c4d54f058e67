"""Why a module runs in its own forward, and how to avoid it."""

from collections.abc import Mapping

WRITTEN = (
    "its tables are written between two steps again and again (or their learning rates are set by hand, which only "
    "combined_optimizer can move while tables are looked up early)"
)
WRITTEN_IN_STEP = "its tables were written after its early lookup"
CHANGED_IN_PLACE = "its input was changed in place after its ids had been sent"
WITH_GRADIENTS = "it was called with gradients enabled in an evaluation"
OTHER_AUTOCAST = "it was called under another autocast than its early lookup"
CALLED_TWICE = "it was called more than once in a step"
NOT_AT_FIRST = "it was not called for the first batch"
NOT_FOR_ALL = "it was not called for a batch that has its input"

CALL = (
    "To overlap it, call it once per {step} with a KeyedJaggedTensor that is part of the batch. The dataset or the "
    "collate function can make it, or the module's hook: `def on_after_batch_transfer(self, batch, dataloader_idx): "
    "batch['sparse'] = self.make_inputs(batch); return batch`."
)
_WRITE_SELDOM = (
    "To overlap it, write its tables seldom, for example once an epoch: each time one lookup is repeated. Or train "
    "with pipeline='sparse_dist', which sends the ids early and looks up nothing early."
)
_CALL_ALWAYS = (
    "To overlap it, call it in every {step}, also in one that returns early: call it first, then return (None, say, to "
    "skip the batch)."
)
ADVICE: Mapping[str, str] = {  # by reason; the other reasons take `CALL`
    NOT_AT_FIRST: _CALL_ALWAYS,
    NOT_FOR_ALL: _CALL_ALWAYS,
    WRITTEN: _WRITE_SELDOM,
    WRITTEN_IN_STEP: _WRITE_SELDOM,
    CHANGED_IN_PLACE: "To overlap it, change its input in on_after_batch_transfer, or change a copy.",
    WITH_GRADIENTS: "To overlap it, call it without gradients (inference_mode of the Trainer, torch.no_grad).",
    OTHER_AUTOCAST: "To overlap it, leave autocast to Trainer(precision=...).",
}

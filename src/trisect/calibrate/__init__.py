"""Calibration: one replay loop and the moments it gathers."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from trisect.calibrate.fisher import fisher_information
from trisect.calibrate.moments import READINGS, Accumulator, recording
from trisect.calibrate.replay import Progress, Stream, in_batches
from trisect.calibrate.store import MomentsInfo, load_moments, read_info, save_moments
from trisect.calibrate.streams import TwoStreams
from trisect.models.streamed import walk
from trisect.models.view import LayerView, layer_views


def collect(
    model: nn.Module,
    ids: Tensor,
    reads: Callable[[int], frozenset[str]],
    *,
    batch_size: int | None = None,
    split: bool = False,
    place: str = "auto",
    progress: Progress | None = None,
) -> Iterator[tuple[LayerView, dict[str, Tensor]]]:
    """Yield each layer with its moments; `reads` says which ones a layer needs.

    When a layer is yielded the hidden states are already past it, so it may be rewritten at once and the
    layers after it still see the dense model. With `split`, the processes of a run share the windows.
    """
    windows = in_batches(ids, batch_size=batch_size, split=split)
    stream = Stream.embed(model, layer_views(model), windows.batches, place=place)
    for view in walk(model):
        with recording(view, Accumulator(reads(view.index), shared=windows.shared)) as accumulator:
            stream.advance(view, progress=progress)
        yield view, accumulator.means(view.index)

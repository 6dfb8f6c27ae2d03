"""Calibration: one replay loop and the moments it gathers."""

from trisect.calibrate.fisher import fisher_information
from trisect.calibrate.moments import READINGS, collect
from trisect.calibrate.replay import Progress, Stream
from trisect.calibrate.store import MomentsInfo, load_moments, read_info
from trisect.calibrate.streams import TwoStreams
